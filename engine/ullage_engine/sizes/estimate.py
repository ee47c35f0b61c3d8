"""The bytes of a model's weights, KV and buffers, for each format in which it can be served."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ullage_common.config.engine import PREFILL_CHUNK_TOKENS
from ullage_common.model_sizes import (
    QUANTIZATIONS,
    FormSizes,
    LengthSizes,
    ModelSizes,
    SizesRequest,
)
from ullage_common.process.cores import usable_cores
from ullage_engine.kernels.arena import (
    BLOCK_TOKENS,
    GATHER_TOKENS,
    SLICE_TOKENS,
    StepLimits,
    sampler_arena,
    step_arena,
)
from ullage_engine.layers.native_decoder import auto_kv_type, library_refusal
from ullage_engine.model_config.dtypes import dtype_name, kv_itemsize, resolve_dtype
from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.loader import (
    STORED_DTYPES,
    Header,
    LoadedModel,
    held_bytes,
    lay_out,
)
from ullage_engine.model_loader.prepare import PreparedForm
from ullage_engine.model_loader.safetensors import CheckpointReader, PlainMatrices
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.parallel.layout import (
    LayoutError,
    RankLayout,
    check_model,
    group_kv_bytes,
    group_state_bytes,
    rank_model_config,
)
from ullage_engine.parallel.slices import Slicer, check_groups
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.protocol.step_plan import state_slots
from ullage_engine.quantization.formats import Encoding, Format
from ullage_engine.runner.weights import linear_scratch_bytes

SHORTEST_LENGTH = 1024
"""Shortest maximum length, in tokens, whose sizes are computed."""

POOL = "single"
"""Name of the pool in errors about its parallelism."""


class UnsizedError(WeightsError):
    """Raised if a model's configuration does not determine its sizes."""


class ConfigReader(PlainMatrices):
    """A checkpoint whose config.json alone is known.

    Its matrices count as unquantised, except for the experts of gpt-oss, which are published in
    MXFP4.
    """

    def __init__(self, path: Path, values: dict[str, object]) -> None:
        """Read a model's configuration.

        Args:
            path: where the configuration comes from, for error messages.
            values: the configuration's keys and values.

        Raises:
            WeightsError: the model is not supported.
            UnsizedError: its matrices are quantised in a format whose size only the files show.
        """
        config = HFConfig(path, values)
        method = config.section("quantization_config").get("quant_method")
        self.model_config = read_model_config(config)
        if method not in (None, "mxfp4"):
            raise UnsizedError(
                f"{path}: the sizes of {method} weights are known from the files only; download "
                "the model, or name the unquantised one"
            )
        self._has_mxfp4 = method == "mxfp4"

    @property
    def formats(self) -> frozenset[Format]:
        return frozenset({"mxfp4"}) if self._has_mxfp4 else frozenset()

    def encoding(self, name: str, target: Format | None) -> Encoding | None:
        if not self._has_mxfp4 or ".experts." not in name or name.endswith("_bias"):
            return None
        spec = self.model_config.experts
        assert spec is not None, "only models of experts are published in MXFP4"
        is_down = name.endswith("down_proj")
        rows = self.model_config.hidden if is_down else 2 * spec.intermediate
        columns = spec.intermediate if is_down else self.model_config.hidden
        return Encoding(format="mxfp4", shape=(spec.num_experts * rows, columns), group=32)

    def read(self, name: str) -> torch.Tensor:
        raise KeyError(name)


def model_sizes(source: Path, reader: CheckpointReader, request: SizesRequest) -> ModelSizes:
    """Return a model's sizes in every format, or in the request one.

    Args:
        source: where the model comes from, for error messages.
        reader: the model's checkpoint, or its configuration.
        request: the settings for which sizes are computed.
    """
    config = reader.model_config
    chosen = QUANTIZATIONS if request.quantization is None else (request.quantization,)
    plans = plan_tensors(config)
    return ModelSizes(
        architecture=config.architecture,
        parameters=sum(math.prod(plan.shape) for plan in plans),
        max_position=config.max_position,
        checkpoint_formats=tuple(sorted(reader.formats)),
        forms=tuple(
            _form_sizes(source, reader, request, each, RankLayout(tensor, request.pipeline))
            for each in chosen
            for tensor in request.tensors
        ),
    )


def _form_sizes(
    source: Path,
    reader: CheckpointReader,
    request: SizesRequest,
    quantization: str,
    layout: RankLayout,
) -> FormSizes:
    device = torch.device(request.device)
    dtype = resolve_dtype(request.dtype, device)  # type: ignore[arg-type]
    config = reader.model_config
    form = PreparedForm(dtype, quantization, device)  # type: ignore[arg-type]

    try:
        prepared = [form.prepare(source, reader, plan) for plan in plan_tensors(config)]
        header = lay_out(config, prepared)
        check_model(POOL, config, layout)
        check_groups(POOL, config, header.encodings, layout)
    except (WeightsError, LayoutError) as error:
        return FormSizes(
            quantization=quantization,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            refusal=str(error),
        )

    loaded = _weightless(header)
    by_rank = [header.nbytes]
    if layout.world > 1:
        by_rank = [_rank_bytes(loaded, layout, rank) for rank in range(layout.world)]
    lengths = _lengths(config.max_position, request.max_model_len)
    limits = _limits(request, dtype, lengths[0])
    refusal = library_refusal(loaded, limits, device, dtype)
    if layout.world > 1:
        refusal = "several ranks compute together"
    kv_type = auto_kv_type(refusal, dtype) if request.dtype == "auto" else dtype
    itemsize = kv_itemsize(request.kv_dtype, kv_type)  # type: ignore[arg-type]

    sizes = [
        _length_sizes(loaded, layout, request, dtype, itemsize, tokens, uses_library=not refusal)
        for tokens in lengths
    ]
    return FormSizes(
        quantization=quantization,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        dtype=dtype_name(dtype),
        stored=tuple(sorted({each.format for each in header.encodings.values()})),
        weights_bytes=sum(by_rank),
        rank_weights_bytes=max(by_rank),
        kv_dtype="fp8" if request.kv_dtype == "fp8" else dtype_name(kv_type),
        kv_bytes_per_token=group_kv_bytes(config, layout, itemsize),
        lengths=tuple(sizes),
    )


def _weightless(header: Header) -> LoadedModel:
    """Return a model whose tensors have shapes and no memory."""
    tensors = {
        each.name: torch.empty(each.shape, dtype=STORED_DTYPES[each.dtype], device="meta")
        for each in header.tensors
    }
    return LoadedModel(header.model_config, tensors, header.nbytes, header.encodings)


def _rank_bytes(loaded: LoadedModel, layout: RankLayout, rank: int) -> int:
    """Return the bytes of one rank's weights."""
    slicer = Slicer(loaded.model_config, layout, rank, loaded.encodings)
    parts = (slicer.part(name, tensor) for name, tensor in loaded.tensors.items())
    return held_bytes(part for part in parts if part is not None)


def _lengths(max_position: int, asked: int | None) -> Sequence[int]:
    """Return the maximum lengths to compute, from the longest to the shortest.

    These are the requested length, or else the model's own, and the powers of two below it.
    """
    longest = max_position if asked is None else min(asked, max_position)
    powers = [1 << bits for bits in range(longest.bit_length(), 0, -1)]
    shorter = [power for power in powers if SHORTEST_LENGTH <= power < longest]
    return [longest, *shorter]


def _limits(request: SizesRequest, dtype: torch.dtype, max_model_len: int) -> StepLimits:
    chunk = min(PREFILL_CHUNK_TOKENS, max_model_len)
    return StepLimits(
        max_tokens=chunk + request.max_sequences,
        max_rows=request.max_sequences,
        max_model_len=max_model_len,
        gather_tokens=GATHER_TOKENS,
        itemsize=dtype.itemsize,
        fp8_kv=request.kv_dtype == "fp8",
    )


def _length_sizes(
    loaded: LoadedModel,
    layout: RankLayout,
    request: SizesRequest,
    dtype: torch.dtype,
    itemsize: int,
    tokens: int,
    *,
    uses_library: bool,
) -> LengthSizes:
    """Return the bytes of KV and of buffers if sequences have at most `tokens` tokens.

    On a GPU, buffers are those of the kernels that read KV in place.
    """
    config = loaded.model_config
    window = config.window
    is_windowed = window > 0 and window + PREFILL_CHUNK_TOKENS < tokens
    limits = replace(
        _limits(request, dtype, tokens),
        windowed=is_windowed,
        fused=request.device == "cuda",
        library_threads=usable_cores() if uses_library else 0,
        max_slice_tokens=SLICE_TOKENS[request.device],
    )

    own = rank_model_config(config, layout, 0)
    buffers = step_arena(own, limits).nbytes + sampler_arena(own, limits).nbytes
    if not uses_library:
        buffers += linear_scratch_bytes(loaded, limits, torch.device(request.device))
    states = group_state_bytes(config, layout, dtype.itemsize) // layout.world
    buffers += state_slots(request.max_sequences) * states

    per_token = group_kv_bytes(config, layout, itemsize, windowed=is_windowed)
    kv_tokens = _rounded_up(tokens)
    if is_windowed:
        kv_tokens += _rounded_up(window + PREFILL_CHUNK_TOKENS)
    return LengthSizes(tokens=tokens, kv_bytes=per_token * kv_tokens, buffer_bytes=buffers)


def _rounded_up(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
