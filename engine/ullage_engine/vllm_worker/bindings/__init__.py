"""What this room uses of vLLM; nothing outside this folder imports it.

It is written for one version of vLLM and reads what has no public name there: the scheduler's
requests, its block pool and the block tables of its KV cache managers. tests/vllm/test_contract.py
says which of them a new version has changed.
"""
