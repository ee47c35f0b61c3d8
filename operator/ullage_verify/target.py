"""The server under test: its model, its context, and how many tokens a word has."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from ullage_verify.client import Client, Document, Messages

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
"""Words that are one token each in common vocabularies."""
PROBE_WORDS = 200
MARGIN_TOKENS = 32
"""Tokens kept free at the end of the context, since the count of a prompt's tokens is an estimate.
"""


class TargetError(Exception):
    """The server cannot be checked. The message says why and what to do."""


@dataclass(frozen=True)
class Target:
    """A server, as its own pages and one short request describe it."""

    client: Client
    model: str
    adapters: tuple[str, ...]
    """Names of LoRA adapters."""
    context: int
    """Maximum number of tokens in a prompt and its answer together."""
    tokens_per_word: float
    template_tokens: float
    """Tokens that the chat template adds to a prompt."""
    is_ullage: bool
    """Whether the server serves Ullage's /stats."""

    def prompt(self, number: int, tokens: int) -> Messages:
        """Return a prompt of about this many tokens.

        Prompts of different numbers differ in the first words, so no prefix cache serves two.
        """
        chooser = random.Random(number)
        count = max(1, int((tokens - self.template_tokens) / self.tokens_per_word))
        text = " ".join(chooser.choice(WORDS) for _ in range(count))
        return [{"role": "user", "content": text}]

    @property
    def usable(self) -> int:
        """Return the context without the margin, tokens."""
        return self.context - MARGIN_TOKENS

    async def stats(self) -> Document:
        """Return the page /stats, empty if the server is not Ullage or does not answer."""
        return await self.client.document("/stats") if self.is_ullage else {}

    async def metric(self, *names: str) -> float | None:
        """Return the sum of the first of these Prometheus metrics that the server has."""
        page = await self.client.page("/metrics") or ""
        totals: dict[str, float] = {}
        try:
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        except ValueError:
            return None  # not Prometheus' text format
        return next((totals[name] for name in names if name in totals), None)


async def describe(client: Client, model: str = "", context: int = 0) -> Target:
    """Ask a server for its model and context, and measure the tokens of a word.

    Args:
        client: client of the server.
        model: name of the model, empty for the server's first one.
        context: context in tokens, 0 to read it from the server.

    Raises:
        TargetError: the server does not answer, or does not state its context.
    """
    cards = await _models(client)
    if model and model not in cards:
        raise TargetError(f"--model {model!r}: the server has {', '.join(cards)}")
    name = model or next(iter(cards))

    size = context or await _context(client, cards[name])
    if not size:
        raise TargetError(f"{client.url} does not state its context; give it with --context TOKENS")

    few = await _probe(client, name, 1)
    many = await _probe(client, name, PROBE_WORDS)
    per_word = (many - few) / (PROBE_WORDS - 1)
    if per_word <= 0:
        raise TargetError(f"{client.url}: the answers have no usage.prompt_tokens")

    return Target(
        client=client,
        model=name,
        adapters=tuple(id for id, card in cards.items() if card.get("parent") == name),
        context=size,
        tokens_per_word=per_word,
        template_tokens=few - per_word,
        is_ullage="engines" in await client.document("/stats"),
    )


async def _probe(client: Client, model: str, words: int) -> int:
    """Return the number of tokens of a short prompt.

    Raises:
        TargetError: the server does not answer it.
    """
    text = " ".join(WORDS[number % len(WORDS)] for number in range(words))
    answer = await client.chat(model, [{"role": "user", "content": text}], 4)
    if not answer.is_whole:
        raise TargetError(
            f"{client.url}: a short request failed ({answer.outcome}): {answer.error}"
        )
    return answer.prompt_tokens


async def _models(client: Client) -> Mapping[str, Document]:
    """Return the server's model cards by name.

    Raises:
        TargetError: the server does not list its models.
    """
    page = await client.get("/v1/models")
    place = f"{client.url}/v1/models"
    if page.status in (401, 403):
        raise TargetError(
            f"{place}: status {page.status}; give an API key with --api-key or ULLAGE_API_KEY"
        )
    if page.status != 200:
        reason = f"status {page.status}" if page.status else page.text
        raise TargetError(
            f"{place}: {reason}; check the URL, or start a server (ullage up -f "
            "examples/smollm2.yaml)"
        )

    document = await client.document("/v1/models")
    listed = document.get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    named: Mapping[str, Document] = {str(card["id"]): card for card in cards if card.get("id")}
    if not named:
        raise TargetError(f"{place}: the answer lists no model; check the URL")
    return named


async def _context(client: Client, card: Document) -> int:
    """Return the context that the server states, or 0."""
    props: Any = await client.document("/props")  # llama.cpp
    settings = props.get("default_generation_settings") or {}
    meta = card.get("meta") or {}
    stated = (card.get("max_model_len"), settings.get("n_ctx"), meta.get("n_ctx_train"))
    return next((size for size in stated if isinstance(size, int) and size > 0), 0)
