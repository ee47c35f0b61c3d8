"""The state of admitted requests (sequences), and the limits of an engine."""

from dataclasses import dataclass, field

from ullage_engine.protocol.messages import RequestFailed
from ullage_engine.protocol.requests import EngineRequest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits on an engine's sequences and batches."""

    max_model_len: int
    """Maximum length of a sequence that vLLM accepts, in tokens."""
    max_sequences: int
    """Maximum number of requests per batch."""
    lookahead_tokens: int
    """Number of tokens that vLLM may store beyond a request's last known token.

    These tokens come from steps in flight and from speculative decoding.
    """
    shares_prompts: bool
    """Whether vLLM caches computed KV, so that samples of one prompt share it."""
    keeps_prompts: bool = True
    """Whether different requests with a common prefix share KV as well."""
    adapter_slots: int = 0
    """Maximum number of adapters loaded at a time."""


@dataclass(slots=True, eq=False)
class VllmSequence:
    """One admitted request. A sequence is running once it has been passed to vLLM."""

    request: EngineRequest
    arrival: int
    serial: int
    limit: int
    """Length at which the sequence ends, in tokens."""
    token_ids: list[int]
    charged_tokens: int = 0
    """Length for which blocks are reserved, in tokens."""
    is_running: bool = False
    parent: "VllmSequence | None" = None
    """Another sample of the same prompt, whose blocks this sequence will share.

    The sequence starts after its parent's first token.
    """
    children: "list[VllmSequence]" = field(default_factory=list)
    """Samples that wait for this sequence's first token before they start."""
    has_token: bool = False
    """Whether the sequence has produced a token since it started to run."""
    num_computed: int = 0
    """Number of computed prompt tokens at the last check, while the sequence has no output yet."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_new(self) -> bool:
        """Whether no part of the sequence has been computed yet."""
        return not (self.num_computed or self.num_preemptions)

    @property
    def session_key(self) -> str:
        """Key of the session, unique across cache salts and adapters. Empty without a session."""
        key = self.request.session_key
        return f"{self.request.adapter}\0{key}" if key else ""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key by importance, most important first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.arrival, self.serial)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Number of tokens that still fit into the reserved blocks."""
        return self.charged_tokens - len(self.token_ids)

    @property
    def final_tokens(self) -> int:
        """Maximum length that the sequence can reach, in tokens."""
        return min(self.limit, self.request.num_prompt_tokens + self.request.max_tokens)


def no_beams(request: EngineRequest) -> RequestFailed:
    """Return the refusal of a request for beam search, which this engine does not support."""
    return RequestFailed(
        request_id=request.request_id,
        field="samples.beam",
        message="vLLM workers search no beams; ask for samples, or use the native engine",
    )


def rank_of(sequence: VllmSequence) -> tuple[int, int, int]:
    return sequence.rank
