"""Brings a model's weights from GGUF, safetensors and quantised checkpoints into memory that
outlives the worker.

It knows formats and tensors by name, and nothing of layers, ranks' processes or requests.
"""
