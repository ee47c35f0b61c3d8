"""The input of a conversion, which knows the fields that nobody has taken."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ullage_cli.manifest_draft import Draft
from ullage_operator.api.errors import InvalidManifest, LocalFailure

_NO_COUNTERPART = "LLMService has no such field"


class SourceDocument:
    """A document whose fields are taken one by one.

    Args:
        document: a parsed manifest, or a part of it.
        path: the document's path, for messages (empty for the whole input).
    """

    def __init__(self, document: Mapping[str, Any], path: str = "") -> None:
        self._rest: dict[str, Any] = json.loads(json.dumps(document))
        self.path = path
        self._taken: set[str] = set()

    def take(self, path: str, default: Any = None) -> Any:
        """Remove a field, and return its value, or the default if the field is missing or null."""
        *sections, name = path.split(".")
        section: Any = self._rest
        for each in sections:
            section = section.get(each) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section:
            return default
        value = section.pop(name)
        self._taken.add(path)
        self._prune(sections)
        return default if value is None else value

    def section(self, path: str) -> "SourceDocument":
        """Remove a section, and return it as a source of its own (empty if it is missing).

        Raises:
            LocalFailure: the field is not a section.
        """
        value = self.take(path, {})
        whole = self.name_of(path)
        if not isinstance(value, dict):
            raise LocalFailure(f"{whole}: {value!r} is not a mapping; check the file")
        return SourceDocument(value, whole)

    def items(self, path: str) -> "list[SourceDocument]":
        """Remove a list of sections, and return them as sources of their own.

        Raises:
            LocalFailure: the field is not a list of mappings.
        """
        value = self.take(path, [])
        whole = self.name_of(path)
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise LocalFailure(f"{whole}: is not a list of mappings; check the file")
        return [SourceDocument(each, f"{whole}[{index}]") for index, each in enumerate(value)]

    def name_of(self, path: str) -> str:
        """Return the path of a field within the whole input."""
        return f"{self.path}.{path}" if self.path else path

    def lose_rest(self, draft: Draft, reasons: Mapping[str, str]) -> None:
        """Record all fields that are left as lost.

        A section with an explanation is recorded as a whole if none of its fields was taken.

        Args:
            draft: the manifest under construction.
            reasons: explanations by the beginning of a field's path. The longest one counts.
        """
        recorded: set[str] = set()
        for path in _leaves(self._rest, ""):
            matching = [
                each for each in reasons if not each or path == each or path.startswith(f"{each}.")
            ]
            key = max(matching, key=len, default=None)
            reason = _NO_COUNTERPART if key is None else reasons[key]
            if key and not any(taken.startswith(f"{key}.") for taken in self._taken):
                path = key
            if path not in recorded:
                recorded.add(path)
                draft.lose(self.name_of(path), reason)

    def _prune(self, sections: list[str]) -> None:
        """Remove sections that have become empty."""
        for depth in range(len(sections), 0, -1):
            parent: Any = self._rest
            for each in sections[: depth - 1]:
                parent = parent[each]
            if parent[sections[depth - 1]]:
                return
            del parent[sections[depth - 1]]


def _leaves(section: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in section.items():
        own = f"{path}.{name}" if path else str(name)
        if isinstance(value, dict) and value:
            yield from _leaves(value, own)
        else:
            yield own


def set_if_valid(draft: Draft, name: str, path: str, value: Any) -> None:
    """Set a field of the draft, or record the source's field as lost if the API would reject it.

    Args:
        draft: the manifest under construction, which must be valid so far.
        name: path of the source's field.
        path: path of the draft's field.
        value: the field's value.
    """
    before = draft.document
    draft.set(path, value)
    try:
        draft.service()
    except InvalidManifest as error:
        draft.restore(before)
        draft.lose(name, str(error).splitlines()[0])
