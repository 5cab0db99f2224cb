"""The demo: one prompt answered by a prefill/decode pair and by a single node, side by side."""
