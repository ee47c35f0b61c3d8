"""A worker that computes with vLLM: `python -m ullage_engine.vllm_worker`.

It speaks `ullage_engine.protocol.messages` as the native worker does, so that the server around it
cannot tell them apart. Nothing else imports this room, and only `vllm_core` imports vLLM.
"""
