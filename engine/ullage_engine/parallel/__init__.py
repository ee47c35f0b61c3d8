"""The layout of a model over tensor and pipeline ranks, and the transport between them.

It knows layouts and transport, and nothing of layers, workers or requests.
"""
