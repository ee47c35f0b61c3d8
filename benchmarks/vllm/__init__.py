"""vLLM inside Ullage: next to its own server, and after a worker was replaced."""
