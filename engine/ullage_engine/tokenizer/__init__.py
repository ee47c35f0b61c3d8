"""Converts text to token ids and back, with tokenizer.json or GGUF metadata.

This package depends on neither models nor requests. The server and the quantisation tool use it
without torch.
"""
