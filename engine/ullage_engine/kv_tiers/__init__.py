"""KV outside the device, in the server's process: the tiers, and answers to the worker's queries.

This room owns the KV store and decides which blocks are loaded and which are computed. It may know
messages and the KV store. It must not know the scheduler or the engine's services.
"""
