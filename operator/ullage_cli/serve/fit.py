"""Decides which format and maximum length of a model fit into the memory of a machine."""

from dataclasses import dataclass

from ullage_cli.sizes import readable
from ullage_common.config.engine import MAX_CPU_KV
from ullage_common.model_sizes import FormSizes, LengthSizes

COMFORTABLE_TOKENS = 8192
"""Length of a request that a format should serve, before a smaller format is preferred."""

CPU_KV_SHARE = 4
"""On a CPU, KV takes at most one part in this many of the memory, if that suffices."""

WORKER_BYTES = 512 << 20
"""Memory of a worker besides weights, KV and arenas: Python, torch and workspaces.

The worker of SmolLM2-135M on a CPU stays within it. For a worker on a GPU, which has its CUDA
context there, it is an assumption.
"""


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of the devices that serve a model."""

    is_cpu: bool
    device_bytes: int
    """Memory that can be used: of the machine, or of the GPU that has least."""
    num_gpus: int
    """Number of GPUs (0 on a CPU)."""
    threshold_percent: int
    safety_reserve: int
    """Bytes of each device to keep free below the threshold."""

    def rank_bytes(self, ranks: int) -> int:
        """Return the bytes that one of several ranks may use."""
        share = self.device_bytes // ranks if self.is_cpu else self.device_bytes
        return share * self.threshold_percent // 100 - self.safety_reserve


@dataclass(frozen=True, slots=True)
class Fit:
    """A format, and the longest request for which it fits."""

    form: FormSizes
    length: LengthSizes
    kv_room: int
    """Bytes that are left for KV, summed over all ranks."""

    @property
    def ranks(self) -> int:
        return self.form.tensor * self.form.pipeline


def needed_bytes(form: FormSizes, length: LengthSizes) -> int:
    """Return the bytes that the rank that holds most needs to serve one longest request."""
    ranks = form.tensor * form.pipeline
    return _fixed_bytes(form, length) + -(-length.kv_bytes // ranks)


def _fixed_bytes(form: FormSizes, length: LengthSizes) -> int:
    return form.rank_weights_bytes + length.buffer_bytes + WORKER_BYTES


def fit_form(form: FormSizes, budget: Budget, *, is_modest: bool) -> Fit | None:
    """Return the longest request that a format can serve, or None if the weights alone do not fit.

    Args:
        form: the sizes of the model in the format.
        budget: the devices' memory.
        is_modest: whether KV on a CPU takes only part of the memory.
    """
    ranks = form.tensor * form.pipeline
    if form.refusal or (not budget.is_cpu and ranks > budget.num_gpus):
        return None

    for length in form.lengths:
        room = (budget.rank_bytes(ranks) - _fixed_bytes(form, length)) * ranks
        if budget.is_cpu:
            room = min(room, MAX_CPU_KV * ranks)
        if budget.is_cpu and is_modest:
            room = min(room, budget.device_bytes // CPU_KV_SHARE)
        if length.kv_bytes <= room:
            return Fit(form, length, room)
    return None


def choose_fit(
    forms: tuple[FormSizes, ...], budget: Budget, asked_tokens: int | None
) -> Fit | None:
    """Choose the format that keeps most of the model's precision and serves long requests.

    Formats are tried in the given order. The first one is chosen that serves requests of
    COMFORTABLE_TOKENS, or of the model's own limit if that is shorter. If none does, the one with
    the longest request is chosen.

    Args:
        forms: the formats, from the most precise one to the smallest one.
        budget: the devices' memory.
        asked_tokens: length that must fit, or None to choose it.
    """
    fits = []
    for form in forms:
        if not form.lengths:
            continue
        longest = form.lengths[0].tokens
        enough = longest if asked_tokens else min(longest, COMFORTABLE_TOKENS)
        for is_modest in (True, False):
            fit = fit_form(form, budget, is_modest=is_modest)
            if fit and fit.length.tokens >= enough:
                return fit
        if fit and not asked_tokens:
            fits.append(fit)
    return max(fits, key=lambda each: each.length.tokens, default=None)


def refusal(
    name: str,
    forms: tuple[FormSizes, ...],
    budget: Budget,
    asked: str | None,
    asked_tokens: int | None,
) -> str:
    """Return why a model does not fit: the bytes needed and there, and the formats that would fit.

    Args:
        name: the model's name.
        forms: formats of the model, from the most precise one to the smallest one.
        budget: the devices' memory.
        asked: the value of `model.quantization` that the user asked for, or None.
        asked_tokens: the length that the user asked for, or None for the shortest one.
    """

    def needed(form: FormSizes) -> int:
        return needed_bytes(form, form.lengths[0 if asked_tokens else -1])

    def is_enough(form: FormSizes) -> bool:
        return needed(form) <= budget.rank_bytes(form.tensor * form.pipeline)

    usable = [form for form in forms if form.lengths]
    wanted = [form for form in usable if asked in (None, form.quantization)]
    if not wanted:
        reasons = {form.refusal for form in forms if form.refusal}
        return f"{name}: " + "; ".join(sorted(reasons))

    smallest = min(wanted, key=needed)
    ranks = smallest.tensor * smallest.pipeline
    length = smallest.lengths[0 if asked_tokens else -1]
    where = "this machine" if budget.is_cpu else f"each of {ranks} GPUs"
    lines = [
        f"{name} does not fit: with {_label(smallest)} and requests of {length.tokens} tokens "
        f"it needs {readable(needed(smallest))}, and {where} has "
        f"{readable(max(0, budget.rank_bytes(ranks)))} for it"
    ]
    lines += [
        f"{_label(form)}: {readable(form.weights_bytes)} of weights, "
        f"{readable(needed(form))} needed, which " + ("fits" if is_enough(form) else "does not fit")
        for form in usable
    ]
    best = choose_fit(tuple(usable), budget, None)
    if best is not None:
        lines.append(
            f"try --quantization {best.form.quantization} --max-model-len {best.length.tokens}"
        )
    else:
        lines.append("no format fits; free memory, choose a smaller model, or use a larger machine")
    return "\n".join(lines)


def _label(form: FormSizes) -> str:
    ranks = form.tensor * form.pipeline
    return f"--quantization {form.quantization}" + (f" on {ranks} GPUs" if ranks > 1 else "")
