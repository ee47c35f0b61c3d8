"""Calibrated int4: rounds a model's matrices for the inputs that a calibration text produces.

The model runs once, layer by layer, over a text that ships with the package. Each matrix is rounded
when the text first reaches it (`ullage_engine.quantization.gptq`), and from then on computes with
its rounded weights, so that later matrices can compensate for the errors of earlier ones. Only one
layer is in memory at a time, along with the text's hidden states.

A single expert sees only a small part of the text, so each expert is rounded for the combined
inputs of all experts in its layer. The second matrices of experts (`experts_down`) have unrelated
inputs, so each is rounded to nearest, with groups that are fitted to the mean squares of its
inputs. Experts are rounded after the text has passed through their layer, so the next layer gets
their unrounded results.

Every pod that rounds weights at load repeats the calibration before it becomes ready. If the
calibration would take too much time or memory on a device, the pod rounds weights to nearest
instead. Only `ullage quantize` calibrates such models.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import msgspec
import torch

from ullage_engine.kernels.arena import BLOCK_TOKENS, StepLimits, step_arena
from ullage_engine.layers.linear import Linear, PlainLinear
from ullage_engine.layers.moe import ExpertLinears
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel
from ullage_engine.model_loader.prepare import CalibrationError, PreparedTensor, RoundLayer
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.model_loader.tensor_plan import fit_a_checkpoint
from ullage_engine.protocol.step_plan import Chunk, StepPlan
from ullage_engine.quantization.formats import Quantized, scale_type, stacked
from ullage_engine.quantization.gptq import (
    nearest_calibrated,
    quantise_calibrated,
    rounding_bytes,
    rounding_operations,
)
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.tokenizer.tokenizer import TokenizerError, load_tokenizer

log = logging.getLogger("ullage.engine.weights")

TEXT = Path(__file__).with_name("calibration.txt")
"""Prose, dialogue, code and tables in several languages, written for calibration."""

VERSION = 1
"""Version of the calibration method. Increment it whenever the method produces different values."""

WINDOW = 512
"""Number of tokens of the text in each sequence."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The estimated cost of a calibration."""

    operations: float
    """Floating-point operations."""
    nbytes: int
    """Peak memory in bytes, in addition to the model's own."""

    def fits(self, most: "Cost") -> bool:
        return self.operations <= most.operations and self.nbytes <= most.nbytes


AT_LOAD = {"cpu": Cost(12e12, 1 << 30), "cuda": Cost(2e15, 16 << 30)}
"""Maximum cost of a calibration that a pod performs before it is ready, by device type.

On a CPU, the limits are about two minutes on two cores (at 50 G operations per second per core),
and the memory that pods request on top of their weights. The cost on a GPU has not been measured.
"""

KEPT_BYTES = 256 << 20
"""Bytes to allow for matmul workspaces and for memory that the allocator retains.

Without this allowance, the estimates for models of 135M and 1B parameters were too low by about
this amount.
"""

COST = "which may cost a fifth of the perplexity"

REMEDY = (
    "; quantise the model once with ullage quantize --format int4, and name its folder in "
    "model.source, without model.quantization"
)


@dataclass(frozen=True)
class Int4Calibration:
    """Calibrates matrices that are rounded to int4. The module docstring describes the method."""

    text: Path = TEXT
    max_tokens: int = 16_384
    """Maximum number of tokens to read from the text."""
    is_at_load: bool = False
    """Whether a pod waits for this calibration. If so, `AT_LOAD` limits its cost."""

    @cached_property
    def name(self) -> str:
        """Name that identifies the rounding method by its version, its text and its limits."""
        digest = hashlib.sha256(self.text.read_bytes()).hexdigest()[:16]
        bound = " at load" if self.is_at_load else ""
        return f"{VERSION} {self.max_tokens} {digest}{bound}"

    def begin(
        self,
        files: ModelFiles,
        prepared: Sequence[PreparedTensor],
        model_config: ModelConfig,
        device: torch.device,
        report: Callable[[], None],
    ) -> RoundLayer | None:
        """Prepare the first layer. Return a function that rounds the next layer on each call.

        Return None if there is no matrix to calibrate. Log a warning and return None if the text
        cannot be tokenised, or if calibration would cost too much at load.

        Raises:
            CalibrationError: the text cannot be embedded, for example for lack of memory.
        """
        if not any(each.is_calibrated for each in prepared):
            return None
        try:
            windows = self._windows(files, model_config)
        except TokenizerError as error:
            log.warning("int4 weights are uncalibrated and rounded to the nearest: %s", error)
            return None
        if not windows:
            log.warning("int4 weights are uncalibrated and rounded to the nearest: no tokens")
            return None
        token_ids = torch.tensor(windows)
        cost = estimated_cost(prepared, model_config, len(windows), token_ids.shape[1])
        most = AT_LOAD[device.type]
        if self.is_at_load and not cost.fits(most):
            log.warning(
                "int4 weights are uncalibrated and rounded to the nearest numbers, %s: calibration "
                "takes about %.0f T operations and %d MiB, and each pod would repeat it before it "
                "is ready. The limit is %.0f T and %d MiB on %s",
                _remedy(prepared),
                cost.operations / 1e12,
                cost.nbytes >> 20,
                most.operations / 1e12,
                most.nbytes >> 20,
                device.type,
            )
            return None
        remedy = _remedy(prepared)
        with _calibration_errors("the model", remedy):
            embedding = next(each for each in prepared if each.name == "embedding").weights()
            hidden = embedding[token_ids.flatten()].to(device)
        _log_begin(prepared, len(hidden))
        return LayerCalibration(model_config, hidden, token_ids.shape[1], report, remedy)

    def _windows(self, files: ModelFiles, model_config: ModelConfig) -> list[list[int]]:
        """Split the tokens of the text into sequences of equal length."""
        tokenizer = load_tokenizer(files.path)
        token_ids = tokenizer.encode_rendered(self.text.read_text(encoding="utf-8"))
        token_ids = [each for each in token_ids if each < model_config.vocab][: self.max_tokens]
        first = tokenizer.encode_text("")
        size = min(WINDOW, model_config.max_position, len(first) + len(token_ids))
        step = size - len(first)
        if step < 1:
            return []
        starts = range(0, len(token_ids) - step + 1, step)
        return [first + token_ids[start : start + step] for start in starts]


def estimated_cost(
    prepared: Sequence[PreparedTensor], model_config: ModelConfig, num_windows: int, window: int
) -> Cost:
    """Estimate the cost of calibrating these tensors with `num_windows` windows of tokens."""
    itemsize = next(each.dtype.itemsize for each in prepared if each.is_calibrated)
    limits = _step_limits(num_windows, window, itemsize)
    num_tokens = num_windows * window
    operations = 0.0
    most = 0
    for _, group in groupby(prepared, lambda each: each.name.rpartition(".")[0]):
        matrices = [each for each in group if each.is_calibrated]
        layer = sum(itemsize * math.prod(each.plan.shape) for each in matrices)
        for each in matrices:
            *experts, rows, columns = each.plan.shape
            spec = model_config.experts
            all_rows = math.prod(experts) * rows
            inputs = num_tokens * (spec.experts_per_token if experts and spec else 1)
            operations += 2.0 * inputs * rows * columns
            if _is_of_experts_down(each):
                continue
            operations += 2.0 * inputs * columns**2 + rounding_operations(all_rows, columns)
            # The Gram matrix needs the inputs of the step in float32.
            most = max(most, layer + 4 * inputs * columns + rounding_bytes(all_rows, columns))
    # The text's hidden states before and after the layer, and its keys and values.
    states = 4 * num_tokens * model_config.hidden * itemsize
    arena = step_arena(model_config, limits).nbytes
    return Cost(operations, most + states + arena + KEPT_BYTES)


@contextmanager
def _calibration_errors(subject: str, remedy: str) -> Iterator[None]:
    """Turn memory and runtime errors within the `with` block into a CalibrationError.

    `subject` is what the error message says could not be calibrated.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CalibrationError(f"{subject} cannot be calibrated: {reason}", remedy) from error


def _remedy(prepared: Sequence[PreparedTensor]) -> str:
    """Describe how much quality rounding to nearest may cost, and the remedy if there is one."""
    return COST + REMEDY if fit_a_checkpoint(each.plan for each in prepared) else COST


def _step_limits(num_windows: int, window: int, itemsize: int) -> StepLimits:
    """Return step limits that are large enough to compute the whole text in a single step."""
    return StepLimits(
        max_tokens=num_windows * window,
        max_rows=num_windows,
        max_model_len=window,
        gather_tokens=window,
        itemsize=itemsize,
    )


def _log_begin(prepared: Sequence[PreparedTensor], num_tokens: int) -> None:
    """Log that calibration is starting, and which matrices it skips."""
    log.info("int4: calibrating with %d tokens", num_tokens)
    if any(each.is_calibrated and _is_of_experts_down(each) for each in prepared):
        log.info(
            "int4: experts_down is rounded to the nearest numbers of fitted groups, "
            "since each expert gets a small part of the text"
        )
    wide = [each for each in prepared if each.encoding and each.encoding.format == "int8"]
    if wide:
        kinds = sorted({each.name.rpartition(".")[2] for each in wide})
        log.info(
            "int4: %d matrices are int8 (%s): blocks of the file, or columns in no whole groups",
            len(wide),
            ", ".join(kinds),
        )


def _is_of_experts_down(prepared: PreparedTensor) -> bool:
    return prepared.name.endswith("experts_down")


class LayerCalibration:
    """Rounds a model's matrices for the inputs that a text produces, one layer per call.

    Each call also computes the text's hidden states, which are the next layer's inputs.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        hidden: torch.Tensor,
        window: int,
        report: Callable[[], None],
        remedy: str,
    ) -> None:
        """Prepare a calibration, starting at the first layer.

        Args:
            model_config: the model's configuration.
            hidden: the embedded text, [tokens, hidden], in sequences of `window` tokens.
            window: tokens per sequence.
            report: called whenever a matrix is rounded.
            remedy: advice for the user, which a CalibrationError includes.
        """
        self._model_config = model_config
        self._hidden = hidden
        self._report = report
        self._remedy = remedy
        rows = len(hidden) // window
        self._limits = _step_limits(rows, window, hidden.itemsize)
        self._num_blocks = -(-window // BLOCK_TOKENS)
        self._plan = StepPlan([self._chunk(row, window) for row in range(rows)])
        self._started = time.monotonic()

    def _chunk(self, row: int, window: int) -> Chunk:
        """Create a chunk for one sequence. Its token ids are row indices into the hidden states."""
        first = row * self._num_blocks
        return Chunk(
            request_id=f"calibration-{row}",
            token_ids=list(range(row * window, (row + 1) * window)),
            start=0,
            block_ids=list(range(first, first + self._num_blocks)),
            sampling=None,
            history=[],
            num_prompt_tokens=window,
            next_state_slot=row,
        )

    @torch.inference_mode()
    def __call__(self, prepared: Sequence[PreparedTensor]) -> Mapping[str, Quantized]:
        """Round the next layer's matrices.

        Args:
            prepared: all tensors of the layer.

        Raises:
            CalibrationError: the layer failed, for example for lack of memory. Later layers cannot
                be calibrated, because they have no inputs.
        """
        index = int(prepared[0].name.split(".")[1])
        with _calibration_errors(f"layer {index}", self._remedy):
            return self._rounded(index, prepared)

    def _rounded(self, index: int, prepared: Sequence[PreparedTensor]) -> dict[str, Quantized]:
        by_name = {each.name: each for each in prepared if each.is_calibrated}
        layer = self._layer(index, prepared)
        rounding = _Rounding(by_name, layer.tensors, self._report)
        runner = ModelRunner(
            layer,
            self._hidden.device,
            self._hidden.dtype,
            self._limits,
            wrap=rounding.wrap,
            wrap_experts=rounding.wrap_experts,
        )
        runner.allocate_arena()
        runner.allocate_kv(len(self._plan.chunks) * self._num_blocks)
        self._hidden = runner.hidden(self._plan).clone()
        rounded = rounding.finish()
        if index + 1 == self._model_config.num_layers:
            self._log_end()
        return rounded

    def _layer(self, index: int, prepared: Sequence[PreparedTensor]) -> LoadedModel:
        """Build a model that has only this layer, with the hidden states as its embedding."""
        device = self._hidden.device
        tensors = {each.name: each.weights().to(device) for each in prepared}
        model_config = msgspec.structs.replace(
            self._model_config,
            layers=(self._model_config.layers[index],),
            first_layer=index,
            vocab=len(self._hidden),
            tied=False,
        )
        return LoadedModel(model_config, tensors | {"embedding": self._hidden}, 0)

    def _log_end(self) -> None:
        log.info(
            "int4: calibrated %d layers with %d tokens in %.1f s",
            self._model_config.num_layers,
            len(self._hidden),
            time.monotonic() - self._started,
        )


class _Rounding:
    """Rounds the matrices of one model layer to int4, calibrated on a text.

    While the text passes through the layer, linear layers round their matrices for the inputs that
    they receive, and layers of experts only record their inputs. `finish` rounds the experts'
    matrices, and collects all rounded matrices.
    """

    def __init__(
        self,
        prepared: Mapping[str, PreparedTensor],
        tensors: Mapping[str, torch.Tensor],
        report: Callable[[], None],
    ) -> None:
        """Prepare the rounding of one layer.

        Args:
            prepared: the tensors to round, by name.
            tensors: weights of all the layer's tensors, by name.
            report: called at least once for each rounded tensor.
        """
        self._prepared = prepared
        self._tensors = tensors
        self._report = report
        self._linears: dict[str, CalibratedLinear] = {}
        self._experts: dict[str, ExpertRecorder] = {}

    def wrap(self, name: str, linear: Linear) -> Linear:
        if name not in self._prepared:
            return linear
        calibrated = CalibratedLinear(self._tensors[name], self._prepared[name], self._report)
        self._linears[name] = calibrated
        return calibrated

    def wrap_experts(self, name: str, experts: ExpertLinears) -> ExpertLinears:
        if name not in self._prepared:
            return experts
        recorder = ExpertRecorder(experts, self._tensors[name], self._prepared[name], self._report)
        self._experts[name] = recorder
        return recorder

    def finish(self) -> dict[str, Quantized]:
        """Return the rounded matrices. Call this after the text has passed through the layer."""
        linears = {name: each.rounded for name, each in self._linears.items()}
        experts = {name: each.rounded() for name, each in self._experts.items()}
        return {name: _on_cpu(each) for name, each in (linears | experts).items() if each}


class CalibratedLinear:
    """A linear layer that rounds its weights, calibrating on the first inputs that it receives."""

    def __init__(
        self, weights: torch.Tensor, prepared: PreparedTensor, report: Callable[[], None]
    ) -> None:
        """Create a layer whose weights are not rounded yet.

        Args:
            weights: [out, in].
            prepared: how the matrix will be stored.
            report: called while the weights are rounded.
        """
        self.shape = (weights.shape[1], weights.shape[0])
        self.rounded: Quantized | None = None
        self._weights = weights
        self._prepared = prepared
        self._report = report
        self._linear: Linear | None = None

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._rounded_for(x).forward(x, out)

    def forward_add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._rounded_for(x).forward_add(x, out)

    def _rounded_for(self, x: torch.Tensor) -> Linear:
        if self._linear is None:
            group, dtype = _grid(self._prepared)
            self.rounded = quantise_calibrated(self._weights, _gram(x), group, dtype, self._report)
            self._linear = PlainLinear(self.rounded.dequantise().to(self._weights.dtype))
        return self._linear


class ExpertRecorder:
    """Linear layers for the experts of one model layer, which record statistics of their inputs.

    One recorder covers one kind of matrix, such as the down projections.
    """

    few_pairs = 0

    def __init__(
        self,
        experts: ExpertLinears,
        weights: torch.Tensor,
        prepared: PreparedTensor,
        report: Callable[[], None],
    ) -> None:
        """Create the recorder for the experts of one layer.

        Args:
            experts: the matrices to compute with.
            weights: [experts, out, in].
            prepared: how the matrices will be stored.
            report: called while the weights are rounded.
        """
        self._experts = experts
        self._weights = weights
        self._prepared = prepared
        self._report = report
        self.reads_ends = experts.reads_ends
        count, _, columns = weights.shape
        self._is_shared = not _is_of_experts_down(prepared)
        """Whether all experts take their inputs from the same hidden states."""
        shape = (columns, columns) if self._is_shared else (count, columns)
        self._sums = torch.zeros(shape, device=weights.device)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, pairs: int, out: torch.Tensor) -> None:
        if self._is_shared:
            self._sums += _gram(x[:pairs])
        else:
            start = 0
            for expert, end in enumerate(ends.tolist()):
                self._sums[expert] += x[start:end].float().square().sum(dim=0)
                start = end
        self._experts.forward(x, ends, pairs, out)

    def forward_each(self, x: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("few pairs are for decodes, and a text has none")

    def rounded(self) -> Quantized:
        group, dtype = _grid(self._prepared)
        if self._is_shared:
            weights = self._weights.flatten(0, 1)
            return quantise_calibrated(weights, self._sums, group, dtype, self._report)
        parts = []
        for weights, squares in zip(self._weights, self._sums, strict=True):
            parts.append(nearest_calibrated(weights, squares, group, dtype))
            self._report()
        return stacked(parts)


def _gram(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x.t() @ x


def _grid(prepared: PreparedTensor) -> tuple[int, torch.dtype]:
    """Return a matrix's number of columns per group, and the dtype of its scales and zeros."""
    assert prepared.encoding is not None, "only matrices are rounded"
    return prepared.encoding.group, scale_type(prepared.encoding, prepared.dtype)


def _on_cpu(rounded: Quantized) -> Quantized:
    zeros = None if rounded.zeros is None else rounded.zeros.cpu()
    return Quantized(rounded.format, rounded.values.cpu(), rounded.scales.cpu(), zeros)
