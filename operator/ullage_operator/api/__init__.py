"""The `LLMService` object: its specification with the defaults of its schema, quantities, names and
settings.

It is data and validation; it knows no cluster and no clock.
"""
