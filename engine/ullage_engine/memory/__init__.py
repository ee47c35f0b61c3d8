"""Arithmetic of memory: the ledger of reservations, shared devices, and pressure levels.

It counts bytes and blocks. It knows neither torch nor gRPC, and asks no device.
"""
