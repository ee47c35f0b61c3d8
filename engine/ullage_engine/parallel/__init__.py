"""The layout of a model over tensor and pipeline ranks, and the transport between ranks.

This package contains only layouts and transport. It does not depend on layers, workers or requests.
"""
