"""Text to token ids and back, from tokenizer.json or GGUF metadata.

It knows neither models nor requests. The server and the quantisation tool read it without torch.
"""
