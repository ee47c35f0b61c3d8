"""Whole models on a GPU: decode steps against their floor, mixed steps in constant memory, and
tokens equal to a CPU's. Three parts of `benchmarks/gpu.py`.
"""

import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from gpu_kernels import Device, Figure, Rates
from small_models import MODELS, write_model

from ullage_common.config.engine import ModelSection
from ullage_engine.kernels.arena import BLOCK_TOKENS, GATHER_TOKENS, StepLimits
from ullage_engine.model_config.model_config import LayerSpec, ModelConfig
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.model_loader.prepare import is_matrix
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.protocol.messages import SamplingParams
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.quantization.formats import Encoding, Format, chosen_encoding, pack, quantise
from ullage_engine.runner.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")
TURNS = 4
"""Sequences that mixed steps compute at a time, and those that are compared."""
GROWTH_ON_CPU_MIB = 64.0
"""What a process may grow by on a CPU: its heap is not constant to the byte."""


@dataclass(frozen=True)
class ModelSizes:
    """What models are measured with."""

    dense: ModelConfig
    formats: tuple[Format | None, ...]
    """Formats of the dense model's weights; None: the computing type."""
    batches: tuple[int, ...]
    context: int
    """Tokens behind each decode."""
    mixed_steps: int
    families: Mapping[str, dict[str, Any]]
    """Names in `small_models.MODELS`, and what their configurations have instead."""
    tokens: int
    """Generated tokens of each prompt."""


def dense_config(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama", layers=(LayerSpec(),) * layers, hidden=hidden, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=hidden // heads, intermediate=hidden * 7 // 2, vocab=vocab,
        max_position=4096, rope_theta=5e5, rms_eps=1e-5, tied=False,
    )  # fmt: skip


FULL = ModelSizes(
    dense=dense_config(32, 4096, 32, 8, 128_256),
    formats=(None, "int8", "int4"),
    batches=(1, 8, 32, 128, 256),
    context=1024,
    mixed_steps=1000,
    families={name: {} for name in MODELS},
    tokens=16,
)
_NARROW = {
    "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64,
}  # fmt: skip
TINY = ModelSizes(
    dense=dense_config(2, 64, 4, 2, 128),
    formats=(None, "int8"),
    batches=(1, 3),
    context=40,
    mixed_steps=20,
    families={
        "llama, grouped heads, tied": _NARROW,
        "lfm2_moe": {**_NARROW, "moe_intermediate_size": 32},
    },
    tokens=3,
)


def decode_steps(device: Device, sizes: ModelSizes, rates: Rates) -> Iterator[Figure]:
    """Steps of a dense model, greedy tokens on the host included: the share of the time in which
    the device copies as many bytes as a step reads."""
    for format in sizes.formats:
        loaded = random_model(device, sizes.dense, format)
        rows, blocks = max(sizes.batches), -(-sizes.context // BLOCK_TOKENS)
        runner = make_runner(loaded, device, rows, rows * blocks, max_model_len=sizes.context)
        runner.warm_up()
        for batch in sizes.batches:
            chunks = [_decode(row, sizes.context, blocks) for row in range(batch)]
            took = device.seconds(partial(runner.execute, StepPlan(chunks)))
            kv = sizes.context * sizes.dense.kv_bytes_per_token(device.dtype.itemsize)
            embedding = loaded.tensors["embedding"].nbytes  # read by rows
            floor = (loaded.nbytes - embedding + batch * kv) / rates.copied
            name = f"{format or 'plain'} step, {batch} x {sizes.context}, {took * 1e3:.2f} ms"
            yield Figure(name, floor / took, "of its floor", 0.5 if format is None else None)
        del runner, loaded


def random_model(device: Device, config: ModelConfig, format: Format | None) -> LoadedModel:
    """Makes random weights on the device, and quantises matrices as the loader does."""
    tensors: dict[str, torch.Tensor] = {}
    encodings: dict[str, Encoding] = {}
    for plan in plan_tensors(config):
        weights = device.random(*plan.shape).mul_(plan.shape[-1] ** -0.5)
        if format is None or not is_matrix(plan):
            tensors[plan.name] = weights
            continue
        rows, columns = plan.shape
        encoding = chosen_encoding(format, (rows, columns))
        quantised = quantise(weights, encoding, device.dtype)
        encodings[plan.name] = encoding
        pieces = pack(quantised, encoding, device.dtype)
        tensors |= {f"{plan.name}.{piece}": each for piece, each in pieces.items()}
    return LoadedModel(config, tensors, sum(each.nbytes for each in tensors.values()), encodings)


def make_runner(
    loaded: LoadedModel, device: Device, rows: int, num_blocks: int, max_model_len: int = 512
) -> ModelRunner:
    limits = StepLimits(
        max_tokens=max(256, rows),
        max_rows=rows,
        max_model_len=max_model_len,
        gather_tokens=GATHER_TOKENS,
        itemsize=device.dtype.itemsize,
    )
    runner = ModelRunner(loaded, device.torch, device.dtype, limits)
    runner.allocate_arena()
    runner.allocate_kv(num_blocks)
    return runner


def _decode(row: int, context: int, blocks: int) -> Chunk:
    """The last token of a context, in blocks of its own."""
    return Chunk(
        request_id=str(row),
        token_ids=[7],
        start=context - 1,
        block_ids=list(range(row * blocks, (row + 1) * blocks)),
        sampling=GREEDY,
        history=[7] * context,
        num_prompt_tokens=context,
    )


@dataclass
class Sequence:
    """One prompt that is continued, with blocks and states of its own."""

    index: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams = GREEDY
    computed: int = 0
    """Tokens whose KV is there."""
    num_chunks: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def next_chunk(self, limit: int) -> Chunk:
        """Returns the next tokens, at most so many, as computed."""
        start, end = self.computed, min(len(self.tokens), self.computed + limit)
        # What a step reads it does not write.
        slot = 2 * self.index + self.num_chunks % 2
        self.computed, self.num_chunks = end, self.num_chunks + 1
        return Chunk(
            request_id=str(self.index),
            token_ids=self.tokens[start:end],
            start=start,
            # Dealt like cards, so that no sequence's blocks are neighbours.
            block_ids=[self.index + TURNS * block for block in range(-(-end // BLOCK_TOKENS))],
            sampling=self.sampling if end == len(self.tokens) else None,
            history=self.tokens,
            num_prompt_tokens=self.num_prompt_tokens,
            state_slot=slot ^ 1 if start else None,
            next_state_slot=slot,
        )


def run_step(runner: ModelRunner, sequences: list[Sequence], limit: int) -> None:
    """Computes the next chunk of each sequence, at most so many tokens of each."""
    chunks = [sequence.next_chunk(limit) for sequence in sequences]
    # Decodes come first.
    chunks.sort(key=lambda chunk: len(chunk.token_ids) > 1)
    by_name = {str(sequence.index): sequence for sequence in sequences}
    for token in runner.execute(StepPlan(chunks)):
        by_name[token.request_id].tokens.append(token.token_id)


def mixed_steps(device: Device, sizes: ModelSizes) -> Iterator[Figure]:
    """Steps of prompts and decodes with several kinds of sampling, in the memory that warm-up
    took."""
    name = next(iter(sizes.families))
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_family(name, sizes.families[name], Path(folder), device)
        runner = make_runner(loaded, device, TURNS, TURNS * 32)
        runner.warm_up()
        generator = random.Random(1)
        sequences = [new_sequence(generator, index, loaded) for index in range(TURNS)]
        before = Memory.of(device)
        for _ in range(sizes.mixed_steps):
            run_step(runner, sequences, generator.choice([8, 64, 64]))
            sequences = [
                new_sequence(generator, each.index, loaded)
                if len(each.output) > generator.randint(1, 200) or len(each.tokens) > 480
                else each
                for each in sequences
            ]
        after = Memory.of(device)
    grown = (after.used - before.used) / (1 << 20)
    most = 0.0 if device.torch.type == "cuda" else GROWTH_ON_CPU_MIB
    yield Figure(f"memory after {sizes.mixed_steps} mixed steps", grown, "MiB more", most, True)
    retries = float(after.num_retries - before.num_retries)
    yield Figure("allocations that had to free memory first", retries, "", 0.0, True)


class Memory(NamedTuple):
    """What torch holds of a device; of a CPU what the process has resident."""

    used: int
    num_retries: int

    @classmethod
    def of(cls, device: Device) -> "Memory":
        if device.torch.type != "cuda":
            return cls(psutil.Process().memory_info().rss, 0)
        stats = torch.cuda.memory_stats(device.torch)
        return cls(stats["reserved_bytes.all.current"], stats["num_alloc_retries"])


def new_sequence(generator: random.Random, index: int, loaded: LoadedModel) -> Sequence:
    prompt = [
        generator.randrange(loaded.model_config.vocab) for _ in range(generator.randint(1, 250))
    ]
    kinds = [GREEDY, SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.9, top_k=50)]
    return Sequence(index, prompt, len(prompt), generator.choice(kinds))


def equal_tokens(device: Device, sizes: ModelSizes) -> Iterator[Figure]:
    """Greedy tokens of every family in float32, on the device and on the CPU."""
    ours, oracle = Device(device.torch, torch.float32), Device(CPU, torch.float32)
    for name, changes in sizes.families.items():
        with tempfile.TemporaryDirectory() as folder:
            wanted, computed = (
                generated(load_family(name, changes, Path(folder), each), each, sizes.tokens)
                for each in (oracle, ours)
            )
        yield agreement(name, wanted, computed)


def agreement(name: str, wanted: list[list[int]], computed: list[list[int]]) -> Figure:
    """Returns the share of tokens that are equal, which has to be all of them."""
    pairs = [
        pair for both in zip(wanted, computed, strict=True) for pair in zip(*both, strict=True)
    ]
    share = sum(one == other for one, other in pairs) / len(pairs)
    return Figure(name, share, "of tokens equal", 1.0)


def generated(loaded: LoadedModel, device: Device, num_tokens: int) -> list[list[int]]:
    """Continues several prompts at once, each of them in several chunks."""
    generator, vocab = random.Random(3), loaded.model_config.vocab
    runner = make_runner(loaded, device, TURNS, TURNS * 32)
    sequences = []
    for index in range(TURNS):
        prompt = [generator.randrange(vocab) for _ in range(40 + 50 * index)]
        sequences.append(Sequence(index, prompt, len(prompt)))
    while running := [each for each in sequences if len(each.output) < num_tokens]:
        run_step(runner, running, 64)
    return [each.output for each in sequences]


def load_family(name: str, changes: dict[str, Any], folder: Path, device: Device) -> LoadedModel:
    """Writes a random model of a family, and loads it as an engine does."""
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_model(name, checkpoint, changes)
    model = ModelSection(source=f"file://{checkpoint}", name="random")
    prepared = folder / device.torch.type
    return load_weights(model, device.torch, device.dtype, prepared, lambda done, total: None)
