"""Requests and their outputs, in the form shared by all packages of the engine."""

from typing import Literal

import msgspec

from ullage_common.request_cost import charged_output

_INT32_BYTES = 4


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Controls how the next token of a request is chosen. The server has validated all values."""

    temperature: float = 1.0
    """Temperature by which the logits are divided, or 0 for greedy sampling."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to sample from, or 0 for all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Sampling seed. It is always set.

    The random noise depends only on the seed and the position, so that a resumed request reproduces
    its output.
    """
    logit_bias: dict[int, float] = {}
    """Biases added to the logits of individual tokens, after penalties."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be chosen, in ascending order. Empty if all may be."""
    top_logprobs: int | None = None
    """Number of alternatives to report for each token, or None to report no log-probabilities."""

    @property
    def is_penalised(self) -> bool:
        """Return whether penalties make the next token's logits depend on earlier tokens."""
        additive = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return additive or self.repetition_penalty != 1.0


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search over one prompt."""

    width: int
    """Number of hypotheses to keep."""
    length_penalty: float = 1.0
    """Exponent of the length penalty: log-probabilities are divided by length ** length_penalty."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A new or resumed request, as the worker receives it."""

    request_id: str
    client_id: str = ""
    """The client's request id for logs, the same for all samples of the request."""
    traceparent: str = ""
    """Trace context for the worker's spans of the request, or "" if the request is not traced."""
    token_ids: list[int]
    """Prompt tokens. If the request is resumed, the output tokens already sent follow them."""
    num_prompt_tokens: int
    """Number of leading `token_ids` that belong to the prompt.

    Penalties and positions are counted from this index.
    """
    max_tokens: int
    """Maximum number of output tokens, including output tokens already in `token_ids`."""
    sampling: SamplingParams
    stop_token_ids: list[int] = []
    """Tokens that end the output. Excludes end-of-sequence tokens that the client ignores."""
    priority: int = 0
    session_id: str = ""
    """Name of the session, whose KV is kept between turns, or "" without a session."""
    cache_salt: str = ""
    """Salt of the prefix cache. Requests share cached KV only if they have the same salt."""
    min_tokens: int = 0
    """Number of output tokens that must be generated before a stop token may be sampled."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain. None is empty."""
    grammar: str = ""
    """Grammar in llguidance's format that the output must match, or "" for unconstrained output."""
    beam: BeamParams | None = None
    """Parameters of a beam search, which is used instead of sampling."""
    adapter: str = ""
    """Name of the request's LoRA adapter, or "" for none."""
    embed: bool = False
    """Whether to return the prompt's embedding instead of generating output.

    In that case, `max_tokens` is 0.
    """
    accepted_at: float = 0.0
    """`time.monotonic` when the server accepted the request, or 0 if it already has output."""
    num_stored_blocks: int = 0
    """Number of leading blocks whose KV is, or is likely to be, in tiers outside the device."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each prompt token, or None to score no prompt tokens."""
    num_scored: int = 0
    """Number of leading prompt tokens whose log-probabilities an earlier worker has reported."""

    @property
    def session_key(self) -> str:
        """Return the key of the request's session, or "" if it belongs to no session.

        Sessions with the same id but different cache salts have different keys.
        """
        return f"{self.cache_salt}\0{self.session_id}" if self.session_id else ""

    def is_complete(self, longest: int, resumed: bool) -> bool:
        """Return whether a request has nothing left to generate, so that it needs no step.

        Only resumed requests can be complete. A request that already has output counts as resumed,
        even if `resumed` is false. Embedding requests are never complete.

        Args:
            longest: maximum number of tokens in the request's sequence.
            resumed: whether an earlier worker had admitted the request.
        """
        num_produced = len(self.token_ids) - self.num_prompt_tokens
        if self.embed or not (resumed or num_produced > 0):
            return False
        return num_produced >= self.max_tokens or len(self.token_ids) >= longest

    def charged_tokens(self, expected_output: int, limit: int) -> int:
        """Return the number of tokens for which to reserve KV: the prompt and the expected output.

        The expected output is at least one token longer than the output so far, and at most
        `max_tokens`.

        Args:
            expected_output: number of output tokens that requests typically generate.
            limit: maximum sequence length of this engine in tokens, which the result never exceeds.
        """
        produced = len(self.token_ids) - self.num_prompt_tokens
        output = charged_output(self.max_tokens, expected_output, produced)
        return min(limit, self.num_prompt_tokens + output)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the chosen token and of the alternatives, the most likely first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's output in one step."""

    request_id: str
    token_ids: list[int]
    finish: Literal["", "stop", "length"]
    """Reason why the request finished, or "" if more output follows."""
    logprobs: list[TokenLogprobs] | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache when the request first started."""
    num_hidden: int = 0
    """Number of steps of a beam search, whose tokens are not known before it ends."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive prompt tokens.

    The arrays are little-endian bytes, so that even those of a long prompt stay small.
    """

    request_id: str
    start: int
    """Position of the first of the tokens, at least 1, because the prompt's first has none."""
    logprobs: bytes
    """float32 [tokens, 1 + alternatives]: the token's own, then those of the alternatives."""
    top_ids: bytes
    """int32 [tokens, alternatives]: ids of the alternatives, the most likely first."""
    ranks: bytes
    """int32 [tokens]: rank of the token among all tokens, 1 for the most likely."""

    @property
    def num_tokens(self) -> int:
        return len(self.ranks) // _INT32_BYTES


class Embedding(msgspec.Struct, frozen=True, array_like=True):
    """The result of an embedding request, which ends the request."""

    request_id: str
    vector: bytes
    """The vector's elements as little-endian float32."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
