"""Text to token ids and back, from tokenizer.json or GGUF metadata.

It knows no model and no request; both the server and the quantisation tool read it without torch.
"""
