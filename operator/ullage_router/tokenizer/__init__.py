"""Text to token ids, with the tokenizer that the engines publish.

This room knows no requests: prompts are rendered above it.
"""
