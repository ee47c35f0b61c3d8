"""KV tiers outside the device, and the broker that gives workers access to them.

This package runs in the server process. It owns the KV store and decides which blocks are loaded
and which are computed. It may depend on messages and the KV store, but not on the scheduler or the
engine's services.
"""
