"""Reads service manifests and their bases, and upgrades manifests from version 0.1.0."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ullage_cli.manifest_yaml import not_json, read_documents
from ullage_operator.api.bases import Bases, base_problems, overruled_defaults
from ullage_operator.api.errors import InvalidManifest, LocalFailure, Problem
from ullage_operator.api.naming import BASE, KIND
from ullage_operator.api.parsing import parse
from ullage_operator.api.renames import rounded, upgraded
from ullage_operator.api.schema import complete, load_schema
from ullage_operator.api.spec import Service

BASE_HELP = "manifest of an LLMServiceBase that the service names (repeat for several)"
"""Help text of the `--base` option, shared by several commands."""


def read_service(path: Path, base_paths: Sequence[Path] = ()) -> Service:
    """Return the service that a manifest defines.

    Args:
        path: file with one LLMService.
        base_paths: files of the LLMServiceBases that the service may name.

    Raises:
        LocalFailure: one line for each problem, each starting with the file's name.
    """
    bases = read_bases(base_paths)
    try:
        return parse(_read_object(path, "LLMService"), bases=bases)
    except InvalidManifest as error:
        raise _failure(path, error.problems) from error


def overruled(path: Path, base_paths: Sequence[Path]) -> list[str]:
    """Return the paths of a manifest's fields that have no effect because a base overrides them.

    A base (LLMServiceBase) takes precedence over default values. If both set a
    field, and the manifest sets it to its default, the base's value is used.
    """
    if not base_paths:
        return []

    spec = _read_object(path, "LLMService")["spec"]
    return overruled_defaults(load_schema(), spec, read_bases(base_paths))


def read_bases(paths: Sequence[Path]) -> Bases:
    """Return all LLMServiceBases from the given manifest files.

    Raises:
        LocalFailure: one line for each problem, each starting with the file's name.
    """
    specs: dict[str, Any] = {}
    for path in paths:
        manifest = _read_object(path, BASE.name)
        if problems := base_problems(load_schema(), manifest):
            raise _failure(path, problems)

        name = manifest["metadata"]["name"]
        if name in specs:
            raise LocalFailure(f"{path}: {name} is in two files; give --base one of them")
        specs[name] = manifest["spec"]

    return Bases(specs, "give its file by --base, or leave it out")


def _read_object(path: Path, kind: str) -> Any:
    """Return the single object that a file contains.

    Every YAML alias becomes a separate copy, because defaults are filled in at each place.
    """
    documents = read_documents(path)
    if len(documents) != 1:
        raise LocalFailure(
            f"{path}: {len(documents)} documents; give one {kind} a file, such as "
            "examples/smollm2.yaml"
        )
    if problems := [*not_json(documents[0], "")]:
        raise _failure(path, problems)

    # Defaults are filled in at each place, so aliases must not share an object.
    return json.loads(json.dumps(documents[0]))


def upgraded_manifest(path: Path) -> tuple[str, list[str]]:
    """Convert a 0.1.0 manifest to the current fields. Also return one line per changed value.

    Objects of other kinds are left unchanged.

    Raises:
        LocalFailure: the file has no LLMService, or fields cannot be upgraded (one line for each).
    """
    documents = read_documents(path)
    definition = load_schema()["properties"]["spec"]
    problems = [problem for document in documents for problem in not_json(document, "")]
    if problems:
        raise _failure(path, problems)

    written = json.loads(json.dumps(documents))
    services = [*_services(written)]
    if not services:
        raise LocalFailure(f"{path}: holds no LLMService; -f takes manifests of them, or a List")

    changes: list[Problem] = []
    for service in services:
        if isinstance(service.get("spec"), dict):
            spec, changed = rounded(service["spec"])
            service["spec"] = upgraded(spec, definition)
            prefix = "" if len(services) == 1 else f"{_name_of(service)}: "
            changes += [Problem(f"{prefix}{each.path}", each.message) for each in changed]
        problems += complete(load_schema(), service)[1]
    if problems:
        raise _failure(path, problems)

    text = str(yaml.safe_dump_all(written, sort_keys=False, width=100))
    return text, [f"{path}: {each}" for each in changes]


def _failure(path: Path, problems: Iterable[Problem]) -> LocalFailure:
    """Return an error with one line for each problem in a file."""
    return LocalFailure("\n".join(f"{path}: {each}" for each in problems))


def _name_of(service: dict[str, Any]) -> str:
    metadata = service.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""


def _services(documents: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the LLMServices in parsed documents, including those nested in a List."""
    for document in documents:
        if not isinstance(document, dict):
            continue
        if document.get("kind") == KIND:
            yield document
        if isinstance(document.get("items"), list):
            yield from _services(document["items"])
