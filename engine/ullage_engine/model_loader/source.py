"""Where a model's files are: one URI field, four schemes.

Imports no torch and no model code, so the server process finds the tokenizer with it too.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from ullage_engine.protocol.errors import WeightsError

PVC_ROOT = Path("/models")
"""Folder in which the operator mounts the claims of `pvc://` sources."""

SCHEMES = "pkg://package/file, file:///path, hf://org/name@revision or pvc://claim/path"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model on this machine."""

    path: Path
    """Path of a `.gguf` file, or of a directory with config.json, tokenizer.json and
    safetensors."""
    format: Literal["gguf", "directory"]


def resolve_source(source: str) -> ModelFiles:
    """Finds the files that a source URI names; only `hf://` may use the network.

    Raises:
        WeightsError: the URI is malformed or what it names does not exist.
    """
    what = f"model.source {source!r}"
    return _check(what, _path_of(what, source))


def resolve_adapter(source: str) -> Path:
    """Finds the folder of a LoRA adapter, as PEFT writes it; only `hf://` may use the network.

    Raises:
        WeightsError: the URI is malformed or names no such folder.
    """
    what = f"adapters: source {source!r}"
    path = _path_of(what, source)
    if not (path / "adapter_config.json").is_file():
        raise WeightsError(f"{what}: {path} has no adapter_config.json; name an adapter's folder")
    return path


def _path_of(what: str, source: str) -> Path:
    parts = urlsplit(source)
    resolvers = {"pkg": _package_path, "file": _file_path, "hf": _hub_path, "pvc": _claim_path}
    resolve = resolvers.get(parts.scheme)
    if resolve is None:
        raise WeightsError(f"{what}: unknown scheme; use {SCHEMES}")
    return resolve(what, parts.netloc, unquote(parts.path))


def _package_path(what: str, package: str, path: str) -> Path:
    # find_spec, not import: a package of weights may run anything when imported.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise WeightsError(f"{what}: Python package {package!r} is not installed; install it")
    return Path(next(iter(spec.submodule_search_locations)), path.lstrip("/"))


def _file_path(what: str, host: str, path: str) -> Path:
    if host:
        raise WeightsError(f"{what}: write three slashes, file:///{host}{path}")
    return Path(path)


def _claim_path(what: str, claim: str, path: str) -> Path:
    return PVC_ROOT / claim / path.lstrip("/")


def _hub_path(what: str, organisation: str, path: str) -> Path:
    name, _, revision = path.lstrip("/").partition("@")
    if not organisation or not name or "/" in name:
        raise WeightsError(f"{what}: write hf://org/name or hf://org/name@revision")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise WeightsError(
            f"{what}: hf:// needs the huggingface_hub package; "
            "pip install huggingface_hub, or use file://"
        ) from error
    try:
        folder = snapshot_download(
            f"{organisation}/{name}",
            revision=revision or None,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise WeightsError(
            f"{what}: cannot download: {reason}; check the name and the network"
        ) from error
    if not any(Path(folder).glob("*.safetensors")):
        raise WeightsError(
            f"{what}: it has no *.safetensors, and no other weights are downloaded; name a "
            "revision that has, or convert the model and name its folder"
        )
    return Path(folder)


def _check(what: str, path: Path) -> ModelFiles:
    try:
        return _look(what, path)
    except OSError as error:
        raise WeightsError(
            f"{what}: {path}: {error.strerror}; check the path and its permissions"
        ) from error


def _look(what: str, path: Path) -> ModelFiles:
    if path.is_file():
        if path.suffix != ".gguf":
            raise WeightsError(
                f"{what}: {path} is not a .gguf file; "
                "name one, or a directory with config.json and safetensors"
            )
        return ModelFiles(path, "gguf")
    if not path.is_dir():
        raise WeightsError(f"{what}: {path} does not exist; check the path")
    if not (path / "config.json").is_file():
        raise WeightsError(f"{what}: {path} has no config.json; name a model's directory or .gguf")
    return ModelFiles(path, "directory")
