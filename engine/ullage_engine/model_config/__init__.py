"""Model shapes, layer types and data types, read from each family's config.json.

This package only describes models and computes nothing. It depends on neither weights nor kernels.
"""
