"""Move bytes between two processes in several ways, and compare them. `lab/bench/transports.py` is the program."""
