"""The server under test: its model, its context size, and the number of tokens per word."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from ullage_verify.client import Document, Messages, OpenAIClient

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")
"""Words that are a single token in common vocabularies."""
PROBE_WORDS = 200
REMEDY = "if another port has the page, as 9090 of a router in a cluster, give --monitoring URL"
MARGIN_TOKENS = 32
"""Number of tokens kept free in the context, because the size of a prompt is only estimated."""


class TargetError(Exception):
    """Raised if a check cannot run on this server. The message says why, and how to fix it."""


class Objective(NamedTuple):
    """A limit for the 95th percentile of a latency."""

    seconds: float
    source: str
    """Who set it, as words for a report."""

    def __str__(self) -> str:
        return f"objective {self.seconds:g} s, {self.source}"


@dataclass(frozen=True)
class Target:
    """The server under test, with properties that it reports or that short test requests reveal."""

    client: OpenAIClient
    model: str
    adapters: tuple[str, ...]
    """Names of the model's LoRA adapters that the server serves."""
    context: int
    """Context size: the maximum number of tokens of a prompt and its response together."""
    tokens_per_word: float
    template_tokens: float
    """Number of tokens that the chat template adds to a prompt."""
    is_ullage: bool
    """Whether the server serves Ullage's /stats."""
    monitoring: OpenAIClient | None = None
    """Client of another port with /stats and /metrics, or None if the API's port has them."""
    engines: Sequence[OpenAIClient] = ()
    """Clients of the engines' own /metrics (empty if their addresses are unknown)."""

    def prompt(self, number: int, tokens: int) -> Messages:
        """Return a prompt of about `tokens` tokens.

        Args:
            number: seed for the prompt's words. Prompts with different numbers differ from the
                start, so they share no cached prefix.
            tokens: approximate length of the prompt in tokens.
        """
        chooser = random.Random(number)
        count = max(1, int((tokens - self.template_tokens) / self.tokens_per_word))
        text = " ".join(chooser.choice(WORDS) for _ in range(count))
        return [{"role": "user", "content": text}]

    @property
    def usable(self) -> int:
        """Return how many tokens a request may use: the context size minus MARGIN_TOKENS."""
        return self.context - MARGIN_TOKENS

    @property
    def pages(self) -> OpenAIClient:
        """Return the client that reads /stats and /metrics."""
        return self.monitoring or self.client

    def unreported(self, values: str) -> str:
        """Return why a criterion is skipped that needs values which the server does not report."""
        reason = f"the server does not report {values}"
        return reason if self.monitoring else f"{reason}; {REMEDY}"

    async def stats(self) -> Document:
        """Return the content of /stats (empty if the server is not Ullage or fails to respond)."""
        return await self.pages.document("/stats") if self.is_ullage else {}

    async def objective(self, asked_s: float | None, name: str, default_s: float) -> Objective:
        """Return a latency objective: the user's, else the service's own, else the default.

        Args:
            asked_s: the user's objective in seconds, or None.
            name: key of the service's objective in /stats.
            default_s: value in seconds for servers that report no objectives.
        """
        if asked_s:
            return Objective(asked_s, "as asked")
        own = ((await self.stats()).get("objectives") or {}).get(name)
        return Objective(float(own), "its own") if own else Objective(default_s, "the default")

    async def metric(self, *names: str) -> float | None:
        """Return the value of the first of the given metrics that the server has, or None.

        The metrics are read from /metrics. The value is summed over all label sets.
        """
        return await metric(self.pages, *names)

    async def metric_labels(self, name: str) -> Sequence[Mapping[str, str]]:
        """Return the labels of each sample of a metric (empty if the server lacks the metric)."""
        return [sample.labels for sample in await _samples(self.pages) if sample.name == name]


async def metric(client: OpenAIClient, *names: str) -> float | None:
    """Return the value of the first of the given metrics on a server's /metrics, or None.

    The value is summed over all label sets.
    """
    totals: dict[str, float] = {}
    for sample in await _samples(client):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return next((totals[name] for name in names if name in totals), None)


async def _samples(client: OpenAIClient) -> Sequence[Sample]:
    """Return all samples of /metrics (empty for a page in another format)."""
    page = await client.page("/metrics") or ""
    try:
        return [s for family in text_string_to_metric_families(page) for s in family.samples]
    except ValueError:
        return ()


async def has_pages(client: OpenAIClient) -> bool:
    """Return whether a server has /stats or /metrics."""
    return bool(await client.document("/stats")) or await client.page("/metrics") is not None


async def describe(
    client: OpenAIClient,
    model: str = "",
    context: int = 0,
    monitoring: OpenAIClient | None = None,
    engines: Sequence[OpenAIClient] = (),
) -> Target:
    """Query a server's models and context size, and measure its number of tokens per word.

    Args:
        client: client of the server.
        model: name of the model (empty for the first one that the server lists).
        context: context size in tokens (0 to read it from the server).
        monitoring: client of another port with /stats and /metrics, or None.
        engines: clients of the engines' own /metrics.

    Raises:
        TargetError: the server fails to respond, lacks the model, or does not report its context
            size.
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
        is_ullage="engines" in await (monitoring or client).document("/stats"),
        monitoring=monitoring,
        engines=engines,
    )


async def _probe(client: OpenAIClient, model: str, words: int) -> int:
    """Send a prompt with the given number of words, and return its number of tokens.

    Raises:
        TargetError: the server did not complete the request.
    """
    text = " ".join(WORDS[number % len(WORDS)] for number in range(words))
    answer = await client.chat(model, [{"role": "user", "content": text}], 4)
    if not answer.is_whole:
        raise TargetError(
            f"{client.url}: a short request failed ({answer.outcome}): {answer.error}"
        )
    return answer.prompt_tokens


async def _models(client: OpenAIClient) -> Mapping[str, Document]:
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


async def _context(client: OpenAIClient, card: Document) -> int:
    """Return the context size that the server reports, in tokens (0 if it reports none)."""
    props: Any = await client.document("/props")  # llama.cpp
    settings = props.get("default_generation_settings") or {}
    meta = card.get("meta") or {}
    stated = (card.get("max_model_len"), settings.get("n_ctx"), meta.get("n_ctx_train"))
    return next((size for size in stated if isinstance(size, int) and size > 0), 0)
