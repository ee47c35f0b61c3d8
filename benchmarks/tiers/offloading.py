"""Checks whether vLLM's own offloading of KV to host memory runs on this machine."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.support.processes import free_ports

MIB = 1 << 20
VLLM_START_S = 600.0
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
"""Shape of SmolLM2-135M. Whether vLLM offloads KV does not depend on the weights."""
ERROR = re.compile(r"(?:^|\s)([A-Z]\w*(?:Error|Exception)|Exception): (.+)$", re.MULTILINE)


def measure_vllm(python: Path) -> dict[str, str]:
    """Start vLLM with its own offloading to host memory, and return its outcome."""
    if not python.exists():
        return {"outcome": "not installed", "detail": f"no {python}: make install-vllm"}
    with tempfile.TemporaryDirectory(prefix="ullage-vllm-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        [port] = free_ports(1)
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
        command += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
        command += ["--max-model-len", "4096", "--kv-cache-memory-bytes", str(256 * MIB)]
        command += ["--kv-offloading-size", "1", "--host", "127.0.0.1", "--port", str(port)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        try:
            return _vllm_outcome(process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _vllm_outcome(process: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    deadline = time.monotonic() + VLLM_START_S
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8", errors="replace")
        if process.poll() is not None:
            errors = [f"{kind}: {what}" for kind, what in ERROR.findall(text)]
            return {"outcome": "refused", "detail": errors[0] if errors else text[-400:]}
        if "Application startup complete" in text:
            return {"outcome": "runs", "detail": "it offloads here; nothing is compared yet"}
        time.sleep(0.5)
    return {"outcome": "not ready", "detail": f"within {VLLM_START_S:g} s"}
