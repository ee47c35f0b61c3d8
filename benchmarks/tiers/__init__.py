"""Benchmarks of the KV tiers: the store alone, engines with tiers, and vLLM's offloading."""
