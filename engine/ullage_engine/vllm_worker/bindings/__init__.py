"""Bindings to vLLM. No other package imports vLLM.

The bindings are written for a single version of vLLM and read its private state: the scheduler's
requests, the block pool and the block tables of its KV cache managers. When vLLM is upgraded,
tests/vllm/test_contract.py shows what has changed.
"""
