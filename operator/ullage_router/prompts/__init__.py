"""Builds prompts: cleansing, chat templates, truncation, summaries and tools.

The package knows texts and tokens. Of engines it knows only the longest context, and of queues
nothing.
"""
