"""Decides the fields of a manifest for a model and a machine, each with its reason."""

from dataclasses import dataclass, field

from ullage_cli.manifest_draft import Draft, model_name, service_name
from ullage_cli.serve.fit import Budget, Fit, choose_fit, refusal
from ullage_cli.sizes import readable
from ullage_common.model_sizes import FormSizes, MachineFacts, ModelSizes, SourceSizes
from ullage_operator.api.errors import LocalFailure

KEYS_SECRET = "keys"
"""Suffix of the name of the Secret with the API keys."""

_MIB = 1 << 20
_SAFETY_RESERVE = 2 << 30
"""Default of `memory.safetyReserve` in bytes."""
_RESERVE_SHARE = 32
"""On a CPU, the safety reserve is one part in this many of the memory."""
_MIN_RESERVE = 32 << 20
_REQUESTS_OF_KV = 4
"""Number of the longest requests for which a CPU's KV has room, if memory suffices."""

_PREFERRED = {"cpu": ("auto", "int8", "int4"), "cuda": ("auto", "fp8", "int8", "int4")}
"""Values of `model.quantization` to try, by device, from the most precise one to the smallest one.

vLLM, which serves on GPUs if it is installed, has fp8 and neither int8 nor int4.
"""

_QUANTIZATIONS = {"auto": "Auto", "none": "None", "int8": "Int8", "int4": "Int4", "fp8": "FP8"}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What the user asked for. Fields that are None are decided here."""

    source: str
    name: str | None = None
    dtype: str | None = None
    """Value of `model.dtype`, such as BFloat16."""
    quantization: str | None = None
    """Value of `model.quantization` in lower case, such as int8."""
    kv_dtype: str | None = None
    """Value of `model.kvDtype`."""
    max_model_len: int | None = None
    max_sequences: int | None = None
    tensor: int | None = None
    pipeline: int | None = None
    threshold_percent: int | None = None
    engine: str | None = None
    needs_key: bool = False
    fields: dict[str, object] = field(default_factory=dict)
    """More fields by dotted path, which are set as they are."""


@dataclass(frozen=True, slots=True)
class ServeMachine:
    """The machine that serves."""

    facts: MachineFacts
    memory_bytes: int
    """Bytes that this process may use: what is free, or the container's limit if that is less."""
    cores: int
    """Number of processor cores that this process may use."""


def budget_of(machine: ServeMachine, asked: ServeOptions) -> Budget:
    """Return the memory of the devices that would serve the model."""
    facts = machine.facts
    threshold = 85 if asked.threshold_percent is None else asked.threshold_percent
    if facts.device == "cpu":
        reserve = max(_MIN_RESERVE, machine.memory_bytes // _RESERVE_SHARE)
        return Budget(
            is_cpu=True,
            device_bytes=machine.memory_bytes,
            num_gpus=0,
            threshold_percent=threshold,
            safety_reserve=min(reserve, _SAFETY_RESERVE) // _MIB * _MIB,
        )

    # Other processes hold memory that no threshold gives back.
    least = min(
        (min(gpu.total_bytes, gpu.free_bytes * 100 // threshold) for gpu in facts.gpus), default=0
    )
    return Budget(
        is_cpu=False,
        device_bytes=least,
        num_gpus=len(facts.gpus),
        threshold_percent=threshold,
        safety_reserve=_SAFETY_RESERVE,
    )


def preferred_forms(
    sizes: ModelSizes, device: str, asked: str | None = None
) -> tuple[FormSizes, ...]:
    """Return the formats to try, from the most precise one to the smallest one.

    Args:
        sizes: the sizes of the model.
        device: the device, cpu or cuda.
        asked: a format that the user asked for, which is added if it is none of the usual ones.
    """
    names = _PREFERRED[device]
    if asked is not None and asked not in names:
        names = (asked, *names)
    return tuple(form for name in names for form in sizes.forms if form.quantization == name)


def decide(model: SourceSizes, machine: ServeMachine, asked: ServeOptions) -> Draft:
    """Return a manifest that serves a model on a machine, with a reason for each choice.

    Raises:
        LocalFailure: the model does not fit, or no engine here serves it. The message has a line
            for each fact.
    """
    draft = Draft(service_name(asked.name or model.name))
    draft.set("spec.model.source", model.source)
    draft.set("spec.model.name", asked.name or model_name(model.name))

    if model.sizes is None:
        _decide_unsized(draft, model, machine, asked)
    else:
        _decide_fit(draft, model, machine, asked)

    if machine.facts.device == "cpu":
        _decide_patience(draft, machine)
    if asked.max_sequences is not None:
        draft.set("spec.batching.maxSequences", asked.max_sequences, "--max-num-seqs")
    if asked.threshold_percent is not None:
        draft.set(
            "spec.memory.thresholdPercent", asked.threshold_percent, "--gpu-memory-utilization"
        )
    if asked.engine is not None:
        draft.set("spec.engine", asked.engine, "--engine")
    if asked.needs_key:
        secret = f"{draft.get('metadata.name')}-{KEYS_SECRET}"
        draft.set(
            "spec.tenants.secretName",
            secret,
            "--api-key: requests need a key whose entry is in this Secret (ullage key new)",
        )
    for path, value in asked.fields.items():
        draft.set(path, value)
    return draft


def _decide_unsized(
    draft: Draft, model: SourceSizes, machine: ServeMachine, asked: ServeOptions
) -> None:
    """Decide the fields of a model whose sizes are unknown before the engine reads its files.

    Either only vLLM serves the model, or its weights are quantised in a format whose sizes the
    configuration does not contain.

    Raises:
        LocalFailure: no engine here serves the model, or its files alone do not fit.
    """
    needs_vllm = not model.is_unsized
    if model.is_missing or (needs_vllm and not machine.facts.has_vllm):
        remedy = "" if model.is_missing else "; install ullage[vllm] to serve it with vLLM"
        raise LocalFailure(f"{model.error}{remedy}")

    budget = budget_of(machine, asked)
    ranks = (asked.tensor or 1) * (asked.pipeline or 1)
    usable = budget.rank_bytes(ranks) * ranks
    if model.file_bytes and model.file_bytes > usable:
        raise LocalFailure(
            f"{model.name} does not fit: its files have {readable(model.file_bytes)}, and {ranks} "
            f"devices have {readable(max(0, usable))} for it; set --tensor-parallel-size, or "
            "choose a smaller model"
        )

    if needs_vllm:
        draft.set("spec.engine", "VLLM", f"the native engine does not serve it: {model.error}")
    size = readable(model.file_bytes) if model.file_bytes else "an unknown size"
    reason = f"its files have {size}, and the engine checks at its start that KV fits, too"
    draft.set("spec.device", "CPU" if budget.is_cpu else "CUDA", reason)
    _set_formats(draft, asked)
    if asked.max_model_len is not None:
        draft.set("spec.model.maxModelLen", asked.max_model_len, "--max-model-len")
    _set_ranks(draft, asked.tensor or 1, asked.pipeline or 1, "")


def _decide_fit(
    draft: Draft, model: SourceSizes, machine: ServeMachine, asked: ServeOptions
) -> None:
    """Decide the fields whose values follow from the model's sizes.

    Raises:
        LocalFailure: no wanted format fits, or the requested length is longer than the model's.
    """
    sizes = model.sizes
    assert sizes is not None, "only a model with sizes is fitted"
    if asked.max_model_len is not None and asked.max_model_len > sizes.max_position:
        raise LocalFailure(
            f"--max-model-len {asked.max_model_len}: {model.name} serves at most "
            f"{sizes.max_position} tokens; set that or less"
        )

    budget = budget_of(machine, asked)
    forms = preferred_forms(sizes, machine.facts.device, asked.quantization)
    wanted = tuple(form for form in forms if asked.quantization in (None, form.quantization))
    fit = choose_fit(wanted, budget, asked.max_model_len)
    if fit is None:
        text = refusal(model.name, forms, budget, asked.quantization, asked.max_model_len)
        raise LocalFailure(text)

    draft.set("spec.device", "CPU" if budget.is_cpu else "CUDA", _device_reason(machine, budget))
    _set_formats(draft, asked)
    if asked.dtype is None:
        draft.set("spec.model.dtype", "Auto", _dtype_reason(fit, machine))
    draft.set(
        "spec.model.quantization",
        _QUANTIZATIONS.get(fit.form.quantization, fit.form.quantization.upper()),
        _quantization_reason(fit, asked),
    )
    if asked.kv_dtype is None:
        per_token = readable_token(fit.form.kv_bytes_per_token)
        draft.set("spec.model.kvDtype", "Auto", f"{fit.form.kv_dtype}: {per_token} a token")
    draft.set("spec.model.maxModelLen", fit.length.tokens, _length_reason(fit, sizes.max_position))
    _set_ranks(
        draft,
        fit.form.tensor,
        fit.form.pipeline,
        f"each rank holds {readable(fit.form.rank_weights_bytes)} of weights",
    )
    _set_memory(draft, fit, budget)


def _set_formats(draft: Draft, asked: ServeOptions) -> None:
    if asked.dtype is not None:
        draft.set("spec.model.dtype", asked.dtype, "--dtype")
    if asked.kv_dtype is not None:
        draft.set("spec.model.kvDtype", asked.kv_dtype, "--kv-dtype")
    if asked.quantization is not None:
        value = _QUANTIZATIONS.get(asked.quantization, asked.quantization.upper())
        draft.set("spec.model.quantization", value, "--quantization")


def _set_ranks(draft: Draft, tensor: int, pipeline: int, reason: str) -> None:
    draft.set("spec.pools.single.gpus", tensor * pipeline)
    if tensor * pipeline > 1:
        ranks = {"tensor": tensor, "pipeline": pipeline}
        draft.set("spec.pools.single.parallelism", ranks, reason)


def _set_memory(draft: Draft, fit: Fit, budget: Budget) -> None:
    """Decide how much memory KV may take. On GPUs, KV takes all that the weights leave."""
    if not budget.is_cpu:
        return

    wanted = min(fit.kv_room, _REQUESTS_OF_KV * fit.length.kv_bytes)
    requests = wanted // fit.length.kv_bytes
    one = readable(fit.length.kv_bytes)
    draft.set(
        "spec.memory.maxKV",
        f"{max(1, -(-wanted // fit.ranks // _MIB))}Mi",
        f"room for {requests} of the longest requests ({one} each), so that others keep the rest",
    )
    draft.set(
        "spec.memory.safetyReserve",
        f"{budget.safety_reserve // _MIB}Mi",
        "a small part of the memory, since the default of 2Gi is for GPUs",
    )


def _decide_patience(draft: Draft, machine: ServeMachine) -> None:
    """Allow a CPU more time than the defaults, which are for GPUs, before requests are refused."""
    draft.set(
        "spec.limits.requestTimeout",
        "120s",
        f"{machine.cores} cores take longer for a prompt than the GPUs of the default of 30s",
    )
    draft.set("spec.slo", {"ttftP95": "60s", "e2eP95": "120s"})
    draft.reasons["spec.slo"] = "requests that would take longer are refused"


def _device_reason(machine: ServeMachine, budget: Budget) -> str:
    size = readable(budget.device_bytes)
    if budget.is_cpu:
        return f"no GPU is used, and {size} of memory are free here, on {machine.cores} cores"
    names = sorted({gpu.name for gpu in machine.facts.gpus})
    return f"{budget.num_gpus} GPUs ({', '.join(names)}) with {size} each"


def _dtype_reason(fit: Fit, machine: ServeMachine) -> str:
    dtype = fit.form.dtype
    if machine.facts.device == "cuda":
        return f"{dtype}, in which GPUs compute"
    has = "has" if machine.facts.has_bfloat16 else "has no"
    return f"{dtype}: this processor {has} instructions for bfloat16"


def _quantization_reason(fit: Fit, asked: ServeOptions) -> str:
    weights = readable(fit.form.weights_bytes)
    stored = " and ".join(fit.form.stored) or fit.form.dtype
    if asked.quantization is not None:
        return f"--quantization: {weights} of weights as {stored}"
    if fit.form.quantization == "auto":
        return f"the weights as published fit: {weights} as {stored}"
    return f"the weights as published do not fit, but {weights} as {stored} do"


def _length_reason(fit: Fit, max_position: int) -> str:
    kv = readable(fit.length.kv_bytes)
    if fit.length.tokens == max_position:
        return f"the model's own limit, with {kv} of KV for one such request"
    if fit.length.tokens == fit.form.lengths[0].tokens:
        return f"--max-model-len, with {kv} of KV for one such request"
    return (
        f"as many of the model's {max_position} tokens as fit with the weights, with {kv} of KV "
        "for one such request"
    )


def readable_token(size: int) -> str:
    """Format the bytes of a token's KV, for example 22.5 KiB."""
    return f"{size / 1024:g} KiB"


def summary(draft: Draft) -> list[str]:
    """Return the choices and their reasons as lines, for the terminal."""
    return [
        f"{path.removeprefix('spec.')}: {_shown(draft.get(path))} ({reason})"
        for path, reason in draft.reasons.items()
    ]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)
