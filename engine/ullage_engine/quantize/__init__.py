"""The offline tool `ullage quantize`: writes a quantised copy of a model.

Serving never imports it; it knows model_loader and layers, and nothing of servers or schedulers.
"""
