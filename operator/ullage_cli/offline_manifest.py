"""Writes the manifest of a service for offline inference from a model's address.

Offline, nobody waits for a single answer: requests queue for as long as they need, and no answer is
shortened or cut to keep others fast.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.naming import API_VERSION, KIND
from ullage_operator.api.overlay import laid_over

SERVICE_NAME = "offline"
LONGEST = "24h"
"""Longest duration of a request that a manifest allows."""
MAX_TOKENS = 1_000_000_000
"""Limit of an answer's tokens above every model's context."""

_HUB = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")

_SPEC: dict[str, Any] = {
    "router": {"replicas": 1},
    "routing": {
        "ladder": ["Queue", "Reject"],
        "queue": {"maxRequests": 100_000, "maxBytes": "16Ti", "timeout": LONGEST},
    },
    "prompts": {"reasoning": "None"},
    "degrade": {"pressureLevels": []},
    "limits": {
        "maxOutputTokens": MAX_TOKENS,
        "requestTimeout": LONGEST,
        "totalTimeout": LONGEST,
    },
    "slo": {"ttftP95": LONGEST, "e2eP95": LONGEST},
    # Few large messages cost less than many small ones, and nobody reads along.
    "streaming": {"coalesceTokens": 256, "coalesceWindow": "1s"},
}


def offline_manifest(
    model: str, *, name: str = "", revision: str = "", spec: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the manifest of an LLMService for offline inference.

    Args:
        model: the model, as `model_source` reads it.
        name: the name by which requests ask for the model (empty for one made of its address).
        revision: branch, tag or commit of a model of the hub.
        spec: fields of the spec that replace or extend those for offline inference.

    Raises:
        LocalFailure: the model is neither an address nor a file, or it has two revisions.
    """
    source = model_source(model, revision)
    named: dict[str, Any] = {"model": {"source": source, "name": name or model_name(source)}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": SERVICE_NAME},
        "spec": laid_over(laid_over(_SPEC, named), dict(spec or {})),
    }


def model_source(model: str, revision: str = "") -> str:
    """Return the address of a model (`spec.model.source`).

    Args:
        model: an address such as hf://org/name, an existing file or folder, or org/name of the hub.
        revision: branch, tag or commit of a model of the hub.

    Raises:
        LocalFailure: the model is none of these, or `revision` is not for it.
    """
    source = _address(os.fspath(model))
    if not revision:
        return source
    if not source.startswith("hf://") or "@" in source:
        raise LocalFailure(
            f"revision {revision!r} is for a model of the hub without one; leave it out for "
            f"{source}"
        )
    return f"{source}@{revision}"


def _address(model: str) -> str:
    if "://" in model:
        return model
    path = Path(model).expanduser()
    if model and path.exists():
        return f"file://{path.resolve()}"
    if _HUB.fullmatch(model) and not model.startswith((".", "/")) and path.suffix != ".gguf":
        return f"hf://{model}"
    raise LocalFailure(
        f"model {model!r} is neither an existing file or folder nor org/name of the hub; give one "
        "of them, or an address such as hf://org/name@revision, s3://bucket/prefix or "
        "pkg://package/file.gguf"
    )


def model_name(source: str) -> str:
    """Return a name for the model at an address: the address's last part without its suffix."""
    last = source.partition("@")[0] if source.startswith("hf://") else source
    last = last.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    return _NOT_IN_NAMES.sub("-", last).lstrip("._-") or "model"
