"""Measure the perplexity, agreement and size of each quantization format.

Perplexity is measured on benchmarks/quality.txt in windows of 512 tokens. Agreement is the share of
positions at which the likeliest next token is the same as with `none`. The computation is that of a
service without a `dtype`: if the C++ library computes, KV is bfloat16 and rows are rounded to int8.

SmolLM2 is a file with four-bit weights (Q4_1), so all formats start from weights that were rounded
before:

none          these weights, dequantized
auto          the format of a service that sets no format
int4          the blocks in the file
int4 afresh   a copy in bfloat16 with shuffled channels, quantized again. The shuffle does not
              change what the model computes, but each new group has weights from many old groups.
              So no quantization grid fits a group exactly, as in a model that was never rounded.
w8a8          weights calibrated on another text
fp8 KV        the weights of `none`. Attention reads all keys and values from float8, including
              those of the current token, so that more tokens fit into the same memory.

The exit status is 1 if a gate fails. The benchmark takes some minutes.

examples:
  python -m benchmarks quality
  python -m benchmarks quality --forms auto
  python -m benchmarks quality --forms int8 int4 --tokens 1024
"""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.support.options import SMOLLM2, new_parser
from ullage_common.config.engine import ModelSection
from ullage_engine.model_config.dtypes import KvDtype, resolve_dtype
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.gguf import GgufReader
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.model_loader.prepare import open_checkpoint
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.quantize.calibration import Int4Calibration
from ullage_engine.quantize.convert import Conversion, ModelDirectory, convert
from ullage_engine.quantize.smoothquant import TextPass
from ullage_engine.tokenizer.tokenizer import load_tokenizer

HERE = Path(__file__).parent
TEXT = HERE / "quality.txt"
CALIBRATION = HERE.parent / "docs" / "reasons" / "architecture.md"
WINDOW = 512
CPU = torch.device("cpu")
DTYPE = resolve_dtype("auto", CPU)
FORMS = ("none", "auto", "int8", "int4", "int4 afresh", "fp8", "w8a8", "fp8 KV", "auto, fp8 KV")

WORST = {
    "auto": 0.005,
    "int8": 0.005,
    "int4": 0.05,
    "int4 afresh": 0.05,
    "fp8 KV": 0.01,
    "auto, fp8 KV": 0.015,
}
"""Maximum relative growth of the perplexity."""
LEAST_ROOM = 0.15
"""Minimum relative growth in the number of tokens whose KV fits. `auto` is exempt, since it equals
`none` if the C++ library does not compute."""


@dataclass(frozen=True, slots=True)
class Scores:
    perplexity: float
    choices: torch.Tensor
    """The likeliest token after each position."""
    nbytes: int
    token_bytes: int
    """KV bytes per token."""


def main() -> int:
    parser = new_parser("quality", __doc__)
    parser.add_argument("--source", default=SMOLLM2, help="model source URI (default: %(default)s)")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=FORMS)
    parser.add_argument(
        "--tokens", type=int, default=None, help="use only the first tokens of the text"
    )
    parser.add_argument("--device-mib", type=int, default=1024, help="(default: %(default)s)")
    parser.add_argument("--other-mib", type=int, default=256, help="memory besides weights and KV")
    options = parser.parse_args()

    tokens = load_tokenizer(resolve_source(options.source).path).encode_text(TEXT.read_text())
    tokens = tokens[: options.tokens]

    wanted = dict.fromkeys(["none", *options.forms])
    scores = {}
    print(
        f"{len(tokens)} tokens; room for KV on {options.device_mib} MiB at 85 %, less "
        f"{options.other_mib} MiB"
    )

    for form in wanted:
        with prepared(options.source, form) as loaded:
            scores[form] = measure(loaded, tokens, "fp8" if form.endswith("fp8 KV") else "auto")
        room = 0.85 * options.device_mib * 2**20 - options.other_mib * 2**20
        show(form, scores[form], scores["none"], room)

    return 0 if all([*gates(scores, room)]) else 1


@contextmanager
def prepared(source: str, form: str) -> Iterator[LoadedModel]:
    """Load the model in one of the formats."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if form == "w8a8":
            output = folder / "w8a8"
            conversion = Conversion(source, "w8a8", output, CALIBRATION)
            convert(conversion, lambda stage, done, total: None)
            yield load(f"file://{output}", "none", folder)
        elif form == "int4 afresh":
            write_shuffled(source, folder / "shuffled")
            yield load(f"file://{folder}/shuffled", "int4", folder)
        elif form.endswith("fp8 KV"):
            yield load(source, "auto" if form.startswith("auto") else "none", folder)
        else:
            yield load(source, form, folder)


def load(source: str, quantization: str, folder: Path) -> LoadedModel:
    section = ModelSection(source=source, name="quality", quantization=quantization)  # type: ignore[arg-type]
    calibration = Int4Calibration()
    return load_weights(
        section, CPU, DTYPE, folder, lambda done, total: None, calibration=calibration
    )


def write_shuffled(source: str, folder: Path) -> None:
    """Write an equivalent Llama model in bfloat16 with its channels in another order."""
    files = resolve_source(source)
    reader = open_checkpoint(files)
    assert isinstance(reader, GgufReader)
    folder.mkdir()
    directory = ModelDirectory(folder)
    for plan in plan_tensors(reader.model_config):
        for part in plan.parts:
            tensor = shuffled(part.source, reader.read(part.source), reader.model_config)
            directory.add(part.source, tensor.bfloat16() if tensor.dim() > 1 else tensor)
    directory.finish(dict(reader.config.values), files.path)


def shuffled(name: str, tensor: torch.Tensor, model_config: ModelConfig) -> torch.Tensor:
    """Return a checkpoint tensor with its channels in another order.

    The channels of hidden states, of each layer's feed-forward network and of each head's values
    are shuffled.
    """
    hidden = order(model_config.hidden, 0)
    if tensor.dim() == 1:
        return tensor[hidden]
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind in ("embed_tokens", "q_proj", "k_proj"):
        return tensor[:, hidden]

    layer = 1 + int(name.split(".")[2])
    inner = order(model_config.intermediate, layer)
    num_heads = model_config.num_heads
    num_kv_heads = model_config.num_kv_heads
    width = model_config.head_dim

    heads = torch.stack([order(width, 1_000 * layer + head) for head in range(num_kv_heads)])

    match kind:
        case "v_proj":
            rows = heads + width * torch.arange(num_kv_heads).unsqueeze(1)
            return tensor[rows.flatten()][:, hidden]
        case "o_proj":
            heads = heads.repeat_interleave(model_config.group_size, dim=0)
            columns = heads + width * torch.arange(num_heads).unsqueeze(1)
            return tensor[hidden][:, columns.flatten()]
        case "down_proj":
            return tensor[hidden][:, inner]
        case _:
            return tensor[inner][:, hidden]


def order(size: int, seed: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def measure(loaded: LoadedModel, tokens: list[int], kv_dtype: KvDtype) -> Scores:
    text = TextPass(loaded, DTYPE, WINDOW, kv_dtype=kv_dtype)
    total = 0.0
    choices = []
    starts = range(0, len(tokens) - 1, WINDOW)
    for start in starts:
        window = tokens[start : start + WINDOW]
        logits = text.logits(window)[:-1].float()
        total += float(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
        choices.append(logits.argmax(dim=1))
    chosen = torch.cat(choices)
    return Scores(math.exp(total / len(chosen)), chosen, loaded.nbytes, text.kv_token_bytes)


def kv_tokens(scores: Scores, room: float) -> float:
    """Return the number of tokens whose KV fits into memory next to the weights."""
    return (room - scores.nbytes) / scores.token_bytes


def show(form: str, scores: Scores, base: Scores, room: float) -> None:
    worse = scores.perplexity / base.perplexity - 1
    agreement = (scores.choices == base.choices).float().mean().item()
    more = kv_tokens(scores, room) / kv_tokens(base, room) - 1
    print(
        f"{form:12} perplexity {scores.perplexity:8.3f} ({worse:+7.2%})  agreement {agreement:6.1%}"
        f"  weights {scores.nbytes / 2**20:6.1f} MiB  KV {kv_tokens(scores, room):6.0f} tokens "
        f"({more:+.1%})",
        flush=True,
    )


def gates(scores: dict[str, Scores], room: float) -> Iterator[bool]:
    """Check each gate that applies, print the outcome, and yield whether the gate passes."""
    base = scores["none"]
    for form, most in WORST.items():
        if form not in scores:
            continue
        worse = scores[form].perplexity / base.perplexity - 1
        more = kv_tokens(scores[form], room) / kv_tokens(base, room) - 1
        checks = [(f"perplexity {worse:+.2%}, at most {most:+.1%}", worse <= most)]
        if form != "auto":
            least = f"room {more:+.1%}, at least {LEAST_ROOM:+.0%}"
            checks.append((least, more >= LEAST_ROOM))
        for text, holds in checks:
            print(f"{'pass' if holds else 'FAIL'} {form}: {text}")
            yield holds
