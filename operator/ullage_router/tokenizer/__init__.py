"""Tokenisation of text with the tokenizer that the engines publish.

This package does not depend on requests. Higher-level packages render the prompts.
"""
