"""What is asked of the engine, in the words every layer uses."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen; already validated by the server."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Always set: noise is a function of (seed, position), so a resumed request repeats itself."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens, after penalties."""
    top_logprobs: int | None = None
    """Alternatives reported for each token; None reports no log-probabilities at all."""

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens change the logits of the next."""
        additive = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return additive or self.repetition_penalty != 1.0


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """Beam search over one prompt."""

    width: int
    """Hypotheses kept."""
    length_penalty: float = 1.0
    """Exponent of the length that divides a hypothesis' log-probability."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the worker gets it, for the first time or again after a restart."""

    request_id: str
    token_ids: list[int]
    """Prompt, followed by the output already sent when the request is resumed."""
    num_prompt_tokens: int
    """How many of `token_ids` are prompt; penalties and positions count from here."""
    max_tokens: int
    """Output limit, counting output that is already part of `token_ids`."""
    sampling: SamplingParams
    stop_token_ids: list[int] = []
    """Ends generation when produced, unless it would be an end-of-sequence token being ignored."""
    priority: int = 0
    session_id: str = ""
    """Turns of one conversation, whose KV is kept between them; empty: none."""
    min_tokens: int = 0
    """No stop token is chosen before so many tokens of output."""
    grammar: str = ""
    """What the output must match, in llguidance's form; empty: any text."""
    beam: BeamParams | None = None
    """Beam search instead of sampling."""
