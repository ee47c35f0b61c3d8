"""Computes how many bytes a model needs before its weights are downloaded or loaded.

The sizes come from the functions that lay out prepared weights, KV blocks and arenas, so that an
estimate cannot differ from them. This package must not depend on servers, schedulers or workers.
"""
