"""Loads weights from GGUF, safetensors and quantised checkpoints.

It stores the weights, converted to the form in which the engine uses them, in a file that outlives
the worker. This package depends on formats and tensor names. It must not depend on layers, rank
processes or requests.
"""
