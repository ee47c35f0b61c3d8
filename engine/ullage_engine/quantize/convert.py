"""Offline quantisation of a model from a directory or GGUF file into a new directory.

`ullage quantize` runs `python -m ullage_engine.quantize.convert`, which writes config.json, the
tokenizer and safetensors files. int8, fp8 and w8a8 models use the compressed-tensors format, which
other engines can read. int4 uses its own format (`ullage_engine.model_loader.quantized`), because
zero points from GGUF are not integers.
"""

import argparse
import fcntl
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ullage_common.config.engine import ModelSection
from ullage_common.process.cores import usable_cores
from ullage_engine.kernels.first_calls import make_first_calls
from ullage_engine.model_config.dtypes import resolve_dtype
from ullage_engine.model_config.hf_config import read_config
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.gguf import GgufReader
from ullage_engine.model_loader.loader import load_weights
from ullage_engine.model_loader.prepare import (
    CalibrationError,
    PreparedForm,
    is_matrix,
    open_checkpoint,
    rounded_tensors,
)
from ullage_engine.model_loader.quantized import own_tensors
from ullage_engine.model_loader.safetensors import CheckpointReader
from ullage_engine.model_loader.source import ModelFiles, resolve_source
from ullage_engine.model_loader.tensor_plan import Part, TensorPlan, fit_a_checkpoint, plan_tensors
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.quantization.formats import (
    Format,
    Quantized,
    chosen_encoding,
    quantise,
    rows_of,
)
from ullage_engine.quantize.calibration import Int4Calibration
from ullage_engine.quantize.smoothquant import FED_BY, Maxima, calibrate, smoothing
from ullage_engine.tokenizer.tokenizer import (
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    ModelTokenizer,
    TokenizerError,
    load_tokenizer,
)

SHARD_BYTES = 2 << 30

STATISTICS = "calibration.safetensors"
"""File in a w8a8 model's folder with the largest activation of each input channel.

The safetensors index does not list it.
"""

EMBEDDING = "model.embed_tokens.weight"
"""Name of the embedding, which is used for lookups and not for matmuls."""

_COPIED = (
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
)

Json = dict[str, object]


class ModelDirectory:
    """A model directory that is written shard by shard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shard: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}
        self._nbytes = 0
        self._plain: list[str] = []

    @property
    def plain_linears(self) -> list[str]:
        """Hugging Face names of the modules whose weight matrices stay unquantised."""
        return ["lm_head", *(name for name in self._plain if name != "lm_head")]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor unchanged."""
        if tensor.dim() == 2 and name.endswith(".weight") and name != EMBEDDING:
            self._plain.append(name.removesuffix(".weight"))
        self._store(name, tensor)

    def _store(self, name: str, tensor: torch.Tensor) -> None:
        self._shard[name] = tensor.contiguous().clone()
        self._nbytes += tensor.nbytes
        if sum(each.nbytes for each in self._shard.values()) >= SHARD_BYTES:
            self._flush()

    def add_matrix(self, name: str, matrix: Quantized) -> None:
        """Write the tensors that store a quantised matrix.

        Args:
            name: name of the unquantised matrix, which ends in `.weight`.
            matrix: the quantised matrix.
        """
        stem = name.removesuffix(".weight")
        if matrix.format == "int4":
            for each, tensor in own_tensors(stem, matrix).items():
                self._store(each, tensor)
            return
        self._store(name, matrix.values)
        self._store(f"{stem}.weight_scale", matrix.scales)

    def finish(self, config: Json, source: Path) -> None:
        """Write the last shard, the index, the configuration and the tokenizer."""
        self._flush()
        index = {"metadata": {"total_size": self._nbytes}, "weight_map": self._files}
        self._write_json("model.safetensors.index.json", index)
        self._write_json("config.json", config)
        self._write_tokenizer(source)

    def _flush(self) -> None:
        if not self._shard:
            return
        name = f"model-{len(set(self._files.values())) + 1:05}.safetensors"
        save_file(self._shard, self._folder / name, metadata={"format": "pt"})
        self._files |= dict.fromkeys(self._shard, name)
        self._shard = {}

    def _write_json(self, name: str, value: Json) -> None:
        text = json.dumps(value, indent=2) + "\n"
        (self._folder / name).write_text(text, encoding="utf-8")

    def _write_tokenizer(self, source: Path) -> None:
        if not source.is_dir():
            self._write_described_tokenizer(load_tokenizer(source, generation_defaults=True))
            return
        (self._folder / "tokenizer.json").write_bytes(load_tokenizer(source).json_bytes)
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copy(source / name, self._folder)
        if (source / TEMPLATE_FOLDER).is_dir():
            shutil.copytree(source / TEMPLATE_FOLDER, self._folder / TEMPLATE_FOLDER)

    def _write_described_tokenizer(self, tokenizer: ModelTokenizer) -> None:
        """Write a GGUF file's tokenizer as the separate files that model directories use."""
        (self._folder / "tokenizer.json").write_bytes(tokenizer.json_bytes)
        config: Json = dict(tokenizer.special_tokens)
        if tokenizer.chat_template:
            config["chat_template"] = _with_bos(tokenizer.chat_template, tokenizer)
        if tokenizer.chat_template and tokenizer.tool_chat_template:
            config["chat_template"] = [
                {"name": "default", "template": config["chat_template"]},
                {
                    "name": "tool_use",
                    "template": _with_bos(tokenizer.tool_chat_template, tokenizer),
                },
            ]
        self._write_json("tokenizer_config.json", config)

        defaults = dict(tokenizer.sampling_defaults)
        if ends := list(tokenizer.eos_token_ids):
            self._write_json("generation_config.json", {"eos_token_id": ends, **defaults})


def _with_bos(template: str, tokenizer: ModelTokenizer) -> str:
    """Add a BOS token to a chat template that relies on the tokenizer for it.

    When a model is loaded from a directory, only the chat template adds BOS tokens to chats.
    """
    writes_bos = "bos_token" in template or tokenizer.bos_token in template
    if writes_bos or not tokenizer.chat_adds_bos:
        return template
    return "{{- bos_token }}" + template


@contextmanager
def unfinished_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder next to the output, and remove it at the end.

    Leftovers of a run that was killed are also removed.

    Raises:
        WeightsError: another run is writing the same output.
    """
    folder = output.parent / f"{output.name}.unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # The kernel releases the lock if the run dies.
        _lock(descriptor, folder)
        _empty(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise WeightsError(
            f"{folder}: another run writes it; wait for its end, or name another --output"
        ) from error


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def quantization_config(format: Format, plain: list[str]) -> Json:
    """Return the `quantization_config` section for a model with matrices in this format.

    Args:
        format: number format of the matrices.
        plain: names of modules that are not quantised.
    """
    if format == "int4":
        return {"quant_method": "ullage", "format": "int4"}
    is_float = format == "fp8"
    numbers = {"num_bits": 8, "type": "float" if is_float else "int", "symmetric": True}
    weights = {**numbers, "strategy": "channel", "dynamic": False}
    activations = {**numbers, "strategy": "token", "dynamic": True} if format == "w8a8" else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if is_float else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
    }


Progress = Callable[[str, int, int], None]
"""Progress callback. Its arguments are the stage, the amount completed and the total amount."""

CALIBRATION_TOKENS = 16_384
"""Number of tokens of a text that calibration uses. The rest of the text is ignored."""

_CPU = torch.device("cpu")
_SCALES = torch.bfloat16
"""Dtype of stored scales. float32 represents every such scale exactly, and float16 almost all."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """The options of one `ullage quantize` run."""

    model: str
    """URI of the model, as in `model.source`."""
    format: Format
    output: Path
    text: Path | None = None
    """Text for the calibration of w8a8."""
    alpha: float = 0.5
    """Fraction of the quantisation difficulty that moves from activations to weights."""


def convert(conversion: Conversion, progress: Progress) -> int:
    """Write the quantised model, and return the total size in bytes of its safetensors files.

    Raises:
        WeightsError: the model, the text or the output folder cannot be used, or there is too
            little memory to calibrate int4. The message is one line.
    """
    files = resolve_source(conversion.model)
    reader = open_checkpoint(files)
    _check_model(conversion, reader, files)
    try:
        _check_output(conversion.output)
        with unfinished_folder(conversion.output) as folder:
            maxima = _maxima(conversion, files, folder, progress)
            _write(conversion, files, reader, maxima, folder, progress)
            _publish(folder, conversion.output)
    except CalibrationError as error:
        raise WeightsError(
            f"--format int4: {error}; free memory, or use a machine with more memory"
        ) from error
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise WeightsError(
            f"--output {conversion.output}: {reason}; name a writable folder with enough room"
        ) from error
    return sum(each.stat().st_size for each in conversion.output.glob("*.safetensors"))


def _publish(folder: Path, output: Path) -> None:
    """Move the files to the output folder, and make them readable by all users."""
    output.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.chmod(0o644)
        file.replace(output / file.name)


def _check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise WeightsError(f"--output {output}: is a file; name a new folder")
    if output.exists() and any(output.iterdir()):
        raise WeightsError(f"--output {output}: not empty; name a new folder")


def _check_model(conversion: Conversion, reader: CheckpointReader, files: ModelFiles) -> None:
    if reader.formats:
        raise WeightsError(
            f"--model {conversion.model}: quantised as {', '.join(sorted(reader.formats))} "
            "already; name the unquantised model"
        )
    if files.format == "gguf" and reader.model_config.rope_factors is not None:
        raise WeightsError(
            f"--model {conversion.model}: its rotary factors have no place in config.json; "
            "name the model's directory of safetensors"
        )
    if not fit_a_checkpoint(plan_tensors(reader.model_config)):
        raise WeightsError(
            f"--model {conversion.model}: no checkpoint format holds the experts of "
            f"{reader.model_config.architecture} in {conversion.format}; serve the unquantised "
            f"model with spec.model.quantization: {conversion.format}"
        )
    if conversion.format == "w8a8":
        _check_calibration(conversion, reader.model_config)


def _check_calibration(conversion: Conversion, model_config: ModelConfig) -> None:
    if conversion.text is None:
        raise WeightsError("--format w8a8: needs a text to calibrate with; add --calibrate FILE")
    if model_config.experts is not None:
        raise WeightsError(
            "--format w8a8: models with experts are not supported; use int8, int4 or fp8"
        )


def _maxima(conversion: Conversion, files: ModelFiles, folder: Path, progress: Progress) -> Maxima:
    if conversion.text is None or conversion.format != "w8a8":
        return {}
    try:
        text = conversion.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(
            f"--calibrate {conversion.text}: {error}; name a text in UTF-8"
        ) from error
    tokens = load_tokenizer(files.path).encode_text(text)[:CALIBRATION_TOKENS]
    if not tokens:
        raise WeightsError(f"--calibrate {conversion.text}: it has no text; name another file")
    dtype = resolve_dtype("auto", _CPU)
    with tempfile.TemporaryDirectory(dir=folder) as prepared:
        section = ModelSection(source=conversion.model, name="calibration")
        loaded = load_weights(section, _CPU, dtype, Path(prepared), lambda done, total: None)
        return calibrate(loaded, dtype, tokens, lambda *counts: progress("calibrated", *counts))


def _write(
    conversion: Conversion,
    files: ModelFiles,
    reader: CheckpointReader,
    maxima: Maxima,
    folder: Path,
    progress: Progress,
) -> None:
    directory = ModelDirectory(folder)
    plans = plan_tensors(reader.model_config)
    smoothed = _Smoothed(reader, plans, maxima, conversion.alpha)
    for index, (plan, rounded) in enumerate(_rounded(conversion, files, reader, plans)):
        progress("quantised", index, len(plans))
        first_row = 0
        for part in plan.parts:
            if rounded is not None:
                num_rows = math.prod(part.shape[:-1])
                directory.add_matrix(part.source, rows_of(rounded, first_row, num_rows))
                first_row += num_rows
            elif is_matrix(plan):
                matrix = _matrix(conversion.format, reader, smoothed, plan, part)
                directory.add_matrix(part.source, matrix)
            else:
                directory.add(part.source, _plain(smoothed.read(plan, part)))
    config = _config(files, reader)
    config["quantization_config"] = quantization_config(conversion.format, directory.plain_linears)
    directory.finish(config, files.path)
    if maxima:
        save_file(maxima, folder / STATISTICS)


def _rounded(
    conversion: Conversion, files: ModelFiles, reader: CheckpointReader, plans: list[TensorPlan]
) -> Iterator[tuple[TensorPlan, Quantized | None]]:
    """Yield each tensor's plan in order, together with its calibrated int4 matrix.

    The matrix is None if the tensor is not calibrated. The plan says which parts of the checkpoint
    the tensor is read from.
    """
    if conversion.format != "int4":
        yield from ((plan, None) for plan in plans)
        return
    # A checkpoint is for all devices, so rows are not laid out in a CPU's tiles.
    form = PreparedForm(_SCALES, "int4", torch.device("meta"))
    prepared = [form.prepare(files.path, reader, plan) for plan in plans]
    round_layer = Int4Calibration().begin(files, prepared, reader.model_config, _CPU, lambda: None)
    for each, rounded in rounded_tensors(prepared, round_layer):
        yield each.plan, rounded


def _matrix(
    format: Format, reader: CheckpointReader, smoothed: "_Smoothed", plan: TensorPlan, part: Part
) -> Quantized:
    if reader.encoding(part.source, format) is not None:
        kept = reader.quantized(part.source)
        zeros = None if kept.zeros is None else kept.zeros.to(_SCALES)
        return Quantized(kept.format, kept.values, kept.scales.to(_SCALES), zeros)
    weights = smoothed.read(plan, part)
    return quantise(weights, chosen_encoding(format, (part.shape[0], part.shape[1])), _SCALES)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a dequantised tensor to bfloat16. Return other tensors unchanged.

    A tensor counts as dequantised if it is float32 and has several dimensions.
    """
    return tensor.bfloat16() if tensor.dim() > 1 and tensor.dtype == torch.float32 else tensor


def _config(files: ModelFiles, reader: CheckpointReader) -> dict[str, object]:
    if isinstance(reader, GgufReader):
        return dict(reader.config.values)
    config = dict(read_config(files.path).values)
    if not reader.model_config.tied:
        # The files may have their own head although the configuration ties it.
        ties = config.keys() & {"tie_word_embeddings", "tie_embedding"}
        config |= dict.fromkeys(ties, False)
    return config


class _Smoothed:
    """Reads a checkpoint's tensors, rescaled so that activations are easier to round to int8.

    SmoothQuant changes only norms and the matrices that follow them. Other tensors stay the same.
    """

    def __init__(
        self, reader: CheckpointReader, plans: list[TensorPlan], maxima: Maxima, alpha: float
    ) -> None:
        self._reader = reader
        self._norms: dict[str, torch.Tensor] = {}
        self._columns: dict[str, torch.Tensor] = {}
        by_name = {plan.name: plan for plan in plans}
        for name, largest in maxima.items():
            prefix, _, kind = name.rpartition(".")
            if kind not in FED_BY:
                continue
            norm = by_name[f"{prefix}.{FED_BY[kind]}"]
            weights = torch.cat([reader.read(part.source) for part in by_name[name].parts])
            old = reader.read(norm.parts[0].source)
            new, columns = smoothing(largest, weights, old, alpha)
            self._norms[norm.name] = new
            self._columns[name] = columns

    def read(self, plan: TensorPlan, part: Part) -> torch.Tensor:
        if plan.name in self._norms:
            return self._norms[plan.name]
        tensor = self._reader.read(part.source)
        columns = self._columns.get(plan.name)
        return tensor if columns is None else tensor.float() * columns


EXAMPLES = """\
examples:
  ullage quantize --model hf://org/name@main --format int8 --output ./name-int8
  ullage quantize --model file:///models/name --format w8a8 --calibrate text.txt --output ./w8a8
  ullage quantize --model pvc://models/name --format int4 --output /models/name-int4

Serve the result with model.source: file:///... and leave model.quantization out.
w8a8 needs a text of the kind that the model is used for; 16,384 tokens of it are read.
exit status: 0 written, 2 wrong model, text or folder, or too little memory, 130 and 143 interrupted
"""

_REPORT_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the conversion and return the exit status."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads or usable_cores())
    make_first_calls()
    conversion = Conversion(
        model=options.model,
        format=options.format,
        output=options.output,
        text=options.calibrate,
        alpha=options.alpha,
    )
    try:
        with ended_by_exit():
            nbytes = convert(conversion, reporter())
    except KeyboardInterrupt:
        return 130
    except (WeightsError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {nbytes / 2**20:.0f} MiB of weights to {options.output}")
    return 0


@contextmanager
def ended_by_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM within the `with` block, so that unfinished files are removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def reporter() -> Progress:
    """Return a callback that prints a stage's progress at most once a second."""
    last = 0.0

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_S:
            last = time.monotonic()
            print(f"{stage} {done} of {total}", file=sys.stderr, flush=True)

    return report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ullage quantize",
        description="Write a model with its matrices in a smaller format.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, help="hf://, s3://, file://, pvc:// or pkg:// URI"
    )
    parser.add_argument("--format", required=True, choices=["int8", "int4", "fp8", "w8a8"])
    parser.add_argument("--output", type=Path, required=True, help="folder to write, new or empty")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="text for w8a8, UTF-8")
    parser.add_argument(
        "--alpha", type=_share, default=0.5, help="how far w8a8 smooths activations, 0 to 1 (0.5)"
    )
    parser.add_argument("--threads", type=_count, help="CPU threads (every core)")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
