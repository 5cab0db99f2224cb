"""What node and router have in common: how they start, stop, listen, and say no."""
