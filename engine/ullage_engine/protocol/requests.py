"""Requests and their outputs, as all packages of the engine represent them."""

from typing import Literal

import msgspec

from ullage_common.request_cost import charged_output


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters that the server has already validated."""

    temperature: float = 1.0
    """Divisor of the logits, or 0 for greedy sampling."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens that are kept, or 0 for all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Sampling seed, always set.

    Noise depends only on the seed and the position, so a resumed request repeats its output.
    """
    logit_bias: dict[int, float] = {}
    """Biases added to the logits of these tokens, after penalties."""
    top_logprobs: int | None = None
    """Number of alternatives reported for each token, or None for no log-probabilities at all."""

    @property
    def is_penalised(self) -> bool:
        """Return whether penalties make the next token's logits depend on earlier tokens."""
        additive = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return additive or self.repetition_penalty != 1.0


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search over one prompt."""

    width: int
    """Number of hypotheses that are kept."""
    length_penalty: float = 1.0
    """Exponent of the length by which a hypothesis's log-probability is divided."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the worker receives it, for the first time or again after a restart."""

    request_id: str
    client_id: str = ""
    """The client's request id for logs, the same for all samples of the request."""
    traceparent: str = ""
    """Trace parent of the worker's spans for the request, or "" if the request is not traced."""
    token_ids: list[int]
    """Prompt tokens, followed by the output tokens already sent if the request is resumed."""
    num_prompt_tokens: int
    """Number of leading `token_ids` that belong to the prompt.

    Penalties and positions count from this index.
    """
    max_tokens: int
    """Maximum number of output tokens, including output that is already part of `token_ids`."""
    sampling: SamplingParams
    stop_token_ids: list[int] = []
    """Tokens that end the output. End-of-sequence tokens that the client ignores are not listed."""
    priority: int = 0
    session_id: str = ""
    """Name of the session, whose KV is kept between turns, or "" for no session."""
    cache_salt: str = ""
    """Requests share cached KV only with requests of the same salt."""
    min_tokens: int = 0
    """Minimum number of output tokens before a stop token may be sampled."""
    grammar: str = ""
    """Grammar in llguidance's form that the output must match, or "" for any text."""
    beam: BeamParams | None = None
    """Parameters of a beam search that replaces sampling."""
    adapter: str = ""
    """Name of the request's LoRA adapter, or "" for none."""
    embed: bool = False
    """Whether to return the prompt's embedding instead of output. Then `max_tokens` is 0."""
    accepted_at: float = 0.0
    """`time.monotonic` when the server accepted the request, or 0 if it already has output."""
    num_stored_blocks: int = 0
    """Number of leading blocks whose KV is, or probably is, in tiers outside the device."""

    @property
    def session_key(self) -> str:
        """Return a session name that is unique across all cache salts, or "" without a session."""
        return f"{self.cache_salt}\0{self.session_id}" if self.session_id else ""

    def is_complete(self, longest: int, resumed: bool) -> bool:
        """Return whether a previously admitted request has nothing left to generate.

        Args:
            longest: maximum number of tokens in the request's sequence.
            resumed: whether an earlier worker had admitted the request.
        """
        num_produced = len(self.token_ids) - self.num_prompt_tokens
        if self.embed or not (resumed or num_produced > 0):
            return False
        return num_produced >= self.max_tokens or len(self.token_ids) >= longest

    def charged_tokens(self, expected_output: int, limit: int) -> int:
        """Return the tokens to reserve KV for: the prompt and the expected output.

        The expected output is at least one token more than generated so far, and at most
        `max_tokens`.

        Args:
            expected_output: typical output length in tokens.
            limit: maximum sequence length of this engine in tokens, which the result never exceeds.
        """
        produced = len(self.token_ids) - self.num_prompt_tokens
        output = charged_output(self.max_tokens, expected_output, produced)
        return min(limit, self.num_prompt_tokens + output)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of the chosen token and the likeliest alternatives, likeliest first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The output of one step for one request."""

    request_id: str
    token_ids: list[int]
    finish: Literal["", "stop", "length"]
    """Reason why the request ended, or "" if more output follows."""
    logprobs: list[TokenLogprobs] | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV the prefix cache had when the request first started."""


class Embedding(msgspec.Struct, frozen=True, array_like=True):
    """The result of an embedding request, which ends the request."""

    request_id: str
    vector: bytes
    """The vector's elements as little-endian float32."""
    num_cached_tokens: int = 0
    """Number of prompt tokens whose KV the prefix cache had."""
