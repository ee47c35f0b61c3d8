"""The sizes of models, which the engine computes in its own process and the command reads."""

import msgspec

from ullage_common.config.engine import BatchingSection, Device

QUANTIZATIONS = ("auto", "int8", "int4", "fp8")
"""Values of `model.quantization` whose sizes are computed by default.

w8a8 needs a calibration, which published models lack.
"""


class SizesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The models and settings for which sizes are computed."""

    sources: tuple[str, ...] = ()
    """URIs of models, as in `model.source`."""
    has_catalogue: bool = False
    """Whether to add the well-known models of the catalogue."""
    device: Device = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str | None = None
    """The only value of `model.quantization` to compute, or None for all of QUANTIZATIONS."""
    max_model_len: int | None = None
    """The longest maximum length to compute, or None for the model's own."""
    max_sequences: int = BatchingSection().max_sequences
    tensors: tuple[int, ...] = (1,)
    """Numbers of tensor-parallel ranks to compute."""
    pipeline: int = 1


class LengthSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that depend on the maximum length of a sequence."""

    tokens: int
    kv_bytes: int
    """KV of one sequence of this length, summed over all ranks."""
    buffer_bytes: int
    """Buffers of the rank that needs most: arenas and convolution states."""


class FormSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model in one format."""

    quantization: str
    """Value of `model.quantization`."""
    tensor: int = 1
    """Number of tensor-parallel ranks."""
    pipeline: int = 1
    """Number of pipeline stages."""
    refusal: str = ""
    """Why the model cannot be served in this format (empty if it can)."""
    dtype: str = ""
    """Data type of the weights that are not quantised, and of activations."""
    stored: tuple[str, ...] = ()
    """Formats of the quantised matrices (empty if there are none)."""
    weights_bytes: int = 0
    """Weights, summed over all ranks."""
    rank_weights_bytes: int = 0
    """Weights of the rank that holds most."""
    kv_dtype: str = ""
    kv_bytes_per_token: int = 0
    """KV of one token in all layers, summed over all ranks."""
    lengths: tuple[LengthSizes, ...] = ()
    """Sizes by maximum length, from the longest to the shortest."""


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model in every format."""

    architecture: str
    parameters: int
    max_position: int
    """Maximum length of a sequence that the model supports, in tokens."""
    checkpoint_formats: tuple[str, ...]
    """Formats of the checkpoint's own quantised matrices (empty if there are none)."""
    forms: tuple[FormSizes, ...]


class SourceSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of one source, or the reason why they are unknown."""

    source: str
    name: str
    """Short name of the model: its repository, folder or file."""
    sizes: ModelSizes | None = None
    error: str = ""
    """Why the native engine cannot serve the model (empty if it can)."""
    is_missing: bool = False
    """Whether the source itself cannot be read, so that no engine can serve it."""
    is_unsized: bool = False
    """Whether the native engine may serve the model, but only its files show the sizes."""
    file_bytes: int | None = None
    """Total size of the checkpoint's weight files, or None if they were not listed."""


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    total_bytes: int
    free_bytes: int


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine finds on this machine."""

    device: str
    """Device for which sizes were computed: cpu or cuda."""
    gpus: tuple[GpuMemory, ...] = ()
    has_bfloat16: bool = False
    """Whether the device has instructions for bfloat16."""
    instruction_set: str | None = None
    """Instructions that the C++ library for CPUs uses, or None if it cannot run."""
    has_vllm: bool = False


class SizesReport(msgspec.Struct, frozen=True, kw_only=True):
    machine: MachineFacts
    models: tuple[SourceSizes, ...]
