"""Builds prompts: cleansing, chat templates, truncation, summaries and tools.

The package depends on texts, tokens and the engines' maximum context length, but not on queues.
"""
