"""Which engine computes in a service's pods, and in which image.

The engine itself decides at its start, by the same rule. What is known before that picks the image,
and is what `ullage plan` and `ullage up` say.
"""

from itertools import product

from ullage_common.config.engine import choose_engine
from ullage_operator.api.spec import ENGINE_IMAGE, Settings, Spec

_NO_ADAPTERS = "it serves no adapters"


def engine_image(spec: Spec, settings: Settings) -> str:
    """Returns the image of engine pods: the service's own, else the operator's with vLLM where the
    pods are to be vLLM and there is one, else its engine image."""
    if spec.image:
        return spec.image
    engine, _ = choose_engine(
        spec.engine,
        on_cuda=spec.device != "cpu",
        has_vllm=bool(settings.vllm_engine_image),
        native_refusal=_NO_ADAPTERS if spec.adapters else "",
    )
    return (settings.vllm_engine_image if engine == "vllm" else "") or settings.engine_image


def image_has_vllm(image: str, settings: Settings) -> bool | None:
    """Returns whether an image has vLLM; None where nobody says so."""
    if image == settings.vllm_engine_image:
        return True
    return False if image == ENGINE_IMAGE else None


def may_be_vllm(spec: Spec) -> bool:
    """Whether engines of a service can be vLLM, whatever their image has."""
    return spec.engine != "native"


def expected_engine(spec: Spec, *, on_cuda: bool | None, has_vllm: bool | None, place: str) -> str:
    """Returns one line: the engine that will compute, and why or where.

    Args:
        on_cuda: whether the device is a CUDA GPU; None is unknown.
        has_vllm: whether vLLM is there; None is unknown.
        place: where vLLM would be, such as `image ullage/engine:1`.
    """
    # Whether the native engine serves the model is known to who reads its files.
    refusals = (_NO_ADAPTERS,) if spec.adapters else ("", "of a family that it does not know")
    devices = (True, False) if on_cuda is None else (on_cuda,)
    places = (True, False) if has_vllm is None else (has_vllm,)
    choices = dict(
        choose_engine(spec.engine, on_cuda=cuda, has_vllm=has, native_refusal=refusal)
        for cuda, has, refusal in product(devices, places, refusals)
    )
    if len(choices) == 1:
        [(engine, reason)] = choices.items()
        if has_vllm is False:
            reason += f", which {place} has not" if engine == "vllm" else f", in {place}"
        return f"{engine}: {reason}"
    conditions = [f"{place} has vLLM"] if has_vllm is None else []
    if not on_cuda and not spec.adapters:
        gpu = "a GPU is present or " if on_cuda is None else ""
        conditions.append(f"{gpu}the native engine does not serve the model")
    return f"vllm where {' and '.join(conditions)}, else native"
