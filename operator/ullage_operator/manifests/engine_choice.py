"""Predicts whether a service's pods run the native engine or vLLM, and chooses their image.

The engine itself applies the same rule when it starts. The operator chooses the image based on this
prediction, and `ullage plan` and `ullage up` print it.
"""

from itertools import product

from ullage_common.config.engine import choose_engine, refusal_by_vllm
from ullage_operator.api.parsing import in_api_names
from ullage_operator.api.sections import PoolSpec
from ullage_operator.api.settings import CUDA_ENGINE_IMAGE, ENGINE_IMAGE, Settings
from ullage_operator.api.spec import Spec

_NO_ADAPTERS = "it serves no adapters"
_IMAGE_WITH_VLLM = "set vllmEngineImage or spec.image"


def engine_image(spec: Spec, settings: Settings) -> str:
    """Return the image of engine pods.

    An image set by the service takes precedence. Otherwise the operator's vLLM image is used if any
    pool needs vLLM, and the operator's image for the device if none does.
    """
    if spec.image:
        return spec.image
    has_vllm = bool(settings.vllm_engine_image)
    is_any_vllm = any(_is_vllm(spec, pool, has_vllm) for pool in spec.pools.values())
    for_vllm = settings.vllm_engine_image if is_any_vllm else ""
    for_gpus = settings.cuda_engine_image if spec.device != "cpu" else ""
    return for_vllm or for_gpus or settings.engine_image


def is_vllm(spec: Spec, pool: PoolSpec, settings: Settings) -> bool:
    """Return whether a pool's pods are expected to run vLLM.

    If it is unknown whether the image contains vLLM, vLLM is expected only if the native engine
    cannot serve the pool.
    """
    has_vllm = image_has_vllm(engine_image(spec, settings), settings)
    return _is_vllm(spec, pool, bool(has_vllm or spec.serves_adapters))


def _is_vllm(spec: Spec, pool: PoolSpec, has_vllm: bool) -> bool:
    engine, _ = choose_engine(
        spec.engine,
        on_cuda=spec.device != "cpu",
        has_vllm=has_vllm,
        native_refusal=_NO_ADAPTERS if spec.serves_adapters else "",
        vllm_refusal=_refusal_by_vllm(spec, pool),
    )
    return engine == "vllm"


def _refusal_by_vllm(spec: Spec, pool: PoolSpec) -> str:
    return in_api_names(refusal_by_vllm(spec.model, pool.memory))


def image_has_vllm(image: str, settings: Settings) -> bool | None:
    """Return whether an image contains vLLM, or None if that is unknown."""
    if image == settings.vllm_engine_image:
        return True
    return False if image in (ENGINE_IMAGE, CUDA_ENGINE_IMAGE) else None


def may_be_vllm(spec: Spec) -> bool:
    """Return whether the spec allows vLLM as a service's engine."""
    return spec.engine != "native"


def expected_engine(
    spec: Spec, pool: PoolSpec, *, on_cuda: bool | None, has_vllm: bool | None, place: str
) -> str:
    """Describe in one line which engine a pool's pods will run, and why or on what condition.

    Args:
        spec: the spec of the service.
        pool: the pool.
        on_cuda: whether the device is a CUDA GPU, or None if it is unknown.
        has_vllm: whether vLLM is installed, or None if it is unknown.
        place: where vLLM would have to be installed, for example `image ullage/engine:1`.
    """
    # Only the model's files show whether the native engine serves the model, so both cases are
    # tried.
    refusals = (
        (_NO_ADAPTERS,) if spec.serves_adapters else ("", "of a family that it does not know")
    )
    devices = (True, False) if on_cuda is None else (on_cuda,)
    # The last reason for an engine is reported, which is the one with vLLM installed.
    places = (False, True) if has_vllm is None else (has_vllm,)
    vllm_refusal = _refusal_by_vllm(spec, pool)

    choices = dict(
        choose_engine(
            spec.engine,
            on_cuda=cuda,
            has_vllm=has,
            native_refusal=refusal,
            vllm_refusal=vllm_refusal,
        )
        for has, cuda, refusal in product(places, devices, refusals)
    )

    if len(choices) == 1:
        [(engine, reason)] = choices.items()
        if has_vllm is False:
            missing = f", which {place} does not have: {_IMAGE_WITH_VLLM}"
            reason += missing if engine == "vllm" else f", in {place}"
        if engine == "native" and spec.serves_adapters:
            return f"native, which serves no adapters: {_IMAGE_WITH_VLLM} ({reason})"
        return f"{engine}: {reason}"

    if spec.serves_adapters:
        return (
            f"vllm if {place} has vLLM; the native engine serves no adapters: {_IMAGE_WITH_VLLM}"
            " if it does not"
        )

    conditions = [f"{place} has vLLM"] if has_vllm is None else []
    if not on_cuda:
        gpu = "a GPU is present or " if on_cuda is None else ""
        conditions.append(f"{gpu}the native engine does not serve the model")
    return f"vllm if {' and '.join(conditions)}, else native"
