"""Compare predicted with measured bytes for every model family.

Each configuration is measured in a separate process. The benchmark measures the growth of the
resident memory when weights are mapped and when arenas and pools are allocated, and the blocks that
the scheduler takes from the KV pool for requests that really run. The exit status is 1 if a
prediction is off by more than 3 %. The benchmark takes about a minute on two idle cores.

examples:
  python -m benchmarks predict
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch

from benchmarks.support.options import SMOLLM2, new_parser
from benchmarks.support.small_models import MODELS, write_model
from ullage_common.config.engine import ModelSection
from ullage_common.request_cost import CacheGroup, MemoryProfile, predict
from ullage_engine.kernels.arena import StepLimits
from ullage_engine.kernels.kv_pool import StatePool, scratch_blocks
from ullage_engine.model_config.dtypes import DTYPES
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.model_loader.prepare import FLOAT32, MATRICES, VOCABULARY
from ullage_engine.model_loader.tensor_plan import TensorPlan, plan_tensors
from ullage_engine.native.library import instruction_set
from ullage_engine.protocol.requests import EngineRequest, PromptLogprobs, SamplingParams
from ullage_engine.protocol.step_plan import Moves, SampledToken, StepPlan, state_slots
from ullage_engine.quantization.formats import TILE_GROUPS
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.scheduler.estimates import OutputLengthEstimator, ThroughputEstimator
from ullage_engine.scheduler.scheduler import Scheduler, SchedulerLimits
from ullage_engine.worker.device import MemoryMeter, give_back_freed, touch_pages
from ullage_engine.worker.engine import EngineCore

TOLERANCE = 0.03
TIME_LIMIT_S = 120
"""Maximum seconds for measuring one configuration."""
NUM_BLOCKS = 256
PROMPTS = range(20, 356, 21)
"""Prompt lengths that have every remainder modulo the block size once. For one prompt in 16, the
prediction includes a block that the prompt's last token never needs."""
OUTPUT = 2
LIMITS = StepLimits(
    max_tokens=256 + 16, max_rows=16, max_model_len=1024, gather_tokens=2048, itemsize=0
)
TILE_FACTOR_BYTES = 4
"""Bytes of the float16 scale and offset of each group in the native library's tiles."""
CPU = torch.device("cpu")
Format = Literal["none", "int8", "mxfp4"]
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One configuration to measure."""

    source: str
    dtype: str
    format: Format = "none"
    """int8 is quantized from the weights. mxfp4 is the checkpoint's own format for experts."""


@dataclass(frozen=True)
class Prediction:
    """One predicted size and the measured size, in bytes."""

    what: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1


def main() -> int:
    parser = new_parser("predict", __doc__)
    parser.add_argument(
        "--measure",
        nargs=3,
        metavar=("SOURCE", "DTYPE", "FORMAT"),
        help="measure only this, as JSON",
    )
    options = parser.parse_args()
    if options.measure:
        print(json.dumps([asdict(line) for line in measure(Case(*options.measure))]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        results = [table(name, case, in_child(case)) for name, case in cases(Path(folder))]
    print(f"largest error {max(results):.2%}, accepted {TOLERANCE:.0%}")
    return int(max(results) > TOLERANCE)


def cases(folder: Path) -> Iterator[tuple[str, Case]]:
    """Yield every configuration. `folder` has only one random model at a time."""
    yield "SmolLM2-135M", Case(SMOLLM2, "bfloat16")
    yield "SmolLM2-135M", Case(SMOLLM2, "float32")
    yield "SmolLM2-135M", Case(SMOLLM2, "bfloat16", "int8")
    for index, (name, config) in enumerate(MODELS.items()):
        source = write_model(name, folder / "model")
        format: Format = "mxfp4" if "quantization_config" in config else "none"
        yield name, Case(source, ("bfloat16", "float32")[index % 2], format)
        shutil.rmtree(folder / "model")


def table(name: str, case: Case, lines: list[Prediction]) -> float:
    """Print the predictions of one configuration, and return their largest error."""
    format = "" if case.format == "none" else f", {case.format}"
    print(f"{name}, {case.dtype}{format}\n  {'':<18}{'predicted':>14}{'measured':>14}{'error':>9}")
    for line in lines:
        print(f"  {line.what:<18}{line.predicted:>14,}{line.measured:>14,}{line.error:>9.2%}")
    return max(abs(line.error) for line in lines)


def in_child(case: Case) -> list[Prediction]:
    """Measure in a new process, whose memory contains nothing else."""
    command = [sys.executable, "-m", "benchmarks", "predict", "--measure"]
    command += [case.source, case.dtype, case.format]
    environment = {**os.environ, "GOMP_SPINCOUNT": "1000"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=environment, timeout=TIME_LIMIT_S, check=True
    )
    return [Prediction(**line) for line in json.loads(done.stdout)]


def measure(case: Case) -> list[Prediction]:
    """Compare all sizes that the memory ledger predicts, in the order of a worker's startup."""
    dtype = DTYPES[case.dtype]
    quantization: Literal["none", "int8"] = "int8" if case.format == "int8" else "none"
    with tempfile.TemporaryDirectory() as folder:

        def load() -> LoadedModel:
            section = ModelSection(source=case.source, name="case", quantization=quantization)
            return load_weights(section, CPU, dtype, Path(folder), lambda done, total: None)

        model_config = rehearse(mapped(load()), dtype)
        loaded, weights = grown(lambda: mapped(load()))

    runner = ModelRunner(loaded, CPU, dtype, replace(LIMITS, itemsize=dtype.itemsize))
    _, arenas = grown(runner.allocate_arena)
    lines = [
        Prediction("weights", weights_bytes(model_config, dtype, case.format), weights),
        Prediction("arenas", runner.step_arena_bytes + runner.sampler_arena_bytes, arenas),
    ]
    return lines + pool_lines(runner, dtype)


def pool_lines(runner: ModelRunner, dtype: torch.dtype) -> list[Prediction]:
    model_config = runner.model_config
    _, pools = grown(lambda: runner.allocate_kv(NUM_BLOCKS))
    _, states = grown(lambda: new_states(model_config, dtype))
    profile = make_profile(model_config, dtype)
    num_blocks = NUM_BLOCKS + scratch_blocks(model_config)
    pool = pools - states
    lines = [
        Prediction("KV pool", num_blocks * profile.block_bytes, pool),
        requests_line(runner, profile, pool / num_blocks),
    ]
    if model_config.num_conv_layers:
        size = profile.state_bytes_per_sequence
        lines.append(Prediction("state pool", state_slots(LIMITS.max_rows) * size, states))
    return lines


def rehearse(loaded: LoadedModel, dtype: torch.dtype) -> ModelConfig:
    """Run everything once at a small scale, and release the memory.

    The first use of a function maps its code, which is neither weights nor arena. A worker's ledger
    counts such memory under `workspace`, which is measured instead of predicted.
    """
    small = StepLimits(
        max_tokens=32,
        max_rows=1,
        max_model_len=64,
        gather_tokens=64,
        itemsize=dtype.itemsize,
    )
    runner = ModelRunner(loaded, CPU, dtype, small)
    runner.allocate_arena()
    runner.allocate_kv(1)
    new_states(loaded.model_config, dtype)
    return loaded.model_config


def mapped(loaded: LoadedModel) -> LoadedModel:
    touch_pages(loaded.tensors.values(), CPU)
    return loaded


def grown(act: Callable[[], T]) -> tuple[T, int]:
    """Run `act`, and return its result and the growth in resident memory."""
    meter = MemoryMeter(CPU)
    give_back_freed()
    before = meter.used_bytes()
    result = act()
    give_back_freed()
    return result, meter.used_bytes() - before


def new_states(model_config: ModelConfig, dtype: torch.dtype) -> StatePool:
    return StatePool(model_config, state_slots(LIMITS.max_rows), dtype, CPU)


def requests_line(runner: ModelRunner, profile: MemoryProfile, measured_block: float) -> Prediction:
    """Compare the predicted KV of each request with the maximum KV that the request held."""
    predicted = 0
    held = 0.0
    for prompt in PROMPTS:
        predicted += predict(profile, prompt, OUTPUT, OUTPUT).kv_bytes
        held += blocks_held(runner, profile, prompt) * measured_block
    return Prediction(f"{len(PROMPTS)} requests' KV", predicted, round(held))


class Watching:
    """A runner that records the maximum KV that is allocated while it computes."""

    def __init__(self, runner: ModelRunner, allocated: Callable[[], int]) -> None:
        self.most = 0
        self._runner = runner
        self._allocated = allocated

    def take_prompt_logprobs(self) -> list[PromptLogprobs]:
        return self._runner.take_prompt_logprobs()

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        self.most = max(self.most, self._allocated())
        return self._runner.execute(plan)

    def move(self, moves: Moves) -> None:
        self._runner.move(moves)


def blocks_held(runner: ModelRunner, profile: MemoryProfile, prompt: int) -> int:
    limits = SchedulerLimits(
        LIMITS.max_model_len,
        LIMITS.max_rows,
        256,
        True,
        2048,
        replay_tokens=runner.model_config.replay_tokens,
    )

    throughput = ThroughputEstimator()
    scheduler = Scheduler(profile, limits, throughput, OutputLengthEstimator(LIMITS.max_model_len))
    watching = Watching(runner, lambda: profile.kv_pool_bytes - scheduler.stats().kv_free_bytes)
    engine = EngineCore(scheduler, watching, throughput)

    request = EngineRequest(
        request_id="r",
        token_ids=[7 + i % 97 for i in range(prompt)],
        num_prompt_tokens=prompt,
        max_tokens=OUTPUT,
        sampling=SamplingParams(temperature=0.0),
    )

    if refusal := engine.submit(request):
        raise RuntimeError(f"the request was refused: {refusal}")
    while engine.has_work:
        engine.step()
    return watching.most // profile.block_bytes


def make_profile(model_config: ModelConfig, dtype: torch.dtype) -> MemoryProfile:
    itemsize = dtype.itemsize
    group = CacheGroup(bytes_per_token=model_config.kv_bytes_per_token(itemsize))
    return MemoryProfile(
        block_tokens=LIMITS.block_tokens,
        groups=(group,),
        state_bytes_per_sequence=model_config.state_bytes(dtype.itemsize),
        activation_bytes_per_token=0,
        sampler_bytes_per_sequence=0,
        prefill_chunk_tokens=256,
        kv_pool_bytes=NUM_BLOCKS * LIMITS.block_tokens * group.bytes_per_token,
    )


def weights_bytes(model_config: ModelConfig, dtype: torch.dtype, format: Format) -> int:
    """Return the total bytes of all parameters, without duplicates and without padding."""
    return sum(tensor_bytes(plan, dtype, format) for plan in plan_tensors(model_config))


def tensor_bytes(plan: TensorPlan, dtype: torch.dtype, format: Format) -> int:
    count = torch.Size(plan.shape).numel()
    kind = plan.name.rpartition(".")[2]
    if format == "int8" and instruction_set() and kind in MATRICES | VOCABULARY:
        group = max(size for size in TILE_GROUPS if plan.shape[-1] % size == 0)
        return count + count // group * TILE_FACTOR_BYTES
    if format == "int8" and kind in MATRICES:  # and a scale for each row
        return count + count // plan.shape[-1] * dtype.itemsize
    if format == "mxfp4" and kind in ("experts_gate_up", "experts_down"):
        return count // 2 + count // 32
    return count * (torch.float32 if kind in FLOAT32 else dtype).itemsize
