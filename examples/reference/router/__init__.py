"""A router that sends each request to a prefill node, then to a decode node."""
