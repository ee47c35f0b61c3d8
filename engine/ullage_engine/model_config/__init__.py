"""The shapes, layer kinds and data types of models, read from config.json for each family.

It describes models and computes nothing. It knows neither weights nor kernels.
"""
