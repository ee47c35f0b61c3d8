"""Benchmarks of vLLM inside Ullage: next to vLLM's own server, and after a lost worker."""
