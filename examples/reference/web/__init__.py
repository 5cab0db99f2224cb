"""HTTP serving shared by node and router: start, listen, refuse, stop."""
