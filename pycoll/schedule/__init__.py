"""Schedules: what moves, and everything that judges it without running it."""
