"""Tiers of KV memory: the store alone, engines with tiers, and vLLM's offloading."""
