"""Chat templates, tool formats and special tokens, as router and engine both apply them.

The package knows texts, tokens and messages. It knows neither channels nor servers.
"""
