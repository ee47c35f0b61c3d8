"""The interface to the C++ library: the structures of `src/abi.h`, and the compute threads.

All scalar fields are 64 bits wide. All pointers refer to memory that the caller keeps alive.
"""

import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_char_p, c_double, c_int64, c_void_p
from functools import cache

import torch

from ullage_engine.native import aborts

log = logging.getLogger("ullage.engine.native")

PATH = aborts.LIBRARY

TILE_ROWS = 16
"""Number of weight matrix rows that are stored together as one tile."""

BLOCK_TOKENS = 16
"""Tokens per KV block. Attention reads the blocks in place."""

VECTOR = 16
"""Number of elements that are read and summed at a time, with every instruction set.

Row lengths must be multiples of this number.
"""

PORTABLE = "portable"
"""Name of the portable implementation: plain loops that run on every processor.

Tests use it as the reference that all other instruction sets must match bit for bit. It is never
used to serve a model.
"""

INSTRUCTION_SETS = (PORTABLE, "avx2", "avx512")
"""Instruction sets that the library supports, in ascending order.

A processor that supports one of them also supports all earlier ones. All instruction sets produce
bit-identical results (docs/reasons/decisions/0052-one-order-of-sums.md).
"""

FORMATS = {"int4": 1, "int8": 2, "bfloat16": 3, "float32": 4, "float8": 5}

_ABI = 8

_NO_MEMORY = -2


class Matrix(ctypes.Structure):
    """A tiled weight matrix [rows, columns] (see `ullage_engine.quantization.formats`)."""

    _fields_ = (
        ("data", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("format", c_int64),
        ("group", c_int64),
    )


class Layer(ctypes.Structure):
    """One decoder layer, as the C++ library reads it.

    The layer's vectors are float32. Pointers to vectors that the layer lacks are null.
    """

    _fields_ = (
        *((name, c_void_p) for name in ("mixer_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("taps", "router", "router_bias")),
        *((name, Matrix) for name in ("mixer_in", "mixer_out", "gate_up", "down")),
        *((name, c_void_p) for name in ("cache", "kv_scales", "states")),
    )


class Model(ctypes.Structure):
    """The sizes, layers and scratch buffers of a decoder."""

    _fields_ = (
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "num_heads")),
        *((name, c_int64) for name in ("num_kv_heads", "head_dim", "vocab", "num_blocks")),
        *((name, c_int64) for name in ("cache_format", "state_format", "conv_kernel")),
        *((name, c_int64) for name in ("num_experts", "experts_per_token", "expert_width")),
        *((name, c_int64) for name in ("slice_rows", "is_normalised")),
        ("expert_scale", c_double),
        ("eps", c_double),
        ("query_scale", c_double),
        *((name, c_void_p) for name in ("cos", "sin", "norm")),
        ("embedding", Matrix),
        ("head", Matrix),
        ("layers", c_void_p),
        *((name, c_void_p) for name in ("hidden_rows", "wide_rows", "attended")),
        *((name, c_void_p) for name in ("expert_weights", "pairs", "rounded")),
        *((name, c_void_p) for name in ("row_scales", "row_sums", "partials")),
        ("num_partials", c_int64),
        ("workspace", c_void_p),
        ("workspace_floats", c_int64),
    )


class Chunk(ctypes.Structure):
    """Consecutive tokens of one sequence that are computed in the same step."""

    _fields_ = (
        *((name, c_int64) for name in ("row", "num_rows", "start", "num_replayed")),
        *((name, c_int64) for name in ("state_slot", "next_state_slot")),
        ("blocks", c_void_p),
        ("piece", c_int64),
    )


class Step(ctypes.Structure):
    """One step's inputs, with one row per token, and the addresses to which results are written."""

    _fields_ = (
        *((name, c_int64) for name in ("num_rows", "num_chunks", "num_sampled")),
        *((name, c_int64) for name in ("first_layer", "end_layer", "embeds")),
        *((name, c_void_p) for name in ("token_ids", "sampled_rows", "chunks", "logits", "best")),
    )


class Draw(ctypes.Structure):
    """The sampling parameters for one row of logits, and the sampled token."""

    _fields_ = (
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "noise")),
        ("top_k", c_int64),
        ("token", c_int64),
    )


@cache
def load() -> ctypes.CDLL | None:
    """Load the library, or log why it cannot be used and return None."""
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        log.log(
            logging.WARNING if PATH.exists() else logging.INFO,
            "the C++ library cannot be loaded, so the CPU computes with torch alone, several times "
            "slower: %s; install Ullage again on this machine",
            error,
        )
        return None
    library.ullage_abi.restype = c_int64
    if library.ullage_abi() != _ABI:
        log.warning("%s has another version; install Ullage again", PATH)
        return None
    library.ullage_instruction_set.restype = c_char_p
    library.ullage_start.restype = c_void_p
    library.ullage_start.argtypes = (c_int64, c_char_p)
    library.ullage_stop.argtypes = (c_void_p,)
    library.ullage_step.restype = c_int64
    library.ullage_step.argtypes = (c_void_p, c_void_p, c_void_p)
    library.ullage_log_masses.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p)
    library.ullage_sample.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_int64)
    library.ullage_multiply.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p)
    return library


@cache
def instruction_set() -> str | None:
    """Return the library's instruction set on this CPU, or None if the library cannot be used."""
    library = load()
    if library is None:
        return None
    name: bytes | None = library.ullage_instruction_set()
    if name is None:
        log.info(
            "the CPU lacks AVX2, FMA or F16C, so it computes with torch alone, several times slower"
        )
        return None
    return name.decode()


def instruction_sets() -> tuple[str, ...]:
    """Return all instruction sets that the library can use on this machine, `PORTABLE` first."""
    best = instruction_set()
    return INSTRUCTION_SETS[: INSTRUCTION_SETS.index(best) + 1] if best is not None else ()


class Team:
    """The compute threads, which sleep between steps. Only one caller may use them at a time."""

    def __init__(self, num_threads: int, isa: str | None = None) -> None:
        """Start the threads.

        Args:
            num_threads: number of threads.
            isa: one of the library's instruction sets. The default is the best that this processor
                supports.
        """
        library = load()
        name = isa or instruction_set()
        assert library is not None, "the library cannot be used here"
        assert name is not None, "the library cannot be used here"
        self._library = library
        self._team = library.ullage_start(num_threads, name.encode())
        if not self._team:
            raise MemoryError("no memory for the threads that compute")

    def step(self, model: Model, step: Step) -> None:
        """Compute a step's hidden states, logits and most likely tokens."""
        model_at = ctypes.addressof(model)
        step_at = ctypes.addressof(step)
        if not self._library.ullage_step(self._team, model_at, step_at):
            raise ValueError("the workspace of each thread is smaller than the library needs")

    def multiply(self, matrix: Matrix, x: torch.Tensor, out: torch.Tensor, model: Model) -> None:
        """Multiply x [rows, columns] by the transposed matrix, and write the product to out.

        The shape of out is [rows, matrix rows]. Both x and out are float32. `model` only provides
        the scratch buffers, which hold the rows of x after rounding.
        """
        arguments = (ctypes.addressof(matrix), x.data_ptr(), x.shape[0], out.data_ptr())
        self._library.ullage_multiply(self._team, *arguments, ctypes.addressof(model))

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Sample a token from each row of logits, a contiguous float32 tensor [rows, vocab].

        Returns:
            A token for each row, or -1 for a row in which no logit is greater than -inf.
        """
        own = (Draw * len(draws))(*draws)
        rows, vocab = logits.shape
        address = ctypes.addressof(own)
        self._library.ullage_sample(self._team, logits.data_ptr(), vocab, address, rows)
        tokens = [draw.token for draw in own]
        if _NO_MEMORY in tokens:
            raise MemoryError(f"no memory to sort the {vocab} tokens of a vocabulary")
        return tokens

    def log_masses(self, logits: torch.Tensor) -> torch.Tensor:
        """Return log(sum(exp(logit - max))) for each row, as float32 [rows, 1].

        The logits must have the same type and shape as for `sample`, and each row must have at
        least one logit greater than -inf.
        """
        rows, vocab = logits.shape
        out = torch.empty(rows, 1)
        self._library.ullage_log_masses(self._team, logits.data_ptr(), vocab, rows, out.data_ptr())
        return out

    def __del__(self) -> None:
        if getattr(self, "_team", None):
            self._library.ullage_stop(self._team)


@cache
def shared_team(num_threads: int) -> Team:
    """Return the process-wide compute threads, which all models share."""
    return Team(num_threads)
