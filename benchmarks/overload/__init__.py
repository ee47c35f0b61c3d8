"""Overload tests: an open loop of too many requests, and refused clients that retry."""
