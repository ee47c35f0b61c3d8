"""KV outside the device, in the server's process: the tiers, and what its worker asks of them.

It owns the KV store and decides what is loaded and what is computed. It may know messages and the
KV store, and neither the scheduler nor the engine's services.
"""
