"""Builds a manifest field by field, and writes it as YAML with a comment above each choice."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ullage_operator.api.bases import NO_BASES
from ullage_operator.api.naming import API_VERSION, KIND
from ullage_operator.api.parsing import parse
from ullage_operator.api.spec import Service

MAX_NAME = 40
"""Maximum length of a service's name, which leaves room for the suffixes of its objects."""

_WIDTH = 100
"""Maximum number of characters in a line of comments."""


class Draft:
    """An LLMService under construction.

    Fields are set by their dotted path. A field keeps the reason of its value, and a list keeps the
    settings of the source that have no counterpart.
    """

    def __init__(self, name: str) -> None:
        self._document: dict[str, Any] = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "spec": {},
        }
        self.reasons: dict[str, str] = {}
        """Reason of each choice, by the field's dotted path. A line of text without a full stop."""
        self.lost: list[str] = []
        """One line for each setting without a counterpart: its name, a colon and an explanation."""
        self.data_ranks = 1
        """Data-parallel ranks of each replica of the source, which become engines."""

    def set(self, path: str, value: Any, reason: str = "") -> None:
        """Set a field, such as `spec.model.dtype`, and keep the reason for its value."""
        *sections, name = path.split(".")
        section = self._document
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
        if reason:
            self.reasons[path] = reason

    def get(self, path: str) -> Any:
        """Return the value of a field, or None if it is not set."""
        section: Any = self._document
        for each in path.split("."):
            if not isinstance(section, dict) or each not in section:
                return None
            section = section[each]
        return section

    def lose(self, name: str, explanation: str) -> None:
        """Record a setting of the source that has no counterpart."""
        self.lost.append(f"{name}: {explanation}")

    @property
    def document(self) -> dict[str, Any]:
        """A copy of the manifest."""
        document: dict[str, Any] = json.loads(json.dumps(self._document))
        return document

    def restore(self, document: dict[str, Any]) -> None:
        """Replace the manifest with an earlier copy of it."""
        self._document = document

    def service(self) -> Service:
        """Return the service that the manifest describes.

        Raises:
            InvalidManifest: the API would reject the manifest.
        """
        return parse(self.document, bases=NO_BASES)

    def text(self) -> str:
        """Return the manifest as YAML, with the reasons and the lost settings as comments."""
        blocks = [_comment("Without a counterpart: " + each, "") for each in self.lost]
        heading = [line for block in blocks for line in block]
        return "\n".join([*heading, *_lines(self._document, "", 0, self.reasons), ""])


class _PlainDumper(yaml.SafeDumper):
    """A YAML dumper that writes shared values in full instead of anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _lines(
    section: Mapping[str, Any], path: str, depth: int, reasons: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of a section, each field below the comment with its reason."""
    indent = "  " * depth
    for name, value in section.items():
        own = f"{path}.{name}" if path else name
        if own in reasons:
            yield from _comment(reasons[own], indent)
        if isinstance(value, dict) and _has_reasons_or_sections(value, own, reasons):
            yield f"{indent}{name}:"
            yield from _lines(value, own, depth + 1, reasons)
        else:
            text = yaml.dump({name: value}, Dumper=_PlainDumper, sort_keys=False, width=_WIDTH)
            yield from (indent + line for line in text.splitlines())


def _has_reasons_or_sections(
    section: Mapping[str, Any], path: str, reasons: Mapping[str, str]
) -> bool:
    return bool(section) and any(
        f"{path}.{name}" in reasons or isinstance(value, dict) for name, value in section.items()
    )


def _comment(text: str, indent: str) -> list[str]:
    printable = "".join(each if each.isprintable() else " " for each in text)
    return textwrap.wrap(
        printable,
        _WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def service_name(text: str) -> str:
    """Return a valid name of a service that resembles a model's name."""
    name = text.rpartition("/")[2].partition("@")[0].removesuffix(".gguf").lower()
    name = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    name = re.sub(r"^[^a-z]+", "", name)
    return name[:MAX_NAME].rstrip("-") or "model"


def model_name(text: str) -> str:
    """Return the name by which clients request a model: its repository, or its file's name."""
    name = text.partition("@")[0].removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._/:-]", "-", name).lstrip("._/:-") or "model"
