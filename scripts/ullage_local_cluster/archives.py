"""Writes container images with a single file as archives in OCI layout, without a build tool."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_OCI = "application/vnd.oci.image"


def write_archive(archive: Path, image: str, file: Path, inside: str, *entrypoint: str) -> None:
    """Write an archive with an image that has a single file.

    Args:
        archive: The tar file to write.
        image: The image's name with its tag.
        file: The file on this machine.
        inside: Its path in the image, without the leading slash.
        entrypoint: The command that containers run.
    """
    layer = archive.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        entry = tar.gettarinfo(file, inside)
        entry.mtime = 0
        entry.mode = 0o755
        with file.open("rb") as content:
            tar.addfile(entry, content)
    with layer.open("rb") as content:
        digest = "sha256:" + hashlib.file_digest(content, "sha256").hexdigest()

    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": list(entrypoint)},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    layers = [{"mediaType": f"{_OCI}.layer.v1.tar", "digest": digest, "size": layer.stat().st_size}]
    blobs: dict[str, bytes] = {}
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": put(blobs, f"{_OCI}.config.v1+json", config),
        "layers": layers,
    }
    described = put(blobs, f"{_OCI}.manifest.v1+json", manifest)
    described["annotations"] = {"io.containerd.image.name": image}

    with tarfile.open(archive, "w") as tar:
        add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [described]}).encode())
        for name, data in blobs.items():
            add(tar, name, data)
        tar.add(layer, f"blobs/{digest.replace(':', '/')}")
    layer.unlink()


def put(blobs: dict[str, bytes], kind: str, value: object) -> dict[str, Any]:
    """Add a JSON document to the blobs, and return its OCI descriptor."""
    data = json.dumps(value).encode()
    digest = hashlib.sha256(data).hexdigest()
    blobs[f"blobs/sha256/{digest}"] = data
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
