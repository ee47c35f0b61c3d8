"""Compares Ullage with llama.cpp's server and vLLM."""
