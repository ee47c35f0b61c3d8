"""Admitted requests as this room follows them, and the limits that they are held to."""

from dataclasses import dataclass, field

from ullage_engine.protocol.messages import RequestFailed
from ullage_engine.protocol.requests import EngineRequest


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine."""

    max_model_len: int
    """Longest sequence that vLLM takes, tokens."""
    max_sequences: int
    """Most requests of one batch."""
    lookahead_tokens: int
    """Tokens that vLLM may store before their request's last token is known: those of steps in
    flight and of speculation."""
    shares_prompts: bool
    """Whether vLLM keeps computed KV, so that samples of one prompt share it."""
    keeps_prompts: bool = True
    """Whether requests that begin alike share it as well."""
    adapter_slots: int = 0
    """Most adapters that are loaded at a time."""


@dataclass(slots=True, eq=False)
class VllmSequence:
    """One admitted request; running once vLLM has it."""

    request: EngineRequest
    arrival: int
    serial: int
    limit: int
    """Length in tokens at which it ends."""
    token_ids: list[int]
    charged_tokens: int = 0
    """Length that its blocks are reserved for, tokens."""
    is_running: bool = False
    parent: "VllmSequence | None" = None
    """Sample of the same prompt whose blocks it is going to share, and after whose first token it
    starts."""
    children: "list[VllmSequence]" = field(default_factory=list)
    """Samples that wait for this one's first token."""
    has_token: bool = False
    """Whether it has produced a token since it started to run."""
    num_computed: int = 0
    """Tokens that were computed when it was last looked at, of one without a token."""
    num_preemptions: int = 0
    num_cached_tokens: int | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_new(self) -> bool:
        """Whether nothing of it was ever computed."""
        return not (self.num_computed or self.num_preemptions)

    @property
    def session_key(self) -> str:
        """The session's name among those of all salts and adapters; empty: no session."""
        key = self.request.session_key
        return f"{self.request.adapter}\0{key}" if key else ""

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of importance, smallest first: larger priority, then earlier arrival."""
        return (-self.request.priority, self.arrival, self.serial)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Tokens that it may grow by before it needs more blocks than are reserved."""
        return self.charged_tokens - len(self.token_ids)

    @property
    def final_tokens(self) -> int:
        """Length in tokens that it has at most when it ends."""
        return min(self.limit, self.request.num_prompt_tokens + self.request.max_tokens)


def no_beams(request: EngineRequest) -> RequestFailed:
    """Return the answer to one hypothesis of a beam search."""
    return RequestFailed(
        request_id=request.request_id,
        field="samples.beam",
        message="vLLM workers search no beams; ask for samples, or use the native engine",
    )


def rank_of(sequence: VllmSequence) -> tuple[int, int, int]:
    return sequence.rank
