"""How often a layer of decodes makes the device begin something, which takes 5 to 10 µs each."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullage_engine.kernels import triton
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.runner.model_runner import ModelRunner

LAYER = {
    "norm_row": 2,
    "aten.mm": 2,  # q, k and v; gate and up
    "rotate_heads": 1,
    "attend_split": 1,
    "merge_splits": 1,
    "gate_columns": 1,
    "aten.addmm_": 2,  # output and down, each with the residual
}


class Launches(TorchDispatchMode):
    """Counts torch's operations that are no views; kernels are added by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not operation.is_view:
            self.names[str(operation.overloadpacket)] += 1
        return operation(*args, **kwargs or {})


def launches_of_step(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of four decodes, in float8 KV."""
    from ullage_engine.kernels.triton import attention, layer

    limits = StepLimits(
        max_tokens=64, max_rows=8, max_model_len=512, gather_tokens=512, itemsize=4, fp8_kv=True
    )
    cpu = torch.device("cpu")
    runner = ModelRunner(loaded, cpu, torch.float32, limits, wrap=lambda name, matrix: matrix)
    runner.allocate_arena()
    runner.allocate_kv(32)

    launches = Launches()

    def launch(kernel: Any, grid: tuple[int, ...], *operands: object, **constants: object) -> None:
        launches.names[kernel.fn.__name__] += 1

    for module in (attention, layer):
        monkeypatch.setattr(module, "launch", launch)
    chunks = [Chunk(str(row), [5], 300, list(range(32)), None, [], 0) for row in range(4)]
    with launches:
        runner.hidden(StepPlan(chunks))
    return launches.names


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_is_ten_launches(
    family: str,
    random_model: Callable[..., Any],
    load: Callable[..., LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(triton, "runs_on", lambda device: True)
    counts = []
    for layers in (1, 2):
        folder = tmp_path / str(layers)
        sizes = {"num_hidden_layers": layers, "head_dim": 16}
        random_model(family, 1, **sizes).save_pretrained(folder)
        counts.append(launches_of_step(load(f"file://{folder}"), monkeypatch))
    assert counts[1] - counts[0] == LAYER
