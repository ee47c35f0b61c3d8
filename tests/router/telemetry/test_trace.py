import pytest

from ullage_router.telemetry.spans import MAX_TRACESTATE, trace_context

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_trace_context_is_handed_on() -> None:
    headers = {"traceparent": PARENT, "tracestate": "a=1,b=2", "cookie": "x"}
    assert trace_context(headers) == (("traceparent", PARENT), ("tracestate", "a=1,b=2"))
    assert trace_context({}) == ()


@pytest.mark.parametrize("state", ["", "a=1,\tb=2", "a=\xff", "a" * (MAX_TRACESTATE + 1)])
def test_a_state_that_metadata_cannot_carry_is_left_out(state: str) -> None:
    headers = {"traceparent": PARENT, "tracestate": state}
    assert trace_context(headers) == (("traceparent", PARENT),)


@pytest.mark.parametrize("parent", ["", "00-zz-1-01", PARENT + "\n", PARENT.upper()])
def test_a_malformed_parent_takes_its_state_with_it(parent: str) -> None:
    assert trace_context({"traceparent": parent, "tracestate": "a=1"}) == ()
