"""The command `ullage convert`, which reads files or a command, and prints manifests."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ullage_cli.convert import kserve, production_stack, vllm_serve
from ullage_cli.manifest_draft import Draft
from ullage_cli.manifest_yaml import not_json, read_documents
from ullage_operator.api.errors import InvalidManifest, LocalFailure

STDIN = "-"

HELP = """examples:
  ullage convert llm-inference-service.yaml > service.yaml      KServe
  ullage convert values.yaml > services.yaml                    vLLM's production-stack
  ullage convert -- vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 > service.yaml
  kubectl get llminferenceservice chat -o yaml | ullage convert -

Settings without a counterpart are named on standard error, and as comments above the manifest.
Fields whose meaning differs have a comment. The manifests pass the API's validation; check
them with ullage plan -f, and read docs/guide/commands.md for the limits.

exit status: 0 converted, 2 the input cannot be converted
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the argument parser of `ullage convert`."""
    parser = commands.add_parser(
        "convert",
        help="print manifests for the configuration of another server",
        description="Print LLMServices for KServe's LLMInferenceServices, the helm values of "
        "vLLM's production-stack, or a command of vllm serve.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="FILE|-- vllm serve ...", help="files (-: standard input)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the manifests, and name lost settings on standard error.

    Raises:
        LocalFailure: the input cannot be converted.
    """
    drafts = convert(options.inputs)
    for draft in drafts:
        try:
            draft.service()
        except InvalidManifest as error:
            name = draft.get("metadata.name")
            lines = (f"{name}: the result is not valid: {each}" for each in error.problems)
            raise LocalFailure("\n".join(lines)) from error

    print("---\n".join(draft.text() for draft in drafts), end="")
    for draft in drafts:
        for line in draft.lost:
            print(f"no counterpart: {line}", file=sys.stderr)
    return 0


def convert(inputs: Sequence[str]) -> list[Draft]:
    """Return the services that files or a command stand for.

    Raises:
        LocalFailure: a file is unreadable, or has nothing that can be converted.
    """
    if vllm_serve.is_command(inputs):
        return [vllm_serve.convert(inputs)]
    return [draft for name in inputs for draft in _convert_file(name)]


def _convert_file(name: str) -> list[Draft]:
    path = Path("/dev/stdin" if name == STDIN else name)
    drafts: list[Draft] = []
    documents = read_documents(path)
    for document in documents:
        for problem in not_json(document, ""):
            raise LocalFailure(f"{name}: {problem}")
        try:
            drafts += _convert_document(document)
        except LocalFailure as error:
            raise LocalFailure(f"{name}: {error}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise LocalFailure(
                f"{name}: a field has another type than its schema says ({reason}); check the file"
            ) from error

    if not drafts:
        kinds = sorted({str(each.get("kind")) for each in documents if isinstance(each, dict)})
        raise LocalFailure(
            f"{name}: has nothing to convert (kinds: {', '.join(kinds) or 'none'}); give an "
            f"{kserve.KIND}, values with {production_stack.MODELS}, or -- vllm serve MODEL"
        )
    return drafts


def _convert_document(document: Any) -> list[Draft]:
    if not isinstance(document, dict):
        return []
    if isinstance(document.get("items"), list):
        return [draft for item in document["items"] for draft in _convert_document(item)]
    is_kserve = str(document.get("apiVersion", "")).startswith(kserve.GROUP)
    if is_kserve and document.get("kind") == kserve.KIND:
        return [kserve.convert(document)]
    if isinstance(document.get("servingEngineSpec"), dict):
        return production_stack.convert(document)
    return []
