"""Connectors to start from when you write a store: each is one file to copy, and neither is a store to rely on.

They share no code, although they could: a store that is copied must not need the other one.

`block_store` loads and saves asynchronously, block by block; `layer_store` synchronously, layer by layer. The guide
`docs/writing-a-connector.md` builds on them.
"""
