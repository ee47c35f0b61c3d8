"""Scores and rankings as vLLM has them, made of the embeddings of an embedding model."""

import asyncio
import math
from array import array
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ullage_testing.fake_engine import vector_of

from ullage_router.http.openai.scores import cosines

if TYPE_CHECKING:
    StartService = Any

LETTERS = "".join(map(chr, range(ord("!"), ord("~") + 1)))
TEXTS = ["cat", "zzz", "boat"]
NUMBERS = st.floats(-1000, 1000, width=32)
VECTORS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5)


def cosine(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / max(math.hypot(*one) * math.hypot(*other), 1e-8)


def score(one: str, other: str) -> float:
    """The score of two texts, of which each letter is a token."""
    vectors = [vector_of([LETTERS.index(letter) for letter in text]) for text in (one, other)]
    return cosine(*vectors)


@given(VECTORS, VECTORS)
def test_cosines(one: Any, other: Any) -> None:
    pairs = list(zip(one, other, strict=False))
    queries = [array("f", query).tobytes() for query, _ in pairs]
    documents = [array("f", document).tobytes() for _, document in pairs]
    expected = [cosine(*pair) for pair in pairs]
    assert list(cosines(queries, documents)) == pytest.approx(expected, abs=1e-6)
    expected = [cosine(pairs[0][0], document) for _, document in pairs]
    assert list(cosines(queries[:1], documents)) == pytest.approx(expected, abs=1e-6)


def test_scores_of_pairs(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.become_embedding_model()
            for path, first, second in (
                ("/score", "text_1", "text_2"),
                ("/v1/score", "queries", "documents"),
                ("/score", "queries", "items"),
                ("/score/", "data_1", "data_2"),
            ):
                body = {"model": "tiny", first: "cot", second: TEXTS}
                answer = (await service.http.post(path, json=body)).json()
                assert (answer["object"], answer["model"]) == ("list", "tiny")
                assert answer["data"] == [
                    {"index": i, "object": "score", "score": pytest.approx(score("cot", text))}
                    for i, text in enumerate(TEXTS)
                ]
                assert answer["usage"] == {"prompt_tokens": 13, "total_tokens": 13}

            service.engine.requests.clear()
            body = {"text_1": TEXTS, "text_2": TEXTS[::-1]}
            answer = (await service.http.post("/score", json=body)).json()
            assert [each["score"] for each in answer["data"]] == pytest.approx(
                list(map(score, TEXTS, TEXTS[::-1]))
            )
            assert len(service.engine.requests) == 6
            assert all(request.embed for request in service.engine.requests)

            body = {"text_1": "a", "text_2": "b", "user": "me"}
            answer = await service.http.post("/score", json=body)
            assert len(answer.json()["data"]) == 1
            assert answer.headers["x-ullage-ignored"] == "user"

    asyncio.run(scenario())


def test_the_most_relevant_documents_come_first(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.become_embedding_model()
            best = sorted(range(3), key=lambda i: -score("cot", TEXTS[i]))
            for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
                for top_n in (None, 0, 2, 9):
                    body = {"query": "cot", "documents": TEXTS, "top_n": top_n}
                    answer = (await service.http.post(path, json=body)).json()
                    assert answer["results"] == [
                        {
                            "index": i,
                            "document": {"text": TEXTS[i]},
                            "relevance_score": pytest.approx(score("cot", TEXTS[i])),
                        }
                        for i in best[: top_n or 3]
                    ]
                    assert answer["model"] == "tiny"
                    assert answer["usage"]["total_tokens"] == 13

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "documents": "b"}, "documents"),
        ("/score", {"text_1": "a", "text_2": "b", "items": "c"}, "items"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ("/score", {"text_1": "", "text_2": ["b"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [1]}, "text_2[0]"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2048}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 4}, "truncate_prompt"),
        ("/score", {"text_1": "a", "text_2": "x" * 2001}, "text_2"),
        ("/rerank", {"documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
    ],
)
def test_wrong_bodies_name_their_field(
    start_service: "StartService", path: str, body: dict[str, Any], param: str
) -> None:
    async def scenario() -> None:
        async with start_service() as service:
            await service.become_embedding_model()
            answer = await service.http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"].startswith(param), error

    asyncio.run(scenario())


def test_a_model_that_generates_refuses_them(start_service: "StartService") -> None:
    async def scenario() -> None:
        async with start_service() as service:
            for path, body in (
                ("/score", {"text_1": "a", "text_2": "b"}),
                ("/rerank", {"query": "a", "documents": ["b"]}),
            ):
                answer = await service.http.post(path, json=body)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "WRONG_TASK"

    asyncio.run(scenario())
