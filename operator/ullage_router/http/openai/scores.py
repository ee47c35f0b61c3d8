"""Serves vLLM's /score and /rerank with an embedding model.

The score of two texts is the cosine of their embeddings. Each text is computed once, as an input of
/v1/embeddings.
"""

import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from operator import mul
from typing import Annotated, ClassVar

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.validation import invalid_value
from ullage_router.http.messages import Body
from ullage_router.http.openai.decoding import body_decoder, parse_fields, utf8
from ullage_router.http.openai.embeddings import (
    MAX_INPUTS,
    EmbeddingRun,
    Inputs,
    embedding_request,
)
from ullage_router.http.openai.endpoint import Writer, encoded
from ullage_router.http.openai.responses import JSON
from ullage_router.http.openai.schemas import Count0, Refusing

Texts = str | Annotated[list[str], msgspec.Meta(max_length=MAX_INPUTS)]

_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""The pairs of fields with which clients of different versions of vLLM name the texts."""
_SMALLEST = 1e-8
"""The least divisor of a cosine, so that the score of a vector of zeros is 0."""
Answer = Callable[[EmbeddingRun, Writer], Awaitable[None]]
"""A function that sends the response, once all embeddings are computed."""


class ScoringRequest(Refusing, frozen=True, kw_only=True):
    """Base class of bodies whose texts are scored."""

    model: str | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: object = None
    add_special_tokens: bool | None = None
    max_tokens_per_query: object = None
    max_tokens_per_doc: object = None
    instruction: object = None
    chat_template_kwargs: object = None
    use_activation: object = None

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "truncate_prompt_tokens": (None,),
        "add_special_tokens": (None, True),
        "max_tokens_per_query": (None, 0),
        "max_tokens_per_doc": (None, 0),
        "instruction": (None,),
        "chat_template_kwargs": (None, {}),
        "use_activation": (None,),
    }


class ScoreRequest(ScoringRequest, frozen=True, kw_only=True):
    """The body of a POST request to /score. One pair of fields has the texts."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankRequest(ScoringRequest, frozen=True, kw_only=True):
    """The body of a POST request to /rerank."""

    query: str
    documents: Texts
    top_n: Count0 | None = None
    """Maximum number of results. By default, and with 0, all documents are returned."""


_TEXTS = tuple(
    name for name in ScoreRequest.__struct_fields__ if name not in ScoringRequest.__struct_fields__
)
_SCORE = body_decoder(ScoreRequest)
_RERANK = body_decoder(RerankRequest)


def parse_score(data: Body) -> Inputs:
    """Parse the body of a request to /score.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    body, ignored = parse_fields(_SCORE, data.take())
    first, second = _pair(body)
    queries = _texts(getattr(body, first), first)
    documents = _texts(getattr(body, second), second)
    if len(queries) not in (1, len(documents)):
        permitted = f"one text, or as many as {second}, which has {len(documents)}"
        raise invalid_value(first, f"a list of {len(queries)}", permitted)

    async def answer(run: EmbeddingRun, writer: Writer) -> None:
        body = await encoded(lambda: _score_answer(run, len(queries)), is_long=True)
        await writer.whole(body, [])

    return _inputs(body, {first: queries, second: documents}, answer, ignored)


def parse_rerank(data: Body) -> Inputs:
    """Parse the body of a request to /rerank.

    Raises:
        ServiceError: The body is invalid. The error names the field.
    """
    body, ignored = parse_fields(_RERANK, data.take())
    documents = _texts(body.documents, "documents")
    most = body.top_n or len(documents)

    async def answer(run: EmbeddingRun, writer: Writer) -> None:
        body = await encoded(lambda: _rerank_answer(run, documents, most), is_long=True)
        await writer.whole(body, [])

    return _inputs(body, {"query": [body.query], "documents": documents}, answer, ignored)


def _pair(body: ScoreRequest) -> tuple[str, str]:
    """Return the names of the two fields that have the texts.

    Raises:
        ServiceError: The texts are missing, or there are more than two fields of texts.
    """
    given = {name for name in _TEXTS if getattr(body, name) is not None}
    for pair in _PAIRS:
        if given == set(pair):
            return pair
    field = min(given, default="text_1")
    pairs = ", ".join(" and ".join(pair) for pair in _PAIRS)
    raise invalid(field, f"{field}: send the texts as one of these pairs of fields: {pairs}")


def _texts(texts: str | list[str], field: str) -> list[str]:
    """Return the texts of a field as a list.

    Raises:
        ServiceError: There is no text.
    """
    if isinstance(texts, str):
        return [texts]
    if not texts:
        raise invalid_value(field, "an empty list", f"1 to {MAX_INPUTS} texts")
    return texts


def _inputs(
    body: ScoringRequest,
    texts: dict[str, list[str]],
    answer: Answer,
    ignored: tuple[str, ...],
) -> Inputs:
    """Return the inputs for the texts of two fields.

    Raises:
        ServiceError: There are too many texts, or one is not valid Unicode.
    """
    total = sum(map(len, texts.values()))
    field = list(texts)[-1]
    if total > MAX_INPUTS:
        permitted = f"at most {MAX_INPUTS} texts in both fields together"
        raise invalid_value(field, f"one of two fields with {total} texts", permitted)

    names: list[str] = []
    requests: list[inference_pb2.GenerateRequest] = []
    for field, each in texts.items():
        for i, text in enumerate(each):
            name = field if len(each) == 1 else f"{field}[{i}]"
            request = embedding_request(body.model, body.cache_salt)
            request.text = utf8(name, text)
            names.append(name)
            requests.append(request)
    return Inputs(requests, names, answer, ignored)


def _score_answer(run: EmbeddingRun, num_queries: int) -> JSON:
    scores = cosines(run.vectors[:num_queries], run.vectors[num_queries:])
    return {
        "id": run.name,
        "object": "list",
        "created": int(time.time()),
        "model": run.model,
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ],
        "usage": run.usage,
    }


def _rerank_answer(run: EmbeddingRun, documents: Sequence[str], most: int) -> JSON:
    scores = list(cosines(run.vectors[:1], run.vectors[1:]))
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    return {
        "id": run.name,
        "model": run.model,
        "usage": run.usage,
        "results": [
            {
                "index": index,
                "document": {"text": documents[index]},
                "relevance_score": scores[index],
            }
            for index in best[:most]
        ],
    }


def cosines(queries: Sequence[bytes], documents: Sequence[bytes]) -> Iterator[float]:
    """Yield the cosine of each document and its query.

    Args:
        queries: Embeddings as little-endian float32: one for all documents, or one for each.
        documents: Embeddings likewise.
    """
    shared = _normed(queries[0]) if len(queries) == 1 else None
    for i, document in enumerate(documents):
        query, length = shared or _normed(queries[i])
        vector, size = _normed(document)
        yield sum(map(mul, query, vector)) / max(length * size, _SMALLEST)


def _normed(data: bytes) -> "tuple[array[float], float]":
    """Return a vector, and its length."""
    vector = array("f", data)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector, sum(map(mul, vector, vector)) ** 0.5
