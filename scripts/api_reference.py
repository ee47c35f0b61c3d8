"""Write docs/reference/llmservice.md, the API reference, from the CRD.

usage: python scripts/api_reference.py [--check]

With --check, only compare the page with the CRD.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ullage_operator.api.schema import is_decimal

ROOT = Path(__file__).parents[1]
CRD = ROOT / "crds" / "llmservices.serving.ullage.dev.yaml"
PAGE = ROOT / "docs" / "reference" / "llmservice.md"

Schema = Mapping[str, Any]

HEAD = """# LLMService

Look up every field of `serving.ullage.dev/v1alpha1` here, or in your cluster by
`kubectl explain llms.spec`. To check a manifest without a cluster, run `ullage plan -f FILE`.
Unknown fields are refused.

`NAME` stands for any key of a map and `[]` for an item of a list. Fields in **bold** are required.
Write amounts of memory as Kubernetes quantities (`512Mi`, `2Gi`) and durations as Go's (`1m30s`,
`6ms`). Shares are percentages, as in `thresholdPercent`. Write other fractions as decimals in
quotes (`"0.5"`).

    kubectl get llms          # Ready, the reason, engines, the rollout, URL
    kubectl get llms -o wide  # also the model, the routers and the address of gRPC
    kubectl scale llms NAME --replicas 3   # of the pool that takes ordinary requests

`python scripts/api_reference.py` writes this page from `crds/llmservices.serving.ullage.dev.yaml`.
"""


def main() -> int:
    page = render(yaml.safe_load(CRD.read_text(encoding="utf-8")))

    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is out of date; run python scripts/api_reference.py")
    return 1


def render(crd: Schema) -> str:
    root = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts = [HEAD, *rule_lines(root, "## Rules of the whole object\n")]
    for name, section in root["properties"]["spec"]["properties"].items():
        required = name in root["properties"]["spec"]["required"]
        parts += chapter(f"spec.{name}", section, required)
    parts += rule_lines(root["properties"]["spec"], "## Rules across sections\n")
    parts += chapter("status", root["properties"]["status"], False)
    return "\n".join(parts)


def chapter(path: str, node: Schema, required: bool) -> Iterator[str]:
    """Yield the text for a spec section: its description, a table of its fields, its rules."""
    yield f"## {path}\n"
    yield f"{sentence(node)}{' Required.' if required else ''}\n"
    rows = list(fields(node, ""))
    if rows:
        yield "| Field | Type | Default | Meaning |\n| --- | --- | --- | --- |"
        yield from (row(name, field, needed) for name, field, needed in rows)
        yield ""
    else:
        yield f"{type_of(node)}; default {default_of(node) or 'none'}.\n"
    yield from rule_lines(node, "Rules:\n", rows)


def fields(node: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    """Yield each field's path, its schema and whether it is required, depth first."""
    node, path = below(node, path)
    for name, field in node.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        yield here, field, name in node.get("required", ())
        yield from fields(field, here)


def below(node: Schema, path: str) -> tuple[Schema, str]:
    """Return the object schema inside a list or map of objects, and the object's path."""
    if "properties" in node.get("items", {}):
        return node["items"], f"{path}[]"
    if "properties" in (node.get("additionalProperties") or {}):
        return node["additionalProperties"], f"{path}.NAME" if path else "NAME"
    return node, path


def row(name: str, field: Schema, required: bool) -> str:
    shown = f"**`{name}`**" if required else f"`{name}`"
    return f"| {shown} | {type_of(field)} | {default_of(field)} | {sentence(field)} |"


def sentence(node: Schema) -> str:
    return str(node.get("description", "")).strip().replace("|", "\\|")


def default_of(node: Schema) -> str:
    if "default" not in node or isinstance(node["default"], dict):
        return ""
    value = node["default"]
    if isinstance(value, list):
        return "" if not value or isinstance(value[0], dict) else f"`{', '.join(map(str, value))}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def type_of(node: Schema) -> str:
    """Describe a field's type and bounds in a few words."""
    if "enum" in node:
        return " \\| ".join(f"`{value}`" if value != "" else "`''`" for value in node["enum"])
    if node.get("pattern", "").endswith("%$"):
        return "number or percentage"
    if is_decimal(node):
        return "decimal"
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "ms" in node.get("pattern", "") and "h|m" in node["pattern"]:
        return "duration"

    kind = str(node["type"])
    if kind == "array":
        return f"list of at most {node.get('maxItems', 'any number of')}"
    if kind == "object" and "additionalProperties" in node:
        return "map"
    return kind + bounds(node)


def bounds(node: Schema) -> str:
    low = node.get("minimum")
    high = node.get("maximum")
    if low is not None and high is not None:
        return f" {low} to {high}"
    return f" ≥ {low}" if low is not None else f" ≤ {high}" if high is not None else ""


def rule_lines(node: Schema, title: str, rows: Any = ()) -> list[str]:
    """Return the validation messages of a node and its fields, without duplicates."""
    nodes = [node, *(field for _, field, _ in rows)]
    nodes += [each for field in list(nodes) if isinstance(each := inner(field), dict)]

    messages = [
        " ".join(rule["message"].split())
        for each in nodes
        for rule in each.get("x-kubernetes-validations", ())
    ]

    listed = [f"* {message}" for message in dict.fromkeys(messages)]
    return [title, *listed, ""] if listed else []


def inner(node: Schema) -> Any:
    return node.get("items") or node.get("additionalProperties")


if __name__ == "__main__":
    sys.exit(main())
