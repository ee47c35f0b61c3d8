"""Reads YAML the way `kubectl apply` does: as JSON without duplicate keys.

Dates and keys are converted to text, and values that JSON cannot represent are rejected. The file's
length, its nesting depth and the expansion of its anchors are limited, because a one-kilobyte file
can expand to terabytes.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ullage_operator.api.errors import LocalFailure, Problem
from ullage_operator.api.schema import join

MAX_BYTES = 1 << 20
"""Maximum size of a file in bytes, below the 1.5 MiB at which etcd rejects an object."""
MAX_NODES = 100_000
"""Maximum number of values in a document. An alias counts as all values that it expands to."""
MAX_DEPTH = 100

_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_STRING = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_NULL = "tag:yaml.org,2002:null"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"

_MAX_NUMBER = 64
"""Maximum length of a number in characters, because parsing takes quadratic time."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Matches one half of a UTF-16 surrogate pair, which UTF-8 cannot encode."""


def read_documents(path: Path) -> list[Any]:
    """Return the non-empty documents in a YAML file.

    Raises:
        LocalFailure: the file cannot be read, or is not YAML that an API server would accept.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise LocalFailure(f"{path}: longer than {MAX_BYTES} bytes; -f takes one LLMService")
        documents = yaml.load_all(data.decode(), Loader=_Loader)
        return [document for document in documents if document is not None]
    except OSError as error:
        raise LocalFailure(f"{path}: {error.strerror}; -f takes an existing manifest") from error
    except UnicodeDecodeError as error:
        raise LocalFailure(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise LocalFailure(f"{path}: not YAML: {_one_line(error)}") from error
    except (ArithmeticError, ValueError, RecursionError) as error:
        # PyYAML converts numbers by Python's rules, which have limits that YAML does not have.
        raise LocalFailure(f"{path}: cannot be read: {_one_line(error)}") from error


def not_json(value: Any, path: str) -> Iterator[Problem]:
    """Yield a problem for each value that JSON cannot represent.

    Args:
        value: a parsed document, or a part of it.
        path: the value's path in the document (empty for the document).
    """
    if isinstance(value, dict):
        for name, item in value.items():
            yield from not_json(name, path)
            yield from not_json(item, join(path, name.encode(errors="replace").decode()))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from not_json(item, f"{path}[{index}]")
    elif isinstance(value, str):
        if _SURROGATE.search(value):
            yield Problem(path, f"{value!a} cannot be encoded in UTF-8; write another character")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"{value} is not a number in JSON; write a finite one")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield Problem(path, "exceeds 64 bits; write a smaller number, or text in quotes")
    elif value is not None and not isinstance(value, bool | int | float):
        kind = type(value).__name__
        yield Problem(path, f"has YAML's type {kind}, which JSON lacks; write text in quotes")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Loader(yaml.SafeLoader):
    """A YAML loader that accepts only JSON values and rejects duplicate keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the next node. Reject documents with too many nodes or too much nesting."""
        self.depth: int = getattr(self, "depth", 0) + 1
        self.num_nodes: int = getattr(self, "num_nodes", 0) + 1
        if self.depth > MAX_DEPTH:
            raise self._refusal(f"it is nested more than {MAX_DEPTH} deep")
        if self.num_nodes > MAX_NODES:
            raise self._refusal(f"it has more than {MAX_NODES} values")

        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node)
        self.depth -= 1
        return node

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        """Reject overlong numbers, and tags that do not match their value, such as `!!bool x`."""
        if node.tag in (_INT, _FLOAT) and len(node.value) > _MAX_NUMBER:
            text = f"a number of {len(node.value)} characters; write text in quotes"
            raise yaml.composer.ComposerError(None, None, text, node.start_mark)

        plain_tag = self.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
        if node.tag not in (_STRING, plain_tag):
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            text = f"{node.value[:40]!r} cannot have the tag {kind}; leave the tag out"
            raise yaml.composer.ComposerError(None, None, text, node.start_mark)

    def _refusal(self, text: str) -> yaml.YAMLError:
        """Return a YAML error that points at the parser's current position."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        return yaml.composer.ComposerError(None, None, text, mark)

    def compose_document(self) -> Any:
        """Return the next document's root node. Reject documents whose aliases expand too far."""
        node = super().compose_document()
        if node is not None:
            self._check_size(node, {}, set())
        return node

    def _check_size(self, node: yaml.Node, sizes: dict[int, int], within: set[int]) -> int:
        """Count a node's values with aliases expanded, and reject a node that contains itself.

        Args:
            node: the node to count.
            sizes: counts of nodes that were already visited, keyed by `id()`.
            within: the `id()` of each node that contains this node.
        """
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in within:
            text = "an anchor contains itself"
            raise yaml.composer.ComposerError(None, None, text, node.start_mark)

        within.add(id(node))
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            children = [part for pair in node.value for part in pair]

        total = 1 + sum(self._check_size(child, sizes, within) for child in children)
        if total > MAX_NODES:
            text = f"with its aliases it has more than {MAX_NODES} values"
            raise yaml.composer.ComposerError(None, None, text, node.start_mark)

        within.remove(id(node))
        sizes[id(node)] = total
        return total

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Convert keys to text, and reject duplicate keys."""
        seen: dict[str, yaml.Mark] = {}
        for index, (key, value) in enumerate(node.value):
            if key.tag == _MERGE:
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag == _NULL:
                text = "a key must be text"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            if key.value in seen:
                first = seen[key.value].line + 1
                text = f"key {key.value!r} occurs twice, first in line {first}; leave one out"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)

            seen[key.value] = key.start_mark
            as_text = yaml.ScalarNode(_STRING, key.value, key.start_mark, key.end_mark)
            node.value[index] = (as_text, value)


def _plain(tag: str, form: re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern by which the YAML loader recognises unquoted values of the type `tag`.

    Patterns for numbers exclude values with a colon, because the loader would otherwise read
    12:30:45 as a number in base 60.
    """
    if tag not in (_INT, _FLOAT):
        return form
    return re.compile(rf"(?!.*:)(?:{form.pattern})", form.flags)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, _plain(tag, form)) for tag, form in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
