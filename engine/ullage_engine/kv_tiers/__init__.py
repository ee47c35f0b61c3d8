"""KV outside the device, in the server's process: the tiers, and answers to the worker's queries.

The room owns the KV store and decides which blocks are loaded and which are computed. It may know
messages and the KV store, and neither the scheduler nor the engine's services.
"""
