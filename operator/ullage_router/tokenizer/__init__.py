"""Tokenises texts with the tokenizers that engines publish.

This package does not depend on request handling. The packages that use it render the prompts.
"""
