"""Every matrix of small random models is rounded to int4 for the inputs that it gets, once."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from ullage_testing.small_models import make_family

from ullage_common.config.engine import ModelSection
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.model_loader.prepare import PreparedTensor, RoundLayer
from ullage_engine.model_loader.source import ModelFiles
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.parallel.slices import Slicer, check_groups
from ullage_engine.quantization.formats import Encoding, unpack
from ullage_engine.quantize.calibration import TEXT, WINDOW, Int4Calibration
from ullage_engine.quantize.smoothquant import TextPass
from ullage_engine.tokenizer.tokenizer import load_tokenizer

CPU = torch.device("cpu")
VOCAB = 256
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
SHORT = Int4Calibration(max_tokens=1_200)
"""Reads enough for matrices of so few columns."""


class Never(Int4Calibration):
    """The same calibration, for a model that needs none any more."""

    def begin(
        self,
        files: ModelFiles,
        prepared: Sequence[PreparedTensor],
        model_config: ModelConfig,
        device: torch.device,
        report: Callable[[], None],
    ) -> RoundLayer | None:
        raise AssertionError("calibrated again")


@pytest.fixture
def save(tmp_path: Path, seed: int) -> Callable[..., Path]:
    """Saves a small model of a family, with a tokenizer of bytes."""

    def save_family(family: str, **overrides: object) -> Path:
        folder = tmp_path / family
        make_family(family, seed, **(SIZES | overrides)).save_pretrained(folder)
        letters = sorted(ByteLevel.alphabet())
        tokenizer = Tokenizer(WordLevel({each: i for i, each in enumerate(letters)}))
        tokenizer.pre_tokenizer = Steps([ByteLevel(False, use_regex=False), Split("", "isolated")])
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return save_family


def load(
    folder: Path,
    quantization: str,
    calibration: Int4Calibration | None = None,
    shard: Callable[[ModelConfig, dict[str, Encoding]], Slicer] | None = None,
    prepared: str = "prepared",
) -> LoadedModel:
    section = ModelSection(source=f"file://{folder}", name="t", quantization=quantization)  # type: ignore[arg-type]
    return load_weights(
        section,
        CPU,
        torch.float32,
        folder / prepared,
        lambda done, total: None,
        shard,
        calibration,
    )


def logits(loaded: LoadedModel, folder: Path) -> torch.Tensor:
    """Of the end of the calibration's text, which SHORT does not read."""
    end = TEXT.read_text(encoding="utf-8")[-WINDOW:]
    tokens = load_tokenizer(folder).encode_text(end)
    return TextPass(loaded, torch.float32, 4 * WINDOW).logits(tokens)


def divergence(logits: torch.Tensor, plain: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of the next token."""
    target = plain.log_softmax(1)
    return float((target.exp() * (target - logits.log_softmax(1))).sum(1).mean())


@pytest.mark.parametrize("family", ["llama", "lfm2_moe", "gpt_oss"])
def test_answers_stay_nearer_than_rounded_to_the_nearest(
    family: str, save: Callable[..., Path]
) -> None:
    folder = save(family)
    plain = logits(load(folder, "none"), folder)
    calibrated, nearest = load(folder, "int4", SHORT), load(folder, "int4")
    assert calibrated.encodings == nearest.encodings
    assert {each.format for each in calibrated.encodings.values()} == {"int4"}
    for name in calibrated.encodings:
        assert not torch.equal(*(unpack(m.packed(name)).values for m in (calibrated, nearest)))
    cost, cost_of_nearest = (
        divergence(logits(each, folder), plain) for each in (calibrated, nearest)
    )
    assert cost < 0.8 * cost_of_nearest


def test_a_model_is_calibrated_once_and_always_alike(save: Callable[..., Path]) -> None:
    folder = save("llama")
    first = load(folder, "int4", SHORT)
    mapped = load(folder, "int4", Never(max_tokens=SHORT.max_tokens))
    again = load(folder, "int4", SHORT, prepared="other")
    for other in (mapped, again):
        assert all(torch.equal(each, other.tensors[n]) for n, each in first.tensors.items())


def test_tensor_ranks_share_what_is_calibrated(save: Callable[..., Path]) -> None:
    folder, layout = save("llama"), RankLayout(tensor=2, pipeline=1)
    whole = load(folder, "int4", SHORT)
    name, parts = "layers.1.down", []
    for rank in range(2):

        def shard(config: ModelConfig, encodings: dict[str, Encoding], rank: int = rank) -> Slicer:
            check_groups("single", config, encodings, layout)
            return Slicer(config, layout, rank, encodings)

        loaded = load(folder, "int4", Never(max_tokens=SHORT.max_tokens), shard)
        parts.append(unpack(loaded.packed(name)).dequantise())
    assert torch.equal(torch.cat(parts, dim=1), unpack(whole.packed(name)).dequantise())


def test_a_model_without_tokenizer_is_rounded_to_the_nearest(
    save: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = save("llama")
    (folder / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        rounded = load(folder, "int4", SHORT)
    assert "uncalibrated" in caplog.text
    assert "tokenizer.json" in caplog.text
    nearest = load(folder, "int4")
    assert all(torch.equal(each, nearest.tensors[n]) for n, each in rounded.tensors.items())


def test_the_text_is_not_the_one_that_quality_is_measured_on() -> None:
    measured = (Path(__file__).parents[3] / "benchmarks" / "quality.txt").read_text().split()
    own = TEXT.read_text(encoding="utf-8").split()
    runs = [{tuple(words[i : i + 6]) for i in range(len(words) - 5)} for words in (measured, own)]
    assert not runs[0] & runs[1]
