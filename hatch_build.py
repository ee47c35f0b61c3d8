"""Compile proto/**/*.proto into Python modules whenever the wheel is built, editable or not."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtoBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root, "proto")
        outputs = [f"--{kind}_out={root}" for kind in ("python", "pyi", "grpc_python")]
        includes = [f"-I{root}", f"-I{files('grpc_tools') / '_proto'}"]
        sources = [str(path) for path in sorted(root.rglob("*.proto"))]
        if protoc.main(["protoc", *includes, *outputs, *sources]):
            raise RuntimeError("protoc failed; its message above names the file and line")
