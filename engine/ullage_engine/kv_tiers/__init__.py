"""The server's part of KV outside the device: the tiers, and a broker for the worker's queries.

This package owns the KV store and decides which blocks are loaded and which are computed. It may
depend on messages and the KV store, but not on the scheduler or the engine's services.
"""
