"""What a model is: its shapes, layer kinds and data types, read from Hugging Face's `config.json`
for each supported family.

It describes models and computes nothing, so it knows neither weights nor kernels.
"""
