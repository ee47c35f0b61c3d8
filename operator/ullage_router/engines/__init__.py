"""Tracks the state of engines, loads their models, and sends them requests.

The state comes from the headroom reports in which each engine streams its free memory and its load.
This package does not choose the engine for a request.
"""
