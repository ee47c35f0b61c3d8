"""Resolves a model's source URI, such as `hf://org/name`, to the model's files.

This module imports neither torch nor model code, so that the server process can use it to find the
tokenizer.
"""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from ullage_engine.model_loader.gguf_file import check_parts, gguf_parts
from ullage_engine.protocol.errors import WeightsError

PVC_ROOT = Path("/models")
"""Folder in which the operator mounts the volume claims of `pvc://` sources."""

IMAGE_ROOT = Path("/model-image")
"""Folder in which the operator mounts the image of an `oci://` source."""

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files that are downloaded from a hub repository or a bucket folder."""

CONFIG = "config.json"
"""Name of the configuration file in every model folder."""

ADAPTER_CONFIG = "adapter_config.json"
"""Name of the configuration file in every LoRA adapter folder."""

SCHEMES = (
    "pkg://package/file, file:///path, hf://org/name@revision, s3://bucket/prefix, "
    "pvc://claim/path or oci://image#folder"
)

_TORCH = (
    "of PyTorch, which may run code when it is read; convert it with transformers: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)
_OTHER = "which is not read; use a folder of the model with safetensors"
_PIECE = "which is a piece of a file; join the pieces in their order: cat PIECES > model.gguf"
_OTHER_KINDS = {
    r".*\.(incomplete|part|partial|aria2|crdownload|tmp)": (
        "of a download that has not ended; download the model again"
    ),
    r".*\.gguf": "which is a model by itself; name that file",
    r".*\.gguf[.-]\w[\w-]*": _PIECE,
    r".*\.safetensors": "which is one file of a model; name its folder, with config.json",
    r".*\.(bin|pt|pth|ckpt)": _TORCH,
    r".*\.onnx": f"of ONNX, {_OTHER}",
    r".*\.h5": f"of Keras, {_OTHER}",
    r".*\.(msgpack|npz)": f"of Flax, {_OTHER}",
    r".*\.(ggml|ggjt)": "of a format before GGUF; convert the model again",
    r".*\.(zip|tar|tgz|tar\.\w+|7z)": "an archive; unpack it",
}
"""Descriptions of unusable files with suggested fixes, by file name pattern."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model on this machine."""

    path: Path
    """Path of a `.gguf` file (of the first part if the file is split), or of a directory with
    config.json, tokenizer.json and safetensors files."""
    format: Literal["gguf", "directory"]
    allows_unknown: bool = False
    """Whether to merely log unknown configuration keys instead of refusing the model."""


def resolve_source(source: str) -> ModelFiles:
    """Find the files that a source URI names. Only `hf://` and `s3://` may use the network.

    The URI may name any part of a split GGUF file.

    Raises:
        WeightsError: the URI is malformed, or the files do not exist.
    """
    what = f"model.source {source!r}"
    if not is_of_bucket(source):
        return _check(what, _path_of(what, source))
    from ullage_engine.model_loader.s3 import Wanted, fetch_model

    wanted = Wanted(MODEL_FILES, CONFIG)
    return _check(what, fetch_model(what, source, *bucket_and_key(what, source), wanted))


def model_version(source: str) -> str:
    """Return the version of an `s3://` source that this process uses.

    For other sources, and until the source has been resolved, the version is empty.
    """
    if not is_of_bucket(source):
        return ""
    from ullage_engine.model_loader.s3 import pinned

    return pinned(source)


def resolve_adapter(source: str) -> Path:
    """Find the folder of a LoRA adapter in PEFT's format.

    Only `hf://` and `s3://` may use the network.

    Raises:
        WeightsError: the URI is malformed or does not name an adapter's folder.
    """
    what = f"adapters: source {source!r}"
    path = _bucket_adapter(what, source) if is_of_bucket(source) else _path_of(what, source)
    if not (path / ADAPTER_CONFIG).is_file():
        raise WeightsError(f"{what}: {path} has no {ADAPTER_CONFIG}; name an adapter's folder")
    return path


def _bucket_adapter(what: str, source: str) -> Path:
    from ullage_engine.model_loader.s3 import Wanted, fetch

    return fetch(what, *bucket_and_key(what, source), Wanted(MODEL_FILES, ADAPTER_CONFIG))


def _path_of(what: str, source: str) -> Path:
    parts = urlsplit(source)
    if parts.scheme == "oci":
        return _image_path(what, unquote(parts.fragment))
    resolvers = {"pkg": _package_path, "file": _file_path, "hf": _hub_path, "pvc": _claim_path}
    resolve = resolvers.get(parts.scheme)
    if resolve is None:
        raise WeightsError(f"{what}: unknown scheme; use {SCHEMES}")
    return resolve(what, parts.netloc, unquote(parts.path))


def _package_path(what: str, package: str, path: str) -> Path:
    # find_spec instead of an import, since importing a package may run any code.
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


def _image_path(what: str, path: str) -> Path:
    if not IMAGE_ROOT.is_dir():
        raise WeightsError(
            f"{what}: no image is mounted at {IMAGE_ROOT}, which the operator does on a cluster "
            "with image volumes; elsewhere unpack the image and name its folder, file:///path"
        )
    return IMAGE_ROOT / path.lstrip("/")


def hub_repository(source: str) -> tuple[str, str]:
    """Return the repository and revision of an `hf://` source. An empty revision means `main`.

    Raises:
        WeightsError: the source has another scheme, or is malformed.
    """
    what = f"model.source {source!r}"
    parts = urlsplit(source)
    if parts.scheme != "hf":
        raise WeightsError(f"{what}: only models of the hub are fetched; write hf://org/name")
    return _repository(what, parts.netloc, unquote(parts.path))


def is_of_bucket(source: str) -> bool:
    """Return whether a source is an `s3://` URI."""
    return source.startswith("s3://")


def bucket_and_key(what: str, source: str) -> tuple[str, str]:
    """Return the bucket of an `s3://` source, and the key or prefix.

    Raises:
        WeightsError: the source is malformed.
    """
    parts = urlsplit(source)
    if parts.query or parts.fragment or not parts.netloc:
        raise WeightsError(
            f"{what}: write s3://bucket/prefix, or s3://bucket/path/model.gguf, with %23 for # and "
            "%3F for ?"
        )
    return parts.netloc, unquote(parts.path)


def _repository(what: str, organisation: str, path: str) -> tuple[str, str]:
    name, _, revision = path.lstrip("/").partition("@")
    if not organisation or not name or "/" in name:
        raise WeightsError(f"{what}: write hf://org/name or hf://org/name@revision")
    return f"{organisation}/{name}", revision


def _hub_path(what: str, organisation: str, path: str) -> Path:
    repository, revision = _repository(what, organisation, path)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise WeightsError(
            f"{what}: hf:// needs the huggingface_hub package; "
            "pip install huggingface_hub, or use file://"
        ) from error
    try:
        folder = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(MODEL_FILES),
        )
    except Exception as error:  # connection errors come from the client's HTTP library
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
        if path.suffix == ".gguf":
            return ModelFiles(_first_part(what, path), "gguf")
        raise WeightsError(f"{what}: {path}: {_not_gguf(path)}")
    if not path.is_dir():
        raise WeightsError(f"{what}: {path} {_absence(path)}")
    if not os.path.lexists(path / CONFIG):
        raise WeightsError(f"{what}: {path} has no config.json; {_remedy(path)}")
    return ModelFiles(path, "directory")


def _first_part(what: str, path: Path) -> Path:
    first = gguf_parts(path)[0]
    if first == path:
        return path
    try:
        check_parts(path)
    except WeightsError as error:
        raise WeightsError(f"{what}: {error}") from error
    return first


def _not_gguf(path: Path) -> str:
    kind = other_kind(path)
    if kind:
        return f"not a .gguf file but one {kind}"
    return "not a .gguf file; name one, or a directory with config.json and safetensors"


def _absence(path: Path) -> str:
    if path.is_symlink():
        target = os.readlink(path)
        return f"is a link to {target}, which is not there; mount or copy what it links to, too"
    if os.path.lexists(path):
        return "is neither a file nor a directory; name a model's directory or .gguf"
    return "does not exist; check the path"


def _remedy(folder: Path) -> str:
    """Suggest a fix for a folder that has no config.json."""
    names = sorted(os.listdir(folder))
    if not names:
        return "the folder is empty: download the model into it, or mount the volume that has it"
    for name in names:
        if name.endswith(".gguf"):
            return f"name one of its .gguf files, such as {folder / name}"
    folders = [name for name in names if (folder / name / CONFIG).is_file()]
    if folders:
        return f"name the folder in it that has one, such as {folder / folders[0]}"
    snapshots = sorted(folder.glob("snapshots/*/config.json"))
    if snapshots:
        return f"this is the hub's cache: name the folder {snapshots[0].parent}"
    return "name a model's directory or .gguf"


def other_kind(path: Path) -> str:
    """Recognise an unusable file by its name and suggest a fix. Return "" for unknown names."""
    for pattern, kind in _OTHER_KINDS.items():
        if re.fullmatch(pattern, path.name, re.IGNORECASE):
            return kind
    return ""
