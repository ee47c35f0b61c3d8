"""The API of `LLMService`: the spec with its defaults, checks, quantities, names and settings.

This package has only data and validation. It depends on neither a cluster nor a clock.
"""
