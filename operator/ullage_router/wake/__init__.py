"""Pools that sleep: requests for them are held, and said to be wanted, until an engine is there."""
