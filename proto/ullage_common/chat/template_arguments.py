"""Reads the variables that a client sets for the chat template (`chat_template_kwargs`)."""

import json
from typing import Any

from ullage_common.chat.template import ChatTemplate
from ullage_common.wire.errors import invalid

MAX_BYTES = 16 << 10
# Values that ask for the usual behaviour are not errors if the template does not read them.
_USUAL = {"reasoning_effort": "medium"}


def read_arguments(
    text: str, template: ChatTemplate, field: str, drops_others: bool = False
) -> dict[str, Any]:
    """Parse the client's template variables, and return them by name.

    Args:
        text: a JSON object (empty for no variables).
        field: name of the request field, used in error messages.
        drops_others: whether to drop variables that the template does not read, instead of raising
            an error.

    Raises:
        ServiceError: INVALID_ARGUMENT, the text is not a JSON object, or it sets a variable that
            the template does not read.
    """
    arguments = _parsed(text, field) if text else {}
    for name, value in list(arguments.items()):
        if name in template.variables:
            continue
        if not drops_others and _USUAL.get(name) != value:
            where = name if name in _USUAL else f"{field}.{name}"
            raise invalid(where, f"{where}: {_reads(template)}; leave it out")
        del arguments[name]
    return arguments


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
