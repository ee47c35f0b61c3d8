"""Compares the canary's next tokens with the stable engines' answers, token by token.

Two greedy answers to one prompt differ in every token after the first near-tie, so comparing whole
texts says little. Instead, the canary gets the prompt and the first tokens of the stable answer,
and its likeliest next token is compared with the stable one (teacher forcing).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ullage.inference.v1 import inference_pb2
from ullage_common.request_cost import predict
from ullage_router.policy.facts import EngineView

MAX_NLL = 30.0
"""Maximum negative log-probability in nats that one token contributes to a sum."""
MAX_MEMORY_SHARE = 0.1
"""Maximum share of an engine's free memory that a replayed request may take."""

TokenLogprob = inference_pb2.TokenLogprob


@dataclass(slots=True)
class AnswerCounts:
    """How well the canary's next tokens match the stable engines' greedy answers."""

    prompts: int = 0
    """Number of prompts whose answers have been compared."""
    tokens: int = 0
    """Number of tokens that have been compared."""
    agreed: int = 0
    """Number of tokens that are the likeliest ones of both sides."""
    canary_nll: float = 0.0
    """Sum of the tokens' negative log-probabilities on the canary, in nats."""
    stable_nll: float = 0.0
    """Sum of the tokens' negative log-probabilities on stable engines, in nats."""
    refused: int = 0
    """Number of prompts that were given up, because engines refused them or failed."""

    def add_answer(self, pairs: Iterable[tuple[TokenLogprob, TokenLogprob | None]]) -> None:
        """Add the tokens of the stable answer to one prompt.

        Args:
            pairs: each token of the stable answer, and what the canary says in its place. None if
                the canary failed there, which counts as the worst possible token.
        """
        self.prompts += 1
        for token, told in pairs:
            self.tokens += 1
            self.agreed += told is not None and is_likeliest(token.token_id, told)
            self.canary_nll += MAX_NLL if told is None else nll(token.token_id, told)
            self.stable_nll += nll(token.token_id, token)


def is_likeliest(token_id: int, told: TokenLogprob) -> bool:
    """Return whether a token is the likeliest one, by the log-probabilities of its position."""
    return bool(told.top) and told.top[0].token_id == token_id


def nll(token_id: int, told: TokenLogprob) -> float:
    """Return a token's negative log-probability in nats, from 0 to MAX_NLL.

    Args:
        token_id: the token.
        told: the log-probabilities of its position. If they lack the token, it is very unlikely.
    """
    given = {each.token_id: each.logprob for each in told.top} | {told.token_id: told.logprob}
    value = -given.get(token_id, -MAX_NLL)
    return MAX_NLL if math.isnan(value) else min(max(value, 0.0), MAX_NLL)


def replay_bytes(engine: EngineView, num_tokens: int) -> int:
    """Return the KV bytes of a replayed request, whose output is short, on an engine."""
    return predict(engine.profile, num_tokens, 1, 1).kv_bytes


def could_take(engine: EngineView, num_tokens: int) -> bool:
    """Return whether an engine would have room for a replay if all of its memory were free."""
    most_bytes = MAX_MEMORY_SHARE * engine.capacity
    return num_tokens <= engine.max_model_len and replay_bytes(engine, num_tokens) <= most_bytes


def has_room(engine: EngineView, num_tokens: int) -> bool:
    """Return whether an engine has so much free memory that a replay makes no request wait."""
    return replay_bytes(engine, num_tokens) <= MAX_MEMORY_SHARE * engine.available
