"""Memory accounting: the ledger of reservations, shared devices, and pressure levels.

The package counts bytes and blocks. It imports neither torch nor gRPC, and queries no device.
"""
