"""How plans run: arrays, start-up, plan cache, selection, reports."""
