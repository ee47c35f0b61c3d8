"""The terms in which routers report to the operator how a canary's answers compare."""

from enum import StrEnum

MIN_PROMPTS = 8
"""Minimum number of prompts whose answers must be compared to judge a canary by them."""
MIN_TOKENS = 64
"""Minimum number of tokens that must be compared to judge a canary by them."""
PROMPTS_FILE = "prompts.jsonl"
"""File with one prompt per line, and the key of the ConfigMap that contains it."""


class Unjudged(StrEnum):
    """Why answers are not being compared at the moment."""

    NO_STABLE_ENGINE = "NoStableEngine"
    NO_CANARY_ENGINE = "NoCanaryEngine"
    ENGINES_BUSY = "EnginesBusy"
    """Requests are waiting, or engines have little free memory."""
    OTHER_TOKENIZER = "OtherTokenizer"
    """The canary's tokenizer, chat template or sampling defaults differ from the stable ones."""
    FEW_PROMPTS = "FewPrompts"
    """Too few requests have arrived from which to take prompts, or their prompts are too large."""
    UNUSABLE_PROMPTS = "UnusablePrompts"
    """The file of prompts is missing or invalid. The router's log says why."""
    FAILING = "Failing"
    """Engines fail to answer the prompts, refuse them, or are too small for them."""
