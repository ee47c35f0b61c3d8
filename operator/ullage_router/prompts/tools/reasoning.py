"""Reads answers that begin with reasoning between two marks."""

from ullage_common.chat.reasoning_formats import ReasoningFormat
from ullage_router.prompts.tools.pieces import Piece, Reader, Text, Thought, find_mark, held_back


class PlainReader:
    """Reads an answer as text."""

    is_thinking = False

    def push(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def close(self) -> list[Piece]:
        return []


class ReasoningReader:
    """Reads the reasoning of one answer, and leaves the text after it to another reader.

    Whitespace around the reasoning is dropped. An answer that does not begin with the format's
    mark has no reasoning, and marks within it are text.

    Args:
        form: the marks of the reasoning.
        is_open: whether the prompt ends with the mark that begins the reasoning.
        rest: reads the answer after the reasoning.

    is_thinking
        whether the text so far ends within the reasoning
    """

    def __init__(self, form: ReasoningFormat, is_open: bool, rest: Reader) -> None:
        self._form = form
        self._rest = rest
        self._buffer = ""
        self._blanks: list[str] = []
        """Whitespace before the buffer, in pieces: an answer may consist of nothing else."""
        self._has_begun = is_open
        self.is_thinking = is_open
        self._has_thought = False
        self._answer = _AnswerText(form.answer, follows_reasoning=True)

    def push(self, text: str) -> list[Piece]:
        """Feed in more text, and return the pieces that are now certain."""
        if not (self._buffer or self._has_begun):
            words = text.lstrip()
            self._blanks.append(text[: len(text) - len(words)])
            text = words
        self._buffer += text
        if not self._has_begun and not self._begin():
            return []
        thought = self._think() if self.is_thinking else ""
        pieces: list[Piece] = [Thought(thought)] if thought else []
        if not self.is_thinking:
            answer = self._answer.push(self._buffer)
            self._buffer = ""
            pieces += self._rest.push(answer) if answer else []
        return pieces

    def close(self) -> list[Piece]:
        """End the answer, and return the pieces that were held back."""
        rest = self._take_blanks() + self._buffer
        self._buffer = ""
        if self.is_thinking:
            thought = self._trimmed(rest)
            return [Thought(thought)] if thought else []
        answer = rest + self._answer.close()
        return (self._rest.push(answer) if answer else []) + self._rest.close()

    def _begin(self) -> bool:
        """Look for the mark at the beginning. Return False if more text is needed to tell."""
        if self._buffer.startswith(self._form.begin):
            self._buffer = self._buffer.removeprefix(self._form.begin)
            self._blanks.clear()
            self.is_thinking = True
        elif self._form.begin.startswith(self._buffer):
            return False
        else:
            self._buffer = self._take_blanks() + self._buffer
            self._answer = _AnswerText(("", ""), follows_reasoning=False)
        self._has_begun = True
        return True

    def _think(self) -> str:
        """Remove the text that is certainly reasoning from the buffer, and return it."""
        match = find_mark(self._buffer, [self._form.end])
        held = 0 if match else held_back(self._buffer, [self._form.end])
        sure = match.before if match else self._buffer[: len(self._buffer) - held]
        self._buffer = match.after if match else self._buffer[len(sure) :]

        words = sure.rstrip()
        thought = self._take_blanks() + words if words else ""
        if match:
            self.is_thinking = False
            self._blanks.clear()
        else:
            self._blanks.append(sure[len(words) :])
        return self._trimmed(thought)

    def _take_blanks(self) -> str:
        blank = "".join(self._blanks)
        self._blanks.clear()
        return blank

    def _trimmed(self, thought: str) -> str:
        thought = thought.rstrip()
        if not self._has_thought:
            thought = thought.lstrip()
        self._has_thought = self._has_thought or bool(thought)
        return thought


class _AnswerText:
    """Takes the whitespace after the reasoning, and the marks around the answer, off the text."""

    def __init__(self, marks: tuple[str, str], follows_reasoning: bool) -> None:
        self._begin, self._end = marks
        self._is_leading = follows_reasoning
        self._is_wrapped = False
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        self._held = ""
        if self._is_leading:
            text = text.lstrip()
            if text.startswith(self._begin) and self._begin:
                text = text.removeprefix(self._begin)
                self._is_wrapped = True
            elif self._begin.startswith(text):
                self._held = text
                return ""
            self._is_leading = not text and not self._is_wrapped
        return self._unwrapped(text) if self._is_wrapped else text

    def close(self) -> str:
        """Return the text that was held back."""
        held = self._held
        self._held = ""
        return held

    def _unwrapped(self, text: str) -> str:
        match = find_mark(text, [self._end])
        if match:
            self._is_wrapped = False
            return match.before + match.after
        sure = len(text) - held_back(text, [self._end])
        self._held = text[sure:]
        return text[:sure]
