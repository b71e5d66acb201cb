"""Options of the command line that more than one file names. harness/run.py imports this before the packages are there,
so this file may meet Python 3.8.
"""

PAIRED = ("same_within", "fail_on_regression")  # they say how --against compares
