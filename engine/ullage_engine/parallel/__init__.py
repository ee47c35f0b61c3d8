"""How a model is laid out over tensor and pipeline ranks, and how ranks send tensors to one
another.

It knows layouts and transport, and nothing of layers, workers or requests.
"""
