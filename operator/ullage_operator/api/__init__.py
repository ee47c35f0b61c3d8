"""The `LLMService` API: the spec, its defaults and validation, quantities, names and settings.

This package contains only data types and validation. It uses neither a cluster nor a clock.
"""
