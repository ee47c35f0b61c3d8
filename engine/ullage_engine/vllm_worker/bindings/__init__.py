"""The bindings to vLLM. Only this folder imports it.

The bindings are written for one version of vLLM and read private state: the scheduler's requests,
its block pool and the block tables of its KV cache managers. tests/vllm/test_contract.py shows the
changes of a new version.
"""
