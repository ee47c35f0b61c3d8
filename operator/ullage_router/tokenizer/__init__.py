"""Tokenisation of text with the tokenizers that engines publish.

This package does not depend on requests. Higher-level packages render the prompts.
"""
