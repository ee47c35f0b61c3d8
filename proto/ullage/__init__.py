"""The package of Ullage's protos, and of the library for offline inference.

    from ullage import LLM, SamplingParams

The library is imported when one of its names is first used: routers and engines need the protos
only.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ullage_offline import (
        LLM,
        CompletionOutput,
        Logprob,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        entry_points = importlib.import_module("ullage_common.entry_points")
        for extra in ("cli", "router", "engine"):
            if error := entry_points.missing_extra(extra):
                raise ImportError(f"ullage.{name}: {error}")
        return getattr(importlib.import_module("ullage_offline"), name)
    if name == "__version__":
        return importlib.import_module("ullage_common").version()
    raise AttributeError(f"module 'ullage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
