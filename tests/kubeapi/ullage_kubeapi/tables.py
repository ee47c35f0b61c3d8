"""Tables, as `kubectl get` asks for them: the CRD's printer columns, or name and age."""

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ullage_kubeapi.resources import Resource

_FILTER = re.compile(r'\[\?\(@\.(\w+)==["\'](.+?)["\']\)\]')
_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def table(resource: Resource, objects: Sequence[Mapping[str, Any]], version: str) -> dict[str, Any]:
    columns = list(resource.columns) or [_AGE]
    headers = [
        {"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0}
    ]
    for column in columns:
        kind = "string" if column["type"] == "date" else column["type"]
        headers.append({"name": column["name"], "type": kind, "format": "", "description": "",
                        "priority": column.get("priority", 0)})  # fmt: skip
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": headers,
        "rows": [_row(obj, columns) for obj in objects],
    }


def _row(obj: Mapping[str, Any], columns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cells = [obj["metadata"]["name"], *(_cell(obj, column) for column in columns)]
    partial = {
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": obj["metadata"],
    }
    return {"cells": cells, "object": partial}


def _cell(obj: Mapping[str, Any], column: Mapping[str, Any]) -> Any:
    value = dig(obj, column["jsonPath"])
    if column["type"] == "date" and isinstance(value, str):
        then = datetime.datetime.fromisoformat(value)
        return f"{int((datetime.datetime.now(datetime.UTC) - then).total_seconds())}s"
    return value


def dig(obj: Any, path: str) -> Any:
    """The value at a simple JSONPath: members, and one filter `[?(@.type=="Ready")]`."""
    steps = re.findall(r'\.[\w-]+|\[\?\(@\.\w+==["\'].+?["\']\)\]', path)
    for step in steps:
        if match := _FILTER.fullmatch(step):
            name, wanted = match.groups()
            obj = next((item for item in obj or () if item.get(name) == wanted), None)
        else:
            obj = obj.get(step[1:]) if isinstance(obj, Mapping) else None
    return obj
