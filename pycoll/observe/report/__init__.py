"""What a trace, or the dumps of a failure, say in words, in a table, and on a page.

`analysis` counts, `advice` judges, `page` draws; `failure` reads dumps.
"""
