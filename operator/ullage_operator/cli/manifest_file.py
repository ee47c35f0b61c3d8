"""Reads a manifest as `kubectl apply` does: YAML that becomes JSON, with no key twice.

Dates and keys become text, and values without a form in JSON are refused. Length, depth and the
expansion of anchors are bounded: a file of a kilobyte can stand for a document of terabytes.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ullage_operator.api.bases import Bases, base_problems, overruled_defaults
from ullage_operator.api.errors import InvalidManifest, LocalFailure, Problem
from ullage_operator.api.naming import BASE, KIND
from ullage_operator.api.parsing import parse
from ullage_operator.api.renames import rounded, upgraded
from ullage_operator.api.schema import complete, join, load_schema
from ullage_operator.api.spec import Service

BASE_HELP = "manifest of an LLMServiceBase that it names; once for each"
MAX_BYTES = 1 << 20
"""Longest file that is read; etcd keeps no object of 1.5 MiB."""
MAX_NODES = 100_000
"""Values that a document may have, each as often as aliases repeat it."""
MAX_DEPTH = 100
_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_STRING = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_MAX_NUMBER = 64
"""Longest text that is read as a number; converting one takes the square of its length."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that accepts only JSON values and refuses duplicate keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
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
        """Refuse a tag whose type the text does not have, such as `!!bool x`, and infinite
        numbers."""
        if node.tag in (_INT, _FLOAT) and len(node.value) > _MAX_NUMBER:
            text = f"a number of {len(node.value)} characters; write text in quotes"
            raise yaml.composer.ComposerError(None, None, text, node.start_mark)
        is_text = self.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
        if node.tag not in (_STRING, is_text):
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            text = f"{node.value[:40]!r} cannot have the tag {kind}; leave the tag out"
            raise yaml.composer.ComposerError(None, None, text, node.start_mark)

    def _refusal(self, text: str) -> yaml.YAMLError:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        return yaml.composer.ComposerError(None, None, text, mark)

    def compose_document(self) -> Any:
        node = super().compose_document()
        if node is not None:
            self._check_size(node, {}, set())
        return node

    def _check_size(self, node: yaml.Node, sizes: dict[int, int], within: set[int]) -> int:
        """Return the number of values in an expanded node, and refuse a node that contains
        itself."""
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in within:
            text = "an anchor holds itself"
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
        """Convert keys to text, and refuse duplicate keys."""
        seen: dict[str, yaml.Mark] = {}
        for index, (key, value) in enumerate(node.value):
            if key.tag == _MERGE:
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:null":
                text = "a key must be text"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            if key.value in seen:
                first = seen[key.value].line + 1
                text = f"key {key.value!r} is there twice, first in line {first}; leave one out"
                raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
            seen[key.value] = key.start_mark
            as_text = yaml.ScalarNode(_STRING, key.value, key.start_mark, key.end_mark)
            node.value[index] = (as_text, value)


def _plain(tag: str, form: re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern of a plain scalar, without YAML 1.1's numbers to the base 60."""
    if tag not in (_INT, _FLOAT):
        return form
    return re.compile(rf"(?!.*:)(?:{form.pattern})", form.flags)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, _plain(tag, form)) for tag, form in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_service(path: Path, base_paths: Sequence[Path] = ()) -> Service:
    """Return the service of a manifest.

    Args:
        base_paths: files of the LLMServiceBases that the service may name.

    Raises:
        LocalFailure: one line for each problem, each starting with the file's name.
    """
    bases = read_bases(base_paths)
    try:
        return parse(_read_object(path, "LLMService"), bases=bases)
    except InvalidManifest as error:
        raise LocalFailure("\n".join(f"{path}: {each}" for each in error.problems)) from error


def overruled(path: Path, base_paths: Sequence[Path]) -> list[str]:
    """Return the paths of fields that a manifest sets to their default and a base overrides."""
    if not base_paths:
        return []
    spec = _read_object(path, "LLMService")["spec"]
    return overruled_defaults(load_schema(), spec, read_bases(base_paths))


def read_bases(paths: Sequence[Path]) -> Bases:
    """Return the LLMServiceBases of several manifests.

    Raises:
        LocalFailure: as `read_service`.
    """
    specs: dict[str, Any] = {}
    for path in paths:
        manifest = _read_object(path, BASE.name)
        if problems := base_problems(load_schema(), manifest):
            raise LocalFailure("\n".join(f"{path}: {each}" for each in problems))
        name = manifest["metadata"]["name"]
        if name in specs:
            raise LocalFailure(f"{path}: {name} is in two files; give --base one of them")
        specs[name] = manifest["spec"]
    return Bases(specs, "give its file by --base, or leave it out")


def _read_object(path: Path, kind: str) -> Any:
    """Return the only object of a file."""
    documents = [document for document in _read_documents(path) if document is not None]
    if len(documents) != 1:
        raise LocalFailure(
            f"{path}: {len(documents)} documents; give one {kind} a file, such as "
            "examples/smollm2.yaml"
        )
    if problems := [*_not_json(documents[0], "")]:
        raise LocalFailure("\n".join(f"{path}: {each}" for each in problems))
    # A copy through JSON gives each alias its own object, since defaults are filled in at each.
    return json.loads(json.dumps(documents[0]))


def upgraded_manifest(path: Path) -> tuple[str, list[str]]:
    """Return a manifest of 0.1.0 with today's names and forms, and a line for each field with
    another value; objects of other kinds pass unchanged.

    Raises:
        LocalFailure: the file has no LLMService; or one line for each field without a form of
            today.
    """
    documents = [document for document in _read_documents(path) if document is not None]

    definition = load_schema()["properties"]["spec"]
    problems = [problem for document in documents for problem in _not_json(document, "")]
    if problems:
        raise LocalFailure("\n".join(f"{path}: {each}" for each in problems))
    changes: list[Problem] = []
    written = json.loads(json.dumps(documents))
    services = [*_services(written)]
    if not services:
        raise LocalFailure(f"{path}: holds no LLMService; -f takes manifests of them, or a List")

    for service in services:
        if isinstance(service.get("spec"), dict):
            spec, changed = rounded(service["spec"])
            service["spec"] = upgraded(spec, definition)
            named = "" if len(services) == 1 else f"{_name_of(service)}: "
            changes += [Problem(f"{named}{each.path}", each.message) for each in changed]
        problems += complete(load_schema(), service)[1]
    if problems:
        raise LocalFailure("\n".join(f"{path}: {each}" for each in problems))

    text = str(yaml.safe_dump_all(written, sort_keys=False, width=100))
    return text, [f"{path}: {each}" for each in changes]


def _name_of(service: dict[str, Any]) -> str:
    metadata = service.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""


def _services(documents: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the LLMServices of documents, including those in a List."""
    for document in documents:
        if not isinstance(document, dict):
            continue
        if document.get("kind") == KIND:
            yield document
        if isinstance(document.get("items"), list):
            yield from _services(document["items"])


def _read_documents(path: Path) -> list[Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise LocalFailure(f"{path}: longer than {MAX_BYTES} bytes; -f takes one LLMService")
        return list(yaml.load_all(data.decode(), Loader=_Loader))
    except OSError as error:
        raise LocalFailure(f"{path}: {error.strerror}; -f takes an existing manifest") from error
    except UnicodeDecodeError as error:
        raise LocalFailure(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise LocalFailure(f"{path}: not YAML: {_one_line(error)}") from error
    except (ArithmeticError, ValueError, RecursionError) as error:
        # PyYAML converts numbers by Python's rules, which have limits that YAML has not.
        raise LocalFailure(f"{path}: cannot be read: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


_SURROGATE = re.compile("[\ud800-\udfff]")


def _not_json(value: Any, path: str) -> Iterator[Problem]:
    """Yield the values that JSON cannot represent."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _not_json(name, path)
            yield from _not_json(item, join(path, name.encode(errors="replace").decode()))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(item, f"{path}[{index}]")
    elif isinstance(value, str):
        if _SURROGATE.search(value):
            yield Problem(path, f"{value!a} is no text that UTF-8 has; write another character")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path, f"{value} is no number that JSON has; write a finite one")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield Problem(path, "is no number of 64 bits; write a smaller one, or text in quotes")
    elif value is not None and not isinstance(value, bool | int | float):
        kind = type(value).__name__
        yield Problem(path, f"is of YAML's type {kind}, which JSON lacks; write text in quotes")
