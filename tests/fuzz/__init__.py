"""Bytes of strangers for everything that decodes them."""
