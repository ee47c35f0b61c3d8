"""Every matrix of small random models is rounded to int4 for the inputs that it gets, once."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from ullage_testing.small_models import make_family

from ullage_common.config.engine import ModelSection
from ullage_engine.model_config.hf_config import HFConfig
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_config.registry import read_model_config
from ullage_engine.model_loader.loader import LoadedModel, load_weights
from ullage_engine.model_loader.prepare import (
    PreparedForm,
    PreparedTensor,
    RoundLayer,
    open_checkpoint,
)
from ullage_engine.model_loader.safetensors import CheckpointReader
from ullage_engine.model_loader.source import ModelFiles, resolve_source
from ullage_engine.model_loader.tensor_plan import plan_tensors
from ullage_engine.parallel.layout import RankLayout
from ullage_engine.parallel.slices import Slicer, check_groups
from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.quantization.formats import Encoding, Packed, Quantized, pack, unpack
from ullage_engine.quantize import convert
from ullage_engine.quantize.calibration import (
    AT_LOAD,
    TEXT,
    WINDOW,
    Cost,
    ExpertRecorder,
    Int4Calibration,
    estimated_cost,
)
from ullage_engine.quantize.smoothquant import TextPass
from ullage_engine.runner.model_runner import ModelRunner
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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    section = ModelSection(source=f"file://{folder}", name="t", quantization=quantization)  # type: ignore[arg-type]
    return load_weights(
        section,
        CPU,
        torch.float32,
        folder / prepared,
        progress,
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


def of_layers(model: LoadedModel) -> list[str]:
    """Quantised matrices but for the vocabulary's, which are never calibrated."""
    return [name for name in model.encodings if name.startswith("layers.")]


@pytest.mark.parametrize("family", ["llama", "lfm2_moe", "gpt_oss"])
def test_answers_stay_nearer_than_rounded_to_the_nearest(
    family: str, save: Callable[..., Path]
) -> None:
    folder = save(family)
    plain = logits(load(folder, "none"), folder)
    calibrated = load(folder, "int4", SHORT)
    nearest = load(folder, "int4")
    assert calibrated.encodings == nearest.encodings
    assert {calibrated.encodings[name].format for name in of_layers(calibrated)} == {"int4"}
    for name in of_layers(calibrated):
        assert not torch.equal(*(unpack(m.packed(name)).values for m in (calibrated, nearest)))
    cost, cost_of_nearest = (
        divergence(logits(each, folder), plain) for each in (calibrated, nearest)
    )
    assert cost < 0.8 * cost_of_nearest


def test_scales_are_of_the_type_that_they_are_stored_in(save: Callable[..., Path]) -> None:
    """Values are the nearest to them that way; on a CPU that is the tiles' float16."""
    folder = save("llama")
    files = resolve_source(f"file://{folder}")
    reader = open_checkpoint(files)
    for device in (CPU, torch.device("meta")):
        form = PreparedForm(torch.float32, "int4", device)
        prepared = [
            form.prepare(folder, reader, plan) for plan in plan_tensors(reader.model_config)
        ]
        round_layer = SHORT.begin(files, prepared, reader.model_config, CPU, lambda: None)
        assert round_layer is not None
        layer = [each for each in prepared if each.name.startswith("layers.0.")]
        for name, rounded in round_layer(layer).items():
            encoding = next(each.encoding for each in layer if each.name == name)
            assert encoding is not None
            stored = unpack(Packed(encoding, pack(rounded, encoding, torch.float32)))
            assert torch.equal(stored.scales.float(), rounded.scales.float()), (name, device)
            assert torch.equal(stored.values, rounded.values)


def test_a_model_is_calibrated_once_and_always_alike(save: Callable[..., Path]) -> None:
    folder = save("llama")
    first = load(folder, "int4", SHORT)
    mapped = load(folder, "int4", Never(max_tokens=SHORT.max_tokens))
    again = load(folder, "int4", SHORT, prepared="other")
    for other in (mapped, again):
        assert all(torch.equal(each, other.tensors[n]) for n, each in first.tensors.items())


def test_tensor_ranks_share_what_is_calibrated(save: Callable[..., Path]) -> None:
    folder = save("llama")
    layout = RankLayout(tensor=2, pipeline=1)
    whole = load(folder, "int4", SHORT)
    name = "layers.1.down"
    parts = []
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


@pytest.mark.parametrize("most", [Cost(0.0, 1 << 40), Cost(1e15, 0)])
def test_what_a_pod_cannot_afford_is_rounded_to_the_nearest(
    most: Cost,
    save: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(AT_LOAD, "cpu", most)
    folder = save("llama")
    with caplog.at_level(logging.WARNING):
        rounded = load(folder, "int4", Int4Calibration(SHORT.text, SHORT.max_tokens, True))
    [warning] = caplog.messages
    assert "uncalibrated" in warning
    assert "ullage quantize --format int4" in warning
    nearest = load(folder, "int4")
    assert all(torch.equal(each, nearest.tensors[n]) for n, each in rounded.tensors.items())
    ahead = load(folder, "int4", SHORT, prepared="ahead")
    assert any(not torch.equal(each, ahead.tensors[n]) for n, each in rounded.tensors.items())


class Unquantised:
    """A checkpoint of which nothing but that its matrices are plain is known."""

    formats: frozenset[str] = frozenset()

    def encoding(self, source: str, target: str | None) -> None:
        return None


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "eos_token_id": 0,
}


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocab", "fits"),
    [
        (576, 1536, 30, 9, 3, 49_152, {"cpu", "cuda"}),
        (2_048, 8_192, 16, 32, 8, 128_256, {"cuda"}),
        (4_096, 14_336, 32, 32, 8, 128_256, {"cuda"}),
        (8_192, 28_672, 80, 64, 8, 128_256, set()),
    ],
    ids=["135M", "1B", "8B", "70B"],
)
def test_a_pod_calibrates_what_it_can_before_its_deadline(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    fits: set[str],
) -> None:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }
    model_config = read_model_config(HFConfig(Path("config.json"), LLAMA | sizes))
    form = PreparedForm(torch.bfloat16, "int4", CPU)
    reader = cast(CheckpointReader, Unquantised())
    prepared = [form.prepare(Path("m"), reader, plan) for plan in plan_tensors(model_config)]
    cost = estimated_cost(prepared, model_config, 17, WINDOW)
    assert {kind for kind, most in AT_LOAD.items() if cost.fits(most)} == fits


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Lets memory run out once, in the second layer; returns the plans that were computed."""
    compute = ModelRunner.hidden
    plans = list[StepPlan]()

    def hidden(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
        plans.append(plan)
        if len(plans) == 2:
            raise torch.OutOfMemoryError("no room")
        return compute(runner, plan)

    monkeypatch.setattr(ModelRunner, "hidden", hidden)
    return plans


def test_a_passing_shortage_rounds_all_to_the_nearest_in_its_weights_folder(
    save: Callable[..., Path], shortage: list[StepPlan], caplog: pytest.LogCaptureFixture
) -> None:
    folder = save("llama")
    with caplog.at_level(logging.WARNING):
        rounded = load(folder, "int4", SHORT)
    [warning] = caplog.messages
    assert "layer 1 cannot be calibrated: no room" in warning
    assert "ullage quantize --format int4" in warning
    assert f"the next start with an empty weights folder ({folder / 'prepared'})" in warning
    assert len(shortage) == 2
    nearest = load(folder, "int4", prepared="nearest")
    assert rounded.key == nearest.key
    assert all(torch.equal(each, nearest.tensors[n]) for n, each in rounded.tensors.items())
    # A worker that starts again, though there is room now.
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        again = load(folder, "int4", Never(max_tokens=SHORT.max_tokens))
    assert again.key == rounded.key
    [warning] = caplog.messages
    assert "uncalibrated" in warning
    assert f"{folder / 'prepared' / rounded.key}.weights" in warning
    # The next pod, with room, calibrates.
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        calibrated = load(folder, "int4", SHORT, prepared="calibrated")
    assert not caplog.messages
    for name in of_layers(calibrated):
        assert not torch.equal(*(unpack(m.packed(name)).values for m in (calibrated, nearest)))


def test_who_waits_for_a_calibration_that_fails_maps_what_comes_of_it(
    save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one group share a weights folder, and must compute with the same numbers."""
    folder = save("llama")
    waits = threading.Event()
    others = list[Future[LoadedModel]]()

    def hidden(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
        never = Never(max_tokens=SHORT.max_tokens)
        # Its first report is that of its waiting, since there is no file to read.
        others.append(
            threads.submit(load, folder, "int4", never, progress=lambda done, total: waits.set())
        )
        assert waits.wait(60)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ModelRunner, "hidden", hidden)
    with ThreadPoolExecutor(1) as threads:
        rounded = load(folder, "int4", SHORT)
        [other] = [each.result(60) for each in others]
    assert other.key == rounded.key


class Outsized(torch.Tensor):
    """A tensor that no device has room for."""

    def to(self, *arguments: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")


@pytest.fixture
def text_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the device no room for the embedded text."""
    read = PreparedTensor.weights

    def weights(prepared: PreparedTensor) -> torch.Tensor:
        tensor = read(prepared)
        return tensor.as_subclass(Outsized) if prepared.name == "embedding" else tensor

    monkeypatch.setattr(PreparedTensor, "weights", weights)


@pytest.mark.usefixtures("text_shortage")
def test_a_text_that_has_no_room_rounds_all_to_the_nearest(
    save: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = save("llama")
    with caplog.at_level(logging.WARNING):
        rounded = load(folder, "int4", SHORT)
    [warning] = caplog.messages
    assert "the model cannot be calibrated: no room" in warning
    assert rounded.key == load(folder, "int4", prepared="nearest").key


@pytest.mark.parametrize(
    ("lack", "what"), [("text_shortage", "the model"), ("shortage", "layer 1")]
)
def test_an_offline_run_that_cannot_calibrate_writes_nothing(
    save: Callable[..., Path],
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    lack: str,
    what: str,
) -> None:
    request.getfixturevalue(lack)
    folder = save("llama")
    output = folder.parent / "int4"
    arguments = ["--model", f"file://{folder}", "--format", "int4", "--output", str(output)]
    assert convert.main(arguments) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"--format int4: {what} cannot be calibrated: no room; free memory" in error
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize(("family", "has_remedy"), [("llama", True), ("gpt_oss", False)])
@pytest.mark.parametrize("lacks", ["time", "memory"])
def test_a_warning_names_no_remedy_that_the_model_cannot_take(
    family: str,
    has_remedy: bool,
    lacks: str,
    save: Callable[..., Path],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No checkpoint format holds the stacked experts of gpt-oss."""
    if lacks == "time":
        monkeypatch.setitem(AT_LOAD, "cpu", Cost(0.0, 0))
    else:
        request.getfixturevalue("shortage")
    folder = save(family)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load(folder, "int4", Int4Calibration(SHORT.text, SHORT.max_tokens, True))
    [warning] = caplog.messages
    assert "may cost a fifth of the perplexity" in warning
    assert ("ullage quantize" in warning) == has_remedy


def test_each_expert_is_reported(
    save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of many experts is no silence by which the worker would count as hung."""
    reports: list[str] = []
    finish = ExpertRecorder.rounded

    def rounded(recorder: ExpertRecorder) -> Quantized:
        report = recorder._report
        name = recorder._prepared.name
        recorder._report = lambda: (reports.append(name), report())[1]
        return finish(recorder)

    monkeypatch.setattr(ExpertRecorder, "rounded", rounded)
    load(save("gpt_oss"), "int4", SHORT)
    assert reports.count("layers.0.experts_down") == 8
    assert reports.count("layers.0.experts_gate_up") == 1


def test_the_text_is_not_the_one_that_quality_is_measured_on() -> None:
    measured = (Path(__file__).parents[3] / "benchmarks" / "quality.txt").read_text().split()
    own = TEXT.read_text(encoding="utf-8").split()
    runs = [{tuple(words[i : i + 6]) for i in range(len(words) - 5)} for words in (measured, own)]
    assert not runs[0] & runs[1]
