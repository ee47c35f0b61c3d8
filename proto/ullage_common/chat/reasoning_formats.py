"""The formats in which models write reasoning, detected from a chat template's source."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around the reasoning with which an answer begins."""

    begin: str
    end: str
    answer: tuple[str, str] = ("", "")
    """Marks around the text after the reasoning. Both are empty if the text has none."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format."""
        return tuple(mark for mark in (self.begin, self.end, *self.answer) if mark)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        "think": ReasoningFormat("<think>", "</think>"),
        "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
        "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
        "response": ReasoningFormat("<think>", "</think>", ("<response>", "</response>")),
    }
)
"""Formats by the names that `prompts.reasoning` has for them."""

# Marks, all of which a template of the format has. The first format that fits is used.
_MARKS = (
    ("mistral", ("[THINK]",)),
    ("granite", ("Here is my thought process:", "Here is my response:")),
    ("response", ("<think>", "<response>")),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)


def reasoning_format(template: str) -> ReasoningFormat | None:
    """Detect a model's reasoning format from the source of its chat template.

    Return None if the template shows no reasoning. The format of gpt-oss is not among these,
    because its answers always consist of channels.
    """
    for name, marks in _MARKS:
        if all(mark in template for mark in marks):
            return REASONING_FORMATS[name]
    return None
