"""Counts the tokens of a conversation that is far too long, without rendering it in full.

Rendering takes up to ten times the conversation's memory. Counting the tokens of all text instead
would be wrong, because a template may omit reasoning, old turns, or text next to tool calls. The
template therefore first renders an outline: the conversation with a short placeholder for each long
stretch of text. If the template writes a placeholder unchanged, it would also have written the
whole stretch, so the tokens of that stretch are counted.
"""

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ullage_common.chat.token_finder import finder
from ullage_common.chat.tool_formats import Turn
from ullage_router.prompts.tools.tool_use import ToolUse
from ullage_router.tokenizer.model import Model, PromptError

LARGEST = 64 << 10
"""Maximum length of an outline in characters, or 1/4 of the conversation if that is more."""
EDGE = 16
"""Number of original characters that are kept before and after a placeholder."""
SAMPLE = 'Ab "\\<&>\n \u00e9'
"""Part of every placeholder, which reveals whether the template alters text.

Filters that change case, escape JSON or HTML, or trim whitespace would alter this sample.
"""
TEXTS = ("content", "reasoning_content", "thinking")
"""Fields of a turn that may hold long texts, and that no other turn refers to."""
MOST_FILLING = 4096
"""Maximum padding of a placeholder, in characters.

Placeholders are padded if the template compares the lengths of texts.
"""
PART = 64 << 10
"""Maximum number of characters of a stretch that are tokenised at a time."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of text that the template writes unchanged, except for surrounding whitespace."""

    text: str
    start: int
    end: int
    turn: int
    """Index of the stretch's turn in the conversation."""
    is_json: bool = False
    """Whether the template writes the stretch in a JSON string."""

    @property
    def content(self) -> str:
        """The text of the stretch as the template writes it."""
        content = self.text[self.start : self.end].strip()
        return _as_json(content) if self.is_json else content

    def parts(self) -> Iterator[str]:
        """Yield the stretch in chunks of at most PART characters."""
        content = self.content
        return (content[i : i + PART] for i in range(0, len(content), PART))


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _TooLarge(Exception):
    """Raised if the outline would not be much shorter than the conversation."""


class Outline:
    """A conversation with placeholders for its long stretches of text.

    Args:
        model: the model. Words that its chat template looks for are kept in the outline.
        most: maximum number of characters of the outline.
    """

    def __init__(self, model: Model, most: int) -> None:
        assert model.template
        looks = model.template.looks
        self._finder = finder(looks.words)
        self._edge = max(EDGE, *map(len, looks.words), 0)
        self._filling = f"{SAMPLE}{'y' * looks.size}zP"
        self._nonce = secrets.token_hex(8)
        self._left = most
        self._stretches: list[Stretch] = []

    def turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return the turns with placeholders.

        Raises:
            _TooLarge: the outline would have more than `most` characters.
        """
        return [self._turn(turn, place) for place, turn in enumerate(turns)]

    def written(self, prompt: str) -> Iterator[Stretch]:
        """Yield each stretch whose placeholder appears unchanged in the rendered outline.

        A stretch is yielded only once, even if its placeholder appears several times.
        """
        places = set[int]()
        for match in re.finditer(f"Pq{self._nonce}n(\\d+)z", prompt):
            place = int(match[1])
            is_json = prompt.startswith(_as_json(self._filling), match.end())
            if place in places or not (is_json or prompt.startswith(self._filling, match.end())):
                continue
            places.add(place)
            yield replace(self._stretches[place], is_json=is_json)

    def _turn(self, turn: Turn, place: int) -> Turn:
        # Two fields with the same text need only one placeholder.
        outline_of = dict[int, str]()
        outlined = dict(turn)
        for name in TEXTS:
            if (text := turn.get(name)) is not None:
                if id(text) not in outline_of:
                    outline_of[id(text)] = self._text(text, place)
                outlined[name] = outline_of[id(text)]
        if calls := turn.get("tool_calls"):
            outlined["tool_calls"] = [self._call(call, place) for call in calls]
        return outlined

    def _call(self, call: Mapping[str, Any], place: int) -> dict[str, Any]:
        function = call["function"]
        arguments = self._value(function["arguments"], place)
        return {**call, "function": {**function, "arguments": arguments}}

    def _value(self, value: Any, place: int) -> Any:
        if isinstance(value, str):
            return self._text(value, place)
        if isinstance(value, list):
            return [self._value(each, place) for each in value]
        if isinstance(value, Mapping):
            self._spend(sum(map(len, value)))
            return {name: self._value(each, place) for name, each in value.items()}
        return value

    def _text(self, text: str, place: int) -> str:
        parts = list[str]()
        start = 0
        for match in self._finder.finditer(text) if self._finder else ():
            parts += (self._stand_in(text, start, match.start(), place), match.group())
            self._spend(len(match.group()))
            start = match.end()
        parts.append(self._stand_in(text, start, len(text), place))
        return "".join(parts)

    def _stand_in(self, text: str, start: int, end: int, place: int) -> str:
        probe = f"Pq{self._nonce}n{len(self._stretches)}z{self._filling}"
        if end - start <= 2 * (len(probe) + 2 * self._edge):
            self._spend(end - start)
            return text[start:end]
        self._spend(len(probe) + 2 * self._edge)
        self._stretches.append(Stretch(text, start, end, place))
        return text[start : start + self._edge] + probe + text[end - self._edge : end]

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _TooLarge


def written(
    model: Model, turns: Sequence[Turn], use: ToolUse, arguments: Mapping[str, Any], size: int
) -> list[Stretch]:
    """Return long stretches of the conversation that are certain to be in the rendered prompt.

    They are found by rendering an outline instead of the conversation. The list may be incomplete.

    Args:
        size: number of characters of the conversation.
    """
    looks = model.template.looks if model.template else None
    if looks is None or not looks.is_known or looks.size > MOST_FILLING:
        return []
    outline = Outline(model, max(LARGEST, size // 4))
    try:
        text = model.write(outline.turns(turns), use.tools, arguments)
    except (_TooLarge, PromptError):  # rendering the conversation itself raises the same error
        return []
    return list(outline.written(text))


def are_more(model: Model, texts: Iterable[str], most: int) -> bool:
    """Return whether the texts are certain to have more than `most` tokens in total.

    Raises:
        PromptError: one of the texts cannot be tokenised.
    """
    remaining = most
    for text in texts:
        remaining -= model.count_tokens(text, remaining)
        if remaining < 0:
            return True
    return False
