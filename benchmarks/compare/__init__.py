"""Ullage next to llama.cpp's server and vLLM."""
