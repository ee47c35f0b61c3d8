"""A conversation: its messages, and the commands that change it."""

import json
from collections.abc import Callable
from pathlib import Path

COMMANDS = """\
/system TEXT   set the instructions for the model (without TEXT: show them)
/clear         forget the conversation, and keep the instructions
/save FILE     write the conversation, as JSON or, if FILE ends in .md, as Markdown
/help          show this text
/exit          end, like Ctrl-D

Ctrl-C stops an answer. A line that ends in \\ continues on the next line.\
"""


class Ended(Exception):
    """Raised by /exit."""


class Conversation:
    """The messages of a chat, in OpenAI's format.

    Args:
        system: instructions for the model (empty for none).
    """

    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, with the instructions first."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self._turns]

    def ask(self, text: str) -> None:
        """Append the user's message."""
        self._turns.append({"role": "user", "content": text})

    def reply(self, text: str) -> None:
        """Append the model's answer. Without text, the user's message is taken back."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def command(self, line: str) -> str:
        """Carry out a command that begins with a slash, and return the text to show.

        Raises:
            Ended: the command is /exit.
        """
        name, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], str]] = {
            "/system": self._set_system,
            "/clear": self._clear,
            "/save": self._save,
            "/help": lambda _: COMMANDS,
            "/exit": _end,
        }
        command = commands.get(name)
        if command is None:
            return f"{name}: no such command; /help lists them"
        return command(argument.strip())

    def _set_system(self, text: str) -> str:
        if not text:
            return self.system or "no instructions are set; write /system TEXT"
        self.system = text
        return "the instructions are set"

    def _clear(self, _: str) -> str:
        self._turns.clear()
        return "the conversation is empty"

    def _save(self, name: str) -> str:
        if not name:
            return "/save: name a file, such as /save chat.md"
        path = Path(name).expanduser()
        text = _markdown(self.messages) if path.suffix == ".md" else _as_json(self.messages)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            return f"/save {name}: {error.strerror}; choose another file"
        return f"{len(self.messages)} messages are in {path}"


def _end(_: str) -> str:
    raise Ended


def _as_json(messages: list[dict[str, str]]) -> str:
    return json.dumps(messages, indent=2, ensure_ascii=False) + "\n"


def _markdown(messages: list[dict[str, str]]) -> str:
    return "\n".join(f"**{each['role']}**\n\n{each['content']}\n" for each in messages)
