"""Reads the variables that a client sets for the chat template (`chat_template_kwargs`)."""

import json
from typing import Any

from ullage_common.chat.template import ChatTemplate
from ullage_common.wire.errors import invalid

MAX_BYTES = 16 << 10
# Values that ask for the usual behaviour are not errors if the template does not read them.
_USUAL = {"reasoning_effort": "medium"}


def read_arguments(
    text: str, template: ChatTemplate, field: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parse the client's template variables.

    Args:
        text: a JSON object (empty for no variables).
        field: name of the request field, used in error messages.

    Returns:
        The variables that the template reads, by name, and the paths of the others, which have no
        effect. Values that ask for the usual behaviour are in neither.

    Raises:
        ServiceError: INVALID_ARGUMENT, the text is not a JSON object.
    """
    arguments = _parsed(text, field) if text else {}
    others = {name: arguments.pop(name) for name in arguments.keys() - template.variables}
    ignored = (
        name if name in _USUAL else f"{field}.{name}"
        for name, value in others.items()
        if _USUAL.get(name) != value
    )
    return arguments, tuple(sorted(ignored))


def refuse_unread(ignored: tuple[str, ...], template: ChatTemplate) -> None:
    """Refuse variables that the template does not read.

    Raises:
        ServiceError: INVALID_ARGUMENT, there is such a variable.
    """
    for where in ignored[:1]:
        raise invalid(where, f"{where}: {_reads(template)}; leave it out")


def _parsed(text: str, field: str) -> dict[str, Any]:
    if len(text.encode()) > MAX_BYTES:
        raise invalid(field, f"{field} has more than {MAX_BYTES} bytes; send less")
    try:
        parsed = json.loads(text)
        json.dumps(parsed, ensure_ascii=False).encode()  # unpaired surrogates have no UTF-8
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"{field} is not valid JSON; send one object") from error
    if not isinstance(parsed, dict):
        raise invalid(field, f"{field} is not a JSON object; send one")
    return parsed


def _reads(template: ChatTemplate) -> str:
    names = ", ".join(sorted(template.variables))
    return f"the model's chat template does not read it{f', but {names}' if names else ''}"
