"""Builds prompts: cleansing, chat templates, truncation, summaries and tools.

The package uses only texts, the tokenizer and the engines' maximum context length. It does not
depend on how requests are queued.
"""
