"""One admitted request while it is scheduled."""

from dataclasses import dataclass, field

from ullage_engine.core.request import EngineRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, blocks and promise of one request; only the scheduler changes it."""

    request: EngineRequest
    arrival: int
    """Grows by one a request; with the priority it orders all sequences."""
    limit: int
    """Length at which it ends, tokens."""
    expected_output: int
    """Output length it is charged for, tokens."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt and output so far."""
    num_computed: int = 0
    """Tokens whose KV is stored."""
    block_ids: list[int] = field(default_factory=list)
    promised: int = 0
    """Blocks set aside for it, those it has allocated included."""
    num_preemptions: int = 0
    last_step: int = -1
    """Step in which it was last computed."""
    is_running: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, int]:
        """Order of importance, smallest first: larger priority, then earlier arrival."""
        return (-self.request.priority, self.arrival)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be stored before the next token can be chosen."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_remaining == 1 and self.num_computed > 0

    @property
    def expected_remaining(self) -> int:
        """Output tokens still expected, at least one."""
        return max(1, min(self.request.max_tokens, self.expected_output) - self.num_output)
