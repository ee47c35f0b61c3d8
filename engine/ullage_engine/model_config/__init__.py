"""The shapes, layer kinds and data types of models, read from config.json for each family.

This package describes models and computes nothing. It depends on neither weights nor kernels.
"""
