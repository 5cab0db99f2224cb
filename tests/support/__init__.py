"""Rigs that tests share: clients, fake nodes, tiny models, engines and their processes, and the soak
(`chaos`).
"""
