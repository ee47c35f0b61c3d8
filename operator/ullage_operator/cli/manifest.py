"""Reading an LLMService from a file."""

from pathlib import Path

import yaml

from ullage_operator.errors import InvalidManifest, LocalFailure
from ullage_operator.spec import Service, parse


def read_service(path: Path) -> Service:
    """The one LLMService of a YAML or JSON file, checked as the API server would.

    Raises:
        LocalFailure: one line for each problem, each starting with the file's name.
    """
    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise LocalFailure(f"{path}: {error.strerror}; -f takes an existing manifest") from error
    except UnicodeDecodeError as error:
        raise LocalFailure(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise LocalFailure(f"{path}: not YAML: {one_line(error)}") from error
    services = [document for document in documents if document is not None]
    if len(services) != 1:
        raise LocalFailure(
            f"{path}: {len(services)} documents; give one LLMService a file, "
            "such as examples/smollm2.yaml"
        )
    try:
        return parse(services[0])
    except InvalidManifest as error:
        raise LocalFailure("\n".join(f"{path}: {each}" for each in error.problems)) from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())
