"""A node: one engine behind an OpenAI-compatible HTTP server."""
