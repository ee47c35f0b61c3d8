"""State of admitted requests (sequences), and an engine's limits on them."""

from dataclasses import dataclass, field

from ullage_engine.protocol.messages import RequestFailed
from ullage_engine.protocol.requests import EngineRequest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """An engine's limits on sequences and batches."""

    max_model_len: int
    """Maximum sequence length that vLLM accepts, in tokens."""
    max_sequences: int
    """Maximum number of requests per batch."""
    lookahead_tokens: int
    """Number of tokens that vLLM may store beyond a request's last known token.

    These tokens come from steps in flight and from speculative decoding.
    """
    shares_prompts: bool
    """Whether vLLM caches computed KV, so that samples of the same prompt can share it."""
    keeps_prompts: bool = True
    """Whether different requests with a common prefix also share KV."""
    adapter_slots: int = 0
    """Maximum number of adapters that can be loaded at a time."""


@dataclass(slots=True, eq=False)
class VllmSequence:
    """An admitted request. It counts as running once it has been passed to vLLM."""

    request: EngineRequest
    arrival: int
    serial: int
    limit: int
    """Maximum length in tokens that the model, the KV pool and the session allow."""
    token_ids: list[int]
    charged_tokens: int = 0
    """Sequence length, in tokens, that the reserved blocks can hold."""
    is_running: bool = False
    parent: "VllmSequence | None" = None
    """Another sample of the same prompt, with which this sequence will share blocks.

    This sequence starts after its parent's first token.
    """
    children: "list[VllmSequence]" = field(default_factory=list)
    """Samples that start after this sequence's first token."""
    has_token: bool = False
    """Whether the sequence has produced a token since it was last started."""
    num_computed: int = 0
    """Number of prompt tokens computed as of the last step, tracked until the first output."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_new(self) -> bool:
        """Whether no token of the sequence has been computed yet."""
        return not (self.num_computed or self.num_preemptions)

    @property
    def session_key(self) -> str:
        """Key of the request's session, or an empty string if it has none.

        The key is unique across cache salts and adapters.
        """
        key = self.request.session_key
        return f"{self.request.adapter}\0{key}" if key else ""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key, most important first: by higher priority, then by earlier arrival."""
        return (-self.request.priority, self.arrival, self.serial)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Number of tokens that still fit in the reserved blocks."""
        return self.charged_tokens - len(self.token_ids)

    @property
    def final_tokens(self) -> int:
        """Length in tokens at which the sequence must end, given `limit` and `max_tokens`."""
        return min(self.limit, self.request.num_prompt_tokens + self.request.max_tokens)


def no_beams(request: EngineRequest) -> RequestFailed:
    """Return the error for a beam search request, which this engine does not support."""
    return RequestFailed(
        request_id=request.request_id,
        field="samples.beam",
        message="vLLM workers search no beams; ask for samples, or use the native engine",
    )


def no_prompt_logprobs(request: EngineRequest) -> RequestFailed:
    """Return the error for a request for log-probabilities of its prompt.

    vLLM allocates the logits of a whole chunk of the prompt, which no reservation covers.
    """
    return RequestFailed(
        request_id=request.request_id,
        field="prompt_logprobs",
        message="vLLM workers have no memory reserved for the logits of prompts, which may end "
        "them; leave out prompt_logprobs, or logprobs with echo, or use the native engine",
    )


def no_bad_words(request: EngineRequest) -> RequestFailed:
    """Return the error for a request with bad words, which vLLM tokenises itself.

    Workers load no tokenizer, because the server sends them tokens.
    """
    return RequestFailed(
        request_id=request.request_id,
        field="bad_words",
        message="vLLM workers have no tokenizer for them; use logit_bias, or the native engine",
    )


def rank_of(sequence: VllmSequence) -> tuple[int, int, int]:
    return sequence.rank
