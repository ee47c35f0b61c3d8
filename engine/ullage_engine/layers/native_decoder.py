"""A decoder implemented in the C++ library, which computes all layers of a step in one call.

This decoder computes the same model as `ullage_engine.layers.decoder.Decoder`. Hidden states are
float32, and activations are rounded to int8 before each matmul with quantised weights. The decoder
is batch-invariant: a row's results depend only on its own sequence.

In the KV cache, a block of keys has the layout [head_dim, tokens], which no other decoder can read.
"""

import ctypes
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence

import torch

from ullage_engine.kernels.arena import StepLimits
from ullage_engine.kernels.block_tables import BlockTables
from ullage_engine.kernels.kv_pool import HeadScales, LayerCache, head_scales, shaped
from ullage_engine.layers.decoder import head_bounds
from ullage_engine.layers.linear import native_matrix
from ullage_engine.layers.rotary_tables import different_table, fill_half_tables
from ullage_engine.model_config.model_config import LayerSpec
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.native.library import (
    BLOCK_TOKENS,
    FORMATS,
    TILE_ROWS,
    VECTOR,
    Chunk,
    Layer,
    Matrix,
    Model,
    Step,
    instruction_set,
    shared_team,
)
from ullage_engine.protocol import step_plan
from ullage_engine.quantization.formats import unpack_tiles

_VECTORS = ("mixer_norm", "mlp_norm", "q_norm", "k_norm", "router", "router_bias")
"""Names of a layer's tensors that are converted to float32 for the C++ library."""

_FORMATS = {
    torch.float32: FORMATS["float32"],
    torch.bfloat16: FORMATS["bfloat16"],
    torch.uint8: FORMATS["float8"],
}
"""The C++ library's codes for the dtypes of KV and convolution states."""

_TILES_AT_ONCE = 16
"""Number of tiles of a matrix that are dequantised at once. This caps the temporary tensor."""


def _matrix_names(spec: LayerSpec) -> dict[str, str]:
    """Return the names of a layer's matrices, keyed by the C++ library's names for them."""
    is_conv = spec.mixer == "conv"
    is_dense = spec.feed_forward == "dense"
    return {
        "mixer_in": "conv_in" if is_conv else "qkv",
        "mixer_out": "conv_out" if is_conv else "output",
        "gate_up": "gate_up" if is_dense else "experts_gate_up",
        "down": "down" if is_dense else "experts_down",
    }


def library_refusal(
    loaded: LoadedModel, limits: StepLimits, device: torch.device, dtype: torch.dtype
) -> str:
    """Return why the C++ library cannot compute a model's steps, or "" if it can.

    The reason includes the remedy if there is one.
    """
    if device.type != "cpu":
        return "the device is no CPU"

    config = loaded.model_config
    experts = config.experts
    widths = [config.hidden, config.intermediate, config.head_dim // 2]
    widths += [experts.intermediate] if experts else []
    names = ["embedding", "embedding" if config.tied else "head"]
    for index, spec in enumerate(config.layers):
        names += [f"layers.{index}.{name}" for name in _matrix_names(spec).values()]
    encodings = loaded.encodings
    plain = [name for name in names if name not in encodings or not encodings[name].is_tiled]

    refusals = {
        "the library cannot be used on this machine": instruction_set() is None,
        "model.dtype is float16; set auto": dtype == torch.float16,
        "the model has sliding windows": (
            limits.windowed or any(each.window for each in config.layers)
        ),
        "the model's attention has biases or sinks": (
            config.has_attention_bias or config.has_sinks
        ),
        "the model's experts have biases, or weights by softmax": (
            experts is not None and (experts.is_biased or experts.scoring != "sigmoid")
        ),
        f"widths {widths} of rows are not all multiples of {VECTOR}": (
            any(width % VECTOR for width in widths)
        ),
        "only a part of the model is here": (
            config.first_layer > 0 or config.conv_channels not in (0, config.hidden)
        ),
        f"blocks of KV are not of {BLOCK_TOKENS} tokens": limits.block_tokens != BLOCK_TOKENS,
        f"matrices such as {', '.join(plain[:1])} are not int8 or int4 (model.quantization), or "
        "not of whole tiles of 16 rows": bool(plain),
    }
    return next((refusal for refusal, holds in refusals.items() if holds), "")


def auto_kv_type(refusal: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which KV is stored if `model.dtype` is `auto` and KV is not float8.

    The C++ library computes in float32 and reads bfloat16 as fast as float32 on any processor.

    Args:
        refusal: the result of `library_refusal`.
        dtype: the dtype in which the model computes.
    """
    return dtype if refusal else torch.bfloat16


class NativeDecoder:
    """A decoder implemented in the C++ library, which computes in the arena's buffers."""

    def __init__(
        self, loaded: LoadedModel, limits: StepLimits, arena: dict[str, torch.Tensor]
    ) -> None:
        """Create a decoder that computes in `arena`.

        `ullage_engine.kernels.arena.native_arena` defines the layout of this memory.
        """
        self._loaded = loaded
        self._config = loaded.model_config
        self._arena = arena
        self._limits = limits
        self._num_threads = limits.library_threads
        self._slice_tokens = limits.slice_tokens(limits.max_tokens)
        self.team = shared_team(self._num_threads)
        self._tables = BlockTables(limits.max_rows)
        self._kept: dict[str, torch.Tensor] = {}
        """Converted tensors, kept alive because the C++ library reads them by address."""

        cos, sin = self._rotary_tables()
        fill_half_tables(self._config, cos, sin)
        self._layers = (Layer * self._config.num_layers)(*self._make_layers())
        self._model = self._make_model()
        self._best = torch.zeros(max(limits.max_rows, limits.max_tokens), dtype=torch.int32)

    def use_memory(self, caches: Sequence[LayerCache], states: Sequence[torch.Tensor]) -> None:
        """Make the C++ library use these tensors for KV and convolution states."""
        remaining_caches = iter(caches)
        remaining_states = iter(states)
        for index, (layer, spec) in enumerate(zip(self._layers, self._config.layers, strict=True)):
            if spec.mixer == "conv":
                layer.states = next(remaining_states).data_ptr()
            else:
                cache = next(remaining_caches)
                layer.cache = cache.blocks.data_ptr()
                if cache.scales is not None:
                    layer.kv_scales = self._address(f"kv_scales.{index}", cache.scales.values)

        if caches:
            self._model.num_blocks = caches[0].blocks.shape[1]
            self._model.cache_format = _FORMATS[caches[0].blocks.dtype]
        if states:
            self._model.state_format = _FORMATS[states[0].dtype]

    def kv_scales(self) -> list[HeadScales]:
        """Return float8 scales for each attention layer, large enough for every key and value."""
        config = self._config
        tensors = self._loaded.tensors
        scales = []
        for index, spec in enumerate(config.layers):
            if spec.mixer == "attention":
                prefix = f"layers.{index}."
                bounds = head_bounds(
                    self._kv_lengths(prefix), config, tensors.get(prefix + "k_norm")
                )
                scales.append(head_scales(bounds.tolist(), torch.float32, bounds.device))
        return scales

    def vectors(self) -> dict[str, torch.Tensor]:
        """Return the float32 tensors whose addresses were passed to the C++ library, keyed by name.

        They were converted from the model's tensors, and no step modifies them.
        """
        return {f"library.{name}": vector for name, vector in self._kept.items()}

    def check_tables(self) -> str:
        """Check the rotary tables against recomputed ones.

        Return the name of a table that differs, or "" if all match.
        """
        cos, sin = self._rotary_tables()
        return different_table(self._config, cos, sin)

    def _kv_lengths(self, prefix: str) -> torch.Tensor:
        """Compute |w * norm| for each row w of the key and value projections, in float32."""
        matrix = self._loaded.packed(prefix + "qkv")
        norm = self._loaded.tensors[prefix + "mixer_norm"].float()
        tiles = matrix.values[self._config.query_width // TILE_ROWS :]
        lengths = []
        for first in range(0, len(tiles), _TILES_AT_ONCE):
            some = tiles[first : first + _TILES_AT_ONCE]
            rows = unpack_tiles(some, matrix.encoding).dequantise() * norm
            lengths.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
        return torch.cat(lengths).float()

    def run(
        self,
        chunks: Sequence[step_plan.Chunk],
        logits: torch.Tensor,
        layers: range | None = None,
    ) -> list[int]:
        """Compute a step, and write the logits of its sampled rows in chunk order.

        Args:
            chunks: chunks of the step.
            logits: output, float32 [sampled rows, vocab], contiguous.
            layers: layers to run, or None for all.

        Returns:
            The most likely token of each sampled row, or -1 if a logit of the row is not finite.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        sizes = [len(chunk.token_ids) for chunk in chunks]
        rows = [0, *itertools.accumulate(sizes)]
        tokens, token_ids = _int32(itertools.chain(*(chunk.token_ids for chunk in chunks)))
        if tokens and (min(tokens) < 0 or max(tokens) >= self._config.vocab):
            raise IndexError(f"tokens {min(tokens)} to {max(tokens)}, of {self._config.vocab}")

        sampled = [
            row
            for chunk, end in zip(chunks, rows[1:], strict=True)
            if chunk.sampling
            for row in range(end - chunk.num_sampled, end)
        ]
        rows_kept, sampled_rows = _int32(sampled)

        tables = self._tables.update(chunks)
        first_table = self._tables.table.ctypes.data
        table_bytes = self._tables.table.strides[0]
        own = (Chunk * len(chunks))()
        for each, chunk, row, size, table in zip(
            own, chunks, rows[:-1], sizes, tables, strict=True
        ):
            each.row = row
            each.num_rows = size
            each.start = chunk.start
            each.blocks = first_table + table * table_bytes
            each.num_replayed = chunk.num_replayed
            each.next_state_slot = chunk.next_state_slot
            each.state_slot = -1 if chunk.state_slot is None else chunk.state_slot

        run = layers or range(self._config.num_layers)
        step = Step(
            num_rows=rows[-1],
            num_chunks=len(chunks),
            num_sampled=len(sampled),
            first_layer=run.start,
            end_layer=run.stop,
            embeds=1,
            token_ids=token_ids,
            sampled_rows=sampled_rows,
            chunks=ctypes.addressof(own),
            logits=logits.data_ptr(),
            best=self._best.data_ptr(),
        )
        self.team.step(self._model, step)
        # The library reads both arrays by address, so they must live until the step has ended.
        del tokens, rows_kept

        return [int(token) for token in self._best[: len(sampled)].tolist()]

    def logits(self, rows: Sequence[int], out: torch.Tensor) -> None:
        """Compute the logits of these rows of the last step into out, float32 [rows, vocab]."""
        kept, sampled_rows = _int32(rows)
        step = Step(
            num_sampled=len(kept),
            sampled_rows=sampled_rows,
            logits=out.data_ptr(),
            best=self._best.data_ptr(),
        )
        self.team.step(self._model, step)

    def hidden(self, num_rows: int) -> torch.Tensor:
        """Return the last step's hidden states, not normalised, float32 [num_rows, hidden]."""
        return shaped(self._arena["hidden"], num_rows, self._config.hidden)

    def _rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the arena's cosine and sine tables, each [positions, head_dim / 2]."""
        positions = self._limits.max_model_len
        half = self._config.head_dim // 2
        cos = shaped(self._arena["cos"], positions, half)
        sin = shaped(self._arena["sin"], positions, half)
        return cos, sin

    def _make_layers(self) -> Iterator[Layer]:
        for index, spec in enumerate(self._config.layers):
            prefix = f"layers.{index}."
            vectors = {name: self._vector(prefix + name) for name in _VECTORS}
            names = _matrix_names(spec).items()
            matrices = {field: self._matrix(prefix + name) for field, name in names}
            yield Layer(taps=self._taps(prefix + "conv"), **vectors, **matrices)

    def _make_model(self) -> Model:
        config = self._config
        arena = self._arena
        buffers = {
            "hidden_rows": "hidden",
            "wide_rows": "wide",
            **{name: name for name in ("attended", "rounded", "row_scales", "row_sums")},
            **{name: name for name in ("partials", "workspace", "cos", "sin")},
            **{name: name for name in ("expert_weights", "pairs")},
        }

        return Model(
            **self._expert_sizes(),
            conv_kernel=config.conv_kernel,
            num_layers=config.num_layers,
            hidden=config.hidden,
            intermediate=config.intermediate,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab,
            eps=config.rms_eps,
            query_scale=config.head_dim**-0.5,
            norm=self._vector("norm"),
            embedding=self._matrix("embedding"),
            head=self._matrix("embedding" if config.tied else "head"),
            layers=ctypes.addressof(self._layers),
            num_partials=arena["partials"].numel(),
            workspace_floats=arena["workspace"].numel() // self._num_threads,
            **{name: arena[buffer].data_ptr() for name, buffer in buffers.items()},
        )

    def _expert_sizes(self) -> dict[str, float]:
        spec = self._config.experts
        if spec is None:
            return {}

        return {
            "num_experts": spec.num_experts,
            "experts_per_token": spec.experts_per_token,
            "expert_width": spec.intermediate,
            "slice_rows": self._slice_tokens,
            "is_normalised": spec.is_normalised,
            "expert_scale": spec.scale,
        }

    def _vector(self, name: str) -> int | None:
        """Convert a vector to float32 and return its address.

        Return None if the model has no such vector.
        """
        tensor = self._loaded.tensors.get(name)
        return None if tensor is None else self._address(name, tensor)

    def _taps(self, name: str) -> int | None:
        """Convert a convolution's taps to float32, oldest first, and return their address.

        Return None if the model has no taps with this name.
        """
        tensor = self._loaded.tensors.get(name)
        return None if tensor is None else self._address(name, tensor.t())

    def _address(self, name: str, tensor: torch.Tensor) -> int:
        """Convert a tensor to float32 and return its address.

        The decoder keeps the converted tensor alive until another tensor with the same name
        replaces it.
        """
        self._kept[name] = tensor.to(torch.float32).contiguous()
        return self._kept[name].data_ptr()

    def _matrix(self, name: str) -> Matrix:
        return native_matrix(self._loaded.packed(name))


def _int32(numbers: Iterable[int]) -> "tuple[array[int], int]":
    """Return an int32 array of these values, and the array's address."""
    values = array("i", numbers)
    return values, values.buffer_info()[0]
