"""A reference engine, its HTTP node, a router over such nodes, and the demo: a whole host for kvferry, in plain Python."""
