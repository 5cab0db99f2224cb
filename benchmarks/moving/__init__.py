"""Move bytes between two processes in several ways, and compare them. `benchmarks/transports.py` is the program."""
