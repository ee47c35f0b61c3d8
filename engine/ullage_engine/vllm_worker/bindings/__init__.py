"""Bindings to vLLM. Only this package imports vLLM.

The bindings fit one version of vLLM and read its private state: the scheduler's requests, the block
pool and the block tables of its KV cache managers. tests/vllm/test_contract.py shows what changes
in a new version.
"""
