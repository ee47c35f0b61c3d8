"""The caller's trace context, handed on to the engine: https://www.w3.org/TR/trace-context/."""

import re
from collections.abc import Mapping

MAX_TRACESTATE = 512
"""Characters that the specification asks every participant to hand on."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_PRINTABLE = re.compile(r"[ -~]+")


def trace_context(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """traceparent and tracestate as gRPC metadata; what is malformed is left out."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return ()
    if len(state) > MAX_TRACESTATE or not _PRINTABLE.fullmatch(state):
        return (("traceparent", parent),)
    return (("traceparent", parent), ("tracestate", state))
