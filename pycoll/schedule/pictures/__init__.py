"""Schedules as pictures and as text: `transfers` lists who moves what when, `draw` draws it.

Uses `language` and `cost`. Read `transfers` first.
"""
