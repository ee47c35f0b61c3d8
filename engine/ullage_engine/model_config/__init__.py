"""Model shapes, layer types and data types, read from each family's config.json.

This package describes models and runs no computation. It depends on neither weights nor kernels.
"""
