"""A worker that computes with vLLM: `python -m ullage_engine.vllm_worker`.

It speaks `ullage_engine.protocol.messages` as the native worker does, so that the server around it
cannot tell them apart. Nothing else imports this room.
"""

import os

# vLLM reads these when it is imported. In one process: the block pool is read between steps, and
# one process dies as a whole.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Ranks are processes of their own from the start: this one has threads and sockets.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
# Its lines go to the handlers that the worker has.
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
