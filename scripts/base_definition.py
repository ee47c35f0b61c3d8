"""Write the CRD of LLMServiceBase, which has the same fields as LLMService.

usage: python scripts/base_definition.py [--check]

With --check, only compare the file with the CRD of LLMService.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

from ullage_operator.api.bases import base_schema
from ullage_operator.api.naming import API_VERSION, BASE, GROUP

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "crds" / "llmservices.serving.ullage.dev.yaml"
TARGET = ROOT / "crds" / "llmservicebases.serving.ullage.dev.yaml"

HEAD = """# Made by python scripts/base_definition.py from llmservices.serving.ullage.dev.yaml.
"""


class PlainDumper(yaml.SafeDumper):
    """A YAML dumper that writes shared values in full, for programs that do not support anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main() -> int:
    text = HEAD + yaml.dump(
        definition(), Dumper=PlainDumper, sort_keys=False, width=100, allow_unicode=True
    )

    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is out of date; run python scripts/base_definition.py")
    return 1


def definition() -> dict[str, Any]:
    service = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    schema = service["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    [version] = [each["name"] for each in service["spec"]["versions"] if each["storage"]]
    return {
        "apiVersion": service["apiVersion"],
        "kind": service["kind"],
        "metadata": service["metadata"] | {"name": f"{BASE.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": BASE.name,
                "listKind": f"{BASE.name}List",
                "plural": BASE.plural,
                "singular": BASE.name.lower(),
                "shortNames": ["llmb"],
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": whole(schema)},
                }
            ],
        },
    }


def whole(service: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": "Settings that several LLMServices of a namespace share.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"{API_VERSION}."},
            "kind": {"type": "string", "description": f"{BASE.name}."},
            "metadata": {"type": "object"},
            "spec": base_schema(service),
        },
    }


if __name__ == "__main__":
    sys.exit(main())
