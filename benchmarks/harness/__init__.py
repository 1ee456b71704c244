"""What the benchmarks share. It may use pycoll and its command line.

`start` starts ranks and compiles what is written in C++; `ranks` is what ranks use: batches of
calls, contests, functions of C++; `pages` writes tables, pages and JSON. Read `start` first.
"""
