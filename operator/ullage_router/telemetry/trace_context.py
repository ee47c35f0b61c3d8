"""The trace context of a caller, which is passed on to engines.

The format is https://www.w3.org/TR/trace-context/.
"""

import re
from collections.abc import Mapping

MAX_TRACESTATE = 512
"""Characters of a tracestate that the specification asks every participant to pass on."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_PRINTABLE = re.compile(r"[ -~]+")


def trace_context(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return traceparent and tracestate as gRPC metadata, without malformed ones."""
    parent = headers.get("traceparent", "")
    state = headers.get("tracestate", "")
    if not _TRACEPARENT.fullmatch(parent):
        return ()
    if len(state) > MAX_TRACESTATE or not _PRINTABLE.fullmatch(state):
        return (("traceparent", parent),)
    return (("traceparent", parent), ("tracestate", state))
