"""Worker that runs models with vLLM: `python -m ullage_engine.vllm_worker`.

It exchanges the messages of `ullage_engine.protocol.messages` with the server, just like the native
worker, so the server cannot tell the two apart. No other package imports this one.
"""

import os

# vLLM reads these variables on import. Multiprocessing is off because the worker reads the block
# pool between steps, and because one process fails as a whole.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Spawn rank processes instead of forking them: this process has threads and sockets.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
# vLLM's log lines go to the worker's own handlers.
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
