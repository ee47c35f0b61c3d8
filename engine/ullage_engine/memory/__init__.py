"""Arithmetic of memory: the ledger of reservations, and pressure levels.

It counts bytes and blocks; it knows neither torch nor gRPC, and asks no device.
"""
