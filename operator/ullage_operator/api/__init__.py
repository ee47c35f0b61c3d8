"""The API of `LLMService`: the spec with its defaults, checks, quantities, names and settings.

This room holds data and validation. It knows no cluster and no clock.
"""
