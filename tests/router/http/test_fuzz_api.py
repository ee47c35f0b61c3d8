"""Requests that the API's description allows, and others that it does not, to a real router."""

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from ullage_testing.background_loop import background_loop
from ullage_testing.fake_engine import MODEL

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.limits import ROLES

if TYPE_CHECKING:
    StartService = Any

CHECKS = [
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
INPUTS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "prompt": "Hi",
    "input": ["Hi", "you"],
    "tokens": [1, 2],
}
KEPT_FIELDS = st.sets(st.integers(0, 60), max_size=4)
EXAMPLES = 320
"""Enough for some of each path that are served."""
SLOW_S = 210.0
"""Seconds of each of the two tests in `make test-slow`: with those of wrong bytes and frames twenty
minutes."""
EMBEDDINGS = "/v1/embeddings"
OTHER_INPUTS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": INPUTS["messages"], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": INPUTS["messages"]},
}
"""By path, what is there instead of INPUTS."""
APART = (EMBEDDINGS, *OTHER_INPUTS)
"""Paths that have tests of their own."""


def test_answers_are_as_described(start_service: "StartService") -> None:
    statuses = fuzz(start_service, rounds=1, examples=2 * EXAMPLES)
    assert {(path, 200) for path in ("/v1/chat/completions", "/v1/completions")} <= statuses


def test_answers_of_other_apis_are_as_described(start_service: "StartService") -> None:
    statuses = fuzz(start_service, rounds=1, only=tuple(OTHER_INPUTS))
    assert {(path, 200) for path in OTHER_INPUTS} <= statuses


def test_vectors_are_as_described(start_service: "StartService") -> None:
    statuses = fuzz(start_service, rounds=1, only=(EMBEDDINGS,), examples=20)
    assert (EMBEDDINGS, 200) in statuses


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_is_as_described(start_service: "StartService", path: str) -> None:
    field = "messages" if path.startswith("/v1/chat") else "prompt"
    body = {"model": MODEL, "stream": True, field: INPUTS[field]}
    with background_loop() as loop, requests.Session() as session:
        session.trust_env = False
        url = f"http://127.0.0.1:{loop.enter(start_service()).router.http_port}"
        document = session.get(f"{url}/openapi.json").json()
        schema = schemathesis.openapi.from_dict(document, config=SchemathesisConfig())
        case = schema[path]["POST"].Case(body=body, media_type="application/json")
        answer = case.call(base_url=url, session=session, timeout=60)
        assert answer.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(answer, checks=CHECKS)


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_S)
def test_many_answers_are_as_described(start_service: "StartService") -> None:
    fuzz(start_service, rounds=None)


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_S)
def test_many_vectors_are_as_described(start_service: "StartService") -> None:
    fuzz(start_service, rounds=None, only=(EMBEDDINGS,))


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_S)
def test_many_answers_of_other_apis_are_as_described(start_service: "StartService") -> None:
    fuzz(start_service, rounds=None, only=tuple(OTHER_INPUTS))


def fuzz(
    start_service: "StartService",
    rounds: int | None,
    only: tuple[str, ...] = (),
    examples: int = EXAMPLES,
) -> set[tuple[str, int]]:
    """Send requests, of other seeds in each round; returns the statuses of each path.

    Args:
        rounds: their number; None: as many as there is time for.
        only: the paths to send them to; empty: all but those that have tests of their own.
    """
    began = time.monotonic()
    statuses = Counter[tuple[str, int]]()
    with background_loop() as loop, requests.Session() as session:
        session.trust_env = False
        service = loop.enter(start_service())
        if only == (EMBEDDINGS,):
            loop.run(learn_embeddings(service))
        url = f"http://127.0.0.1:{service.router.http_port}"
        document = session.get(f"{url}/openapi.json").json()
        schema = schemathesis.openapi.from_dict(document, config=SchemathesisConfig())
        paths = only or [path for path in document["paths"] if path not in APART]
        cases = st.one_of([each for path in paths for each in cases_of(schema, path)])

        @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
        @given(case=cases)
        def send(case: Any) -> None:
            answer = case.call(base_url=url, session=session, timeout=60)
            statuses[case.operation.path, answer.status_code] += 1
            assert answer.status_code < 500 or answer.status_code == 503
            # A rejection, too, which Schemathesis does not count as one.
            is_too_large = answer.status_code == 413
            checks = [c for c in CHECKS if c is not negative_data_rejection or not is_too_large]
            case.validate_response(answer, checks=checks)

        index = 0
        while index < rounds if rounds else time.monotonic() - began < SLOW_S:
            seed(index)(send)()
            index += 1
        assert session.get(f"{url}/healthz").json() == {"status": "alive"}
    return set(statuses)


def cases_of(schema: Any, path: str) -> list[st.SearchStrategy[Any]]:
    """Return strategies of requests to a path: half of those with a body are wrong."""
    operations = schema.include(path=path)
    described = operations.as_strategy(GenerationMode.POSITIVE)
    if not schema.raw_schema["paths"][path].keys() & {"post"}:
        return [described]
    wrong = operations.as_strategy(GenerationMode.NEGATIVE)
    return [*3 * [st.builds(thinned, described, KEPT_FIELDS, st.booleans())], *3 * [wrong]]


def thinned(case: Any, kept: set[int], has_usual_input: bool) -> Any:
    """Leave few fields of a body, so that not all requests are refused for one of them.

    Args:
        has_usual_input: whether there is nothing wrong with the input.
    """
    if not isinstance(case.body, dict):
        return case
    inputs = OTHER_INPUTS.get(case.operation.path, INPUTS)
    fields = sorted(case.body.items())
    body = {name: value for i, (name, value) in enumerate(fields) if i in kept or name in inputs}
    case.body = with_integers(body) | {"model": MODEL}
    for name in inputs.keys() & body.keys():
        if has_usual_input:
            case.body[name] = inputs[name]
        elif name == "messages" and case.body[name]:
            case.body[name] = [message | {"role": ROLES[0]} for message in case.body[name]]
    return case


def with_integers(value: Any) -> Any:
    """Write whole numbers without a fraction, as the parser wants integers."""
    if isinstance(value, dict):
        return {name: with_integers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [with_integers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


async def learn_embeddings(service: Any) -> None:
    """Make the engine's model one for embeddings, as after a restart."""
    service.engine.task = inference_pb2.TASK_EMBED
    service.engine.push(epoch=service.engine.headroom.epoch + 1)
    engines = service.router.service.engines
    await service.until(lambda: engines.model.description.task == inference_pb2.TASK_EMBED)
