"""Loads weights from GGUF, safetensors and quantised checkpoints.

The weights are converted to the form that the engine uses, and stored in a file that outlives the
worker. This package depends on formats and tensor names. It must not depend on layers, rank
processes or requests.
"""
