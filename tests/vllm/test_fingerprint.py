"""Two copies of a model compute alike and share KV; what decides bits is told."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ullage_common.wire.fingerprint import differences
from ullage_engine.protocol.messages import Ready
from ullage_engine.worker.device import HostTier
from ullage_kv import Arena


def test_two_copies_share_kv_and_changed_weights_do_not(
    start_here: Callable[..., Any], write_checkpoint: Any, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    source = write_checkpoint(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    )
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    arena = Arena.create(16 << 20)

    def ready(folder: Path) -> Ready:
        started = start_here(folder, host_tier=HostTier(arena.path, arena.num_bytes))
        message: Ready = started.ready(started.state())
        return message

    first = ready(source)
    second = ready(copy)
    assert first.kv_space == second.kv_space != b""
    assert first.fingerprint == second.fingerprint
    facts = first.fingerprint.facts
    assert (facts["computed_by"], facts["torch"]) == ("vllm", torch.__version__)
    assert facts["processor"]
    assert facts["args"] == '{"block_size":32}'

    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    changed = ready(copy)
    assert changed.kv_space != first.kv_space
    found = differences({"first": first.fingerprint, "changed": changed.fingerprint})
    assert found.keys() == {"weights"}
    arena.close()
