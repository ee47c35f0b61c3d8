"""Builds prompts: cleansing, chat templates, truncation, summaries and tools.

The package knows texts, tokens and the longest context of the engines. It does not know queues.
"""
