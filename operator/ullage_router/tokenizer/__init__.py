"""Text to token ids, with the tokenizer that the engines publish.

The package does not know requests. Prompts are rendered in the packages above it.
"""
