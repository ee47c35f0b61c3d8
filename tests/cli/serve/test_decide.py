"""The choices of `ullage serve`: formats, lengths and memory that fit, and refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_cli.manifest_draft import Draft, model_name, service_name
from ullage_cli.serve.decide import (
    ServeMachine,
    ServeOptions,
    budget_of,
    decide,
    summary,
)
from ullage_cli.serve.fit import WORKER_BYTES, Budget, choose_fit, needed_bytes
from ullage_common.model_sizes import (
    FormSizes,
    GpuMemory,
    LengthSizes,
    MachineFacts,
    ModelSizes,
    SourceSizes,
)
from ullage_operator.api.errors import LocalFailure

GIB = 1 << 30
MIB = 1 << 20
PARAMETERS = 8 * GIB
BITS = {"auto": 16, "fp8": 8, "int8": 8, "int4": 4}
KV_PER_TOKEN = 128 << 10
LENGTHS = (32_768, 16_384, 8192, 4096, 2048, 1024)


def form(quantization: str, parameters: int = PARAMETERS, ranks: int = 1) -> FormSizes:
    weights = parameters * BITS[quantization] // 8
    return FormSizes(
        quantization=quantization,
        tensor=ranks,
        dtype="bfloat16",
        stored=() if quantization == "auto" else (quantization,),
        weights_bytes=weights,
        rank_weights_bytes=weights // ranks,
        kv_dtype="bfloat16",
        kv_bytes_per_token=KV_PER_TOKEN,
        lengths=tuple(
            LengthSizes(tokens=tokens, kv_bytes=tokens * KV_PER_TOKEN, buffer_bytes=100 * MIB)
            for tokens in LENGTHS
        ),
    )


def model(parameters: int = PARAMETERS, counts: tuple[int, ...] = (1,)) -> SourceSizes:
    forms = tuple(form(each, parameters, count) for each in BITS for count in counts)
    sizes = ModelSizes(
        architecture="llama",
        parameters=parameters,
        max_position=LENGTHS[0],
        checkpoint_formats=(),
        forms=forms,
    )
    return SourceSizes(source="hf://org/Name-8B", name="org/Name-8B", sizes=sizes)


def cpu(memory: int, *, has_vllm: bool = False) -> ServeMachine:
    facts = MachineFacts(device="cpu", instruction_set="avx2", has_vllm=has_vllm)
    return ServeMachine(facts=facts, memory_bytes=memory, cores=8)


def gpus(count: int, memory: int) -> ServeMachine:
    gpu = GpuMemory(name="H", total_bytes=memory, free_bytes=memory)
    facts = MachineFacts(device="cuda", gpus=(gpu,) * count, has_bfloat16=True)
    return ServeMachine(facts=facts, memory_bytes=64 * GIB, cores=8)


def chosen(draft: Draft) -> tuple[object, object]:
    return draft.get("spec.model.quantization"), draft.get("spec.model.maxModelLen")


def asking(**fields: object) -> ServeOptions:
    return ServeOptions(source="hf://org/Name-8B", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "quantization", "length"),
    [
        (128, "Auto", 32_768),  # 16 GiB of weights, and 4 GiB for the longest request
        (22, "Auto", 8192),  # shorter requests, before the weights are rounded
        (16, "Int8", 32_768),
        (8, "Int4", 8192),
        (6, "Int4", 2048),  # no format has room for a comfortable request
    ],
)
def test_a_cpu_gets_the_most_precise_format_that_fits(
    memory: int, quantization: str, length: int
) -> None:
    draft = decide(model(), cpu(memory * GIB), asking())
    assert chosen(draft) == (quantization, length)
    assert draft.get("spec.device") == "CPU"
    assert draft.get("spec.limits.requestTimeout") == "120s"
    service = draft.service()
    assert service.spec.memory.max_kv is not None
    assert service.spec.memory.max_kv >= length * KV_PER_TOKEN


def test_gpus_share_a_model_before_it_is_rounded() -> None:
    counts = (1, 2, 4)
    draft = decide(model(counts=counts), gpus(1, 20 * GIB), asking())
    assert chosen(draft) == ("FP8", 32_768)
    draft = decide(model(counts=counts), gpus(2, 20 * GIB), asking())
    assert chosen(draft) == ("Auto", 32_768)
    assert draft.get("spec.pools.single.parallelism") == {"tensor": 2, "pipeline": 1}
    assert draft.get("spec.pools.single.gpus") == 2
    assert draft.get("spec.memory.maxKV") is None  # KV takes all that is left
    draft.service()


def test_memory_of_other_processes_on_a_gpu_is_not_promised() -> None:
    busy = GpuMemory(name="H", total_bytes=80 * GIB, free_bytes=20 * GIB)
    facts = MachineFacts(device="cuda", gpus=(busy,))
    machine = ServeMachine(facts=facts, memory_bytes=64 * GIB, cores=8)
    budget = budget_of(machine, asking())
    assert budget.rank_bytes(1) <= 20 * GIB


def test_what_the_user_asked_for_is_taken() -> None:
    asked = asking(
        name="chat",
        dtype="Float32",
        quantization="int8",
        kv_dtype="FP8",
        max_model_len=LENGTHS[0],
        max_sequences=8,
        threshold_percent=70,
        needs_key=True,
    )
    draft = decide(model(), cpu(64 * GIB), asked)
    spec = draft.service().spec
    assert (spec.model.name, spec.model.dtype, spec.model.quantization) == (
        "chat",
        "float32",
        "int8",
    )
    assert (spec.model.kv_dtype, spec.model.max_model_len) == ("fp8", 32_768)
    assert (spec.batching.max_sequences, spec.memory.threshold_percent) == (8, 70)
    assert spec.tenants is not None
    assert spec.tenants.secret_name == "chat-keys"


def test_every_choice_has_a_reason_that_the_manifest_shows() -> None:
    draft = decide(model(), cpu(16 * GIB), asking())
    text = draft.text()
    for path in ("device", "model.quantization", "model.maxModelLen", "model.dtype"):
        assert draft.reasons[f"spec.{path}"]
    assert "# the weights as published do not fit, but 8.0 GiB as int8 do" in text
    assert any(line.startswith("model.quantization: Int8 (") for line in summary(draft))


def test_a_refusal_names_the_bytes_and_the_formats_that_fit() -> None:
    with pytest.raises(LocalFailure) as refused:
        decide(model(), cpu(12 * GIB), asking(quantization="auto"))
    lines = str(refused.value).splitlines()
    assert "org/Name-8B does not fit" in lines[0]
    assert "it needs 16.7 GiB" in lines[0]
    assert "this machine has 9.8 GiB for it" in lines[0]
    assert "--quantization auto: 16.0 GiB of weights, 16.7 GiB needed, which does not fit" in lines
    assert "--quantization int8: 8.0 GiB of weights, 8.7 GiB needed, which fits" in lines
    assert lines[-1].startswith("try --quantization int8 --max-model-len")


def test_a_machine_that_is_too_small_for_every_format() -> None:
    with pytest.raises(LocalFailure, match="no format fits; free memory"):
        decide(model(), cpu(2 * GIB), asking())


def test_a_length_that_was_asked_for_fits_or_is_refused() -> None:
    sizes = model()
    with pytest.raises(LocalFailure, match="serves at most 32768 tokens; set that or less"):
        decide(sizes, cpu(64 * GIB), asking(max_model_len=40_000))
    draft = decide(sizes, cpu(24 * GIB), asking(max_model_len=LENGTHS[0]))
    assert chosen(draft) == ("Int8", 32_768)
    with pytest.raises(LocalFailure, match="does not fit"):
        decide(sizes, cpu(6 * GIB), asking(max_model_len=LENGTHS[0]))


def test_models_of_vllm_alone() -> None:
    unknown = SourceSizes(
        source="hf://org/Gemma",
        name="org/Gemma",
        error="model_type 'gemma3' is not supported",
        file_bytes=4 * GIB,
    )
    with pytest.raises(LocalFailure, match=r"'gemma3' is not supported; install ullage\[vllm\]"):
        decide(unknown, cpu(64 * GIB), asking())
    draft = decide(unknown, cpu(64 * GIB, has_vllm=True), asking(max_model_len=1000))
    assert draft.get("spec.engine") == "VLLM"
    assert draft.service().spec.model.max_model_len == 1000
    with pytest.raises(LocalFailure, match=r"its files have 4\.0 GiB"):
        decide(unknown, cpu(2 * GIB, has_vllm=True), asking())


def test_quantised_checkpoints_are_left_to_the_engine() -> None:
    unsized = SourceSizes(
        source="hf://org/A-AWQ", name="org/A-AWQ", is_unsized=True, error="awq", file_bytes=GIB
    )
    draft = decide(unsized, cpu(16 * GIB), asking())
    assert draft.get("spec.engine") is None
    assert "its files have 1.0 GiB" in draft.reasons["spec.device"]
    draft.service()


def test_a_missing_source_is_told_as_it_is() -> None:
    missing = SourceSizes(source="file:///x", name="x", error="/x does not exist", is_missing=True)
    with pytest.raises(LocalFailure, match=r"^/x does not exist$"):
        decide(missing, cpu(GIB, has_vllm=True), asking())


@given(
    memory=st.integers(1, 200 * GIB),
    parameters=st.integers(10**7, 10**11),
    threshold=st.integers(1, 100),
    asked=st.none() | st.sampled_from(LENGTHS[:1]),
)
def test_a_choice_fits_and_no_more_precise_one_serves_as_much(
    memory: int, parameters: int, threshold: int, asked: int | None
) -> None:
    budget = Budget(
        is_cpu=True,
        device_bytes=memory,
        num_gpus=0,
        threshold_percent=threshold,
        safety_reserve=32 * MIB,
    )
    forms = tuple(form(each, parameters) for each in ("auto", "int8", "int4"))
    fit = choose_fit(forms, budget, asked)
    if fit is None:
        wanted = LENGTHS[0] if asked else LENGTHS[-1]
        for each in forms:
            length = next(length for length in each.lengths if length.tokens == wanted)
            assert needed_bytes(each, length) > budget.rank_bytes(1)
        return
    assert needed_bytes(fit.form, fit.length) <= budget.rank_bytes(1)
    assert fit.length.kv_bytes <= fit.kv_room
    assert fit.form.weights_bytes + WORKER_BYTES + fit.kv_room <= budget.rank_bytes(1)


def test_names_from_models() -> None:
    names = {
        "Qwen/Qwen3-0.6B": "qwen3-0-6b",
        "SmolLM2-135M-Instruct.Q4_1.gguf": "smollm2-135m-instruct-q4-1",
        "org/7B": "b",
        "org/???": "model",
        "org/" + "long-name-" * 10: ("long-name-" * 4).rstrip("-"),
        "org/name@v1": "name",
    }
    for text, name in names.items():
        assert service_name(text) == name, text
    assert model_name("Qwen/Qwen3-0.6B@main") == "Qwen/Qwen3-0.6B"
    assert model_name("a b.gguf") == "a-b"


@given(st.text(max_size=60))
def test_every_name_is_valid(text: str) -> None:
    draft = Draft(service_name(text))
    draft.set("spec.model.source", "hf://org/name")
    draft.set("spec.model.name", model_name(text)[:128])
    assert draft.service().name == service_name(text)
