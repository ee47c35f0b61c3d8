"""Admitted requests as sequences, and the limits of an engine."""

from dataclasses import dataclass, field

from ullage_engine.protocol.messages import RequestFailed
from ullage_engine.protocol.requests import EngineRequest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine."""

    max_model_len: int
    """Longest sequence that vLLM accepts, in tokens."""
    max_sequences: int
    """Most requests of one batch."""
    lookahead_tokens: int
    """Tokens that vLLM may store beyond a request's last known token.

    They belong to steps in flight and to speculation.
    """
    shares_prompts: bool
    """Whether vLLM caches computed KV, so that samples of one prompt share it."""
    keeps_prompts: bool = True
    """Whether requests with a common prefix share its KV as well."""
    adapter_slots: int = 0
    """Most adapters that are loaded at a time."""


@dataclass(slots=True, eq=False)
class VllmSequence:
    """One admitted request. The sequence is running once vLLM has it."""

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
    """Sample of the same prompt whose blocks this sequence will share.

    The sequence starts after the first token of its parent.
    """
    children: "list[VllmSequence]" = field(default_factory=list)
    """Samples that wait for this sequence's first token."""
    has_token: bool = False
    """Whether the sequence has produced a token since it started to run."""
    num_computed: int = 0
    """Number of computed tokens at the last check, for a sequence that has no token yet."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_new(self) -> bool:
        """Whether nothing of the sequence was ever computed."""
        return not (self.num_computed or self.num_preemptions)

    @property
    def session_key(self) -> str:
        """The session's key, unique across salts and adapters; empty without a session."""
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
        """Longest length that the sequence can reach, in tokens."""
        return min(self.limit, self.request.num_prompt_tokens + self.request.max_tokens)


def no_beams(request: EngineRequest) -> RequestFailed:
    """Return the refusal of a beam search's hypothesis."""
    return RequestFailed(
        request_id=request.request_id,
        field="samples.beam",
        message="vLLM workers search no beams; ask for samples, or use the native engine",
    )


def rank_of(sequence: VllmSequence) -> tuple[int, int, int]:
    return sequence.rank
