"""Builds prompts: cleansing, chat templates, truncation, summaries and tools.

The package depends on texts, tokens and the maximum context length of the engines, but not on
queues.
"""
