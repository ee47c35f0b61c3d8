"""Loading of weights from GGUF, safetensors and quantised checkpoints.

The prepared weights are a file that outlives the worker. This room knows formats and tensor names.
It must not know layers, processes of ranks or requests.
"""
