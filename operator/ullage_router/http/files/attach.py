"""Reads the files that a request names, before its body is parsed."""

import asyncio
import re
from functools import partial

from ullage_common.wire.errors import invalid
from ullage_router.files.catalog import StoredFile
from ullage_router.files.documents import Document, too_long
from ullage_router.files.store import FileStore
from ullage_router.http.messages import Body, Request
from ullage_router.intake import IntakeThread

MAX_NAMED = 1024
"""Maximum number of fields `file_id` in a body."""
_KEY = b'"file_id"'
_NAMED = re.compile(rb'"file_id"\s*:\s*"([A-Za-z0-9_-]{1,64})"')
"""Matches a field that names a file. Within a text the quotation marks would be escaped."""


async def attach_documents(
    store: FileStore | None, intake: IntakeThread, request: Request, body: Body, tenant: str
) -> list[StoredFile]:
    """Read the files that a body names, and attach their texts to the body.

    A name of no file is left to the parser, which knows the field.

    Args:
        store: The store of files, or None if the service stores none.
        intake: The thread that searches long bodies.
        request: The request, whose memory the texts take.
        body: The body.
        tenant: The tenant that owns the files.

    Returns:
        The files, each once.

    Raises:
        ServiceError: The body names too many files, their texts are too long, there is not enough
            memory for them, or the disk failed.
    """
    if store is None:
        return []
    body.documents = {}
    names = await intake.run(body.num_bytes, tenant, partial(_names_in, body.peek()))
    if not names:  # such as a body whose tools have a parameter `file_id`
        return []

    store.require_open()
    files = {name: file for name in dict.fromkeys(names) if (file := store.get(tenant, name))}
    # A file that is named twice is in the prompt twice.
    num_bytes = sum(files[name].num_bytes for name in names if name in files)
    total = body.num_bytes + num_bytes
    if total > request.max_body_bytes:
        raise too_long(total, request.max_body_bytes, files.values())

    await request.bring(num_bytes)
    body.num_bytes = total
    body.documents = {name: await _read(store, file) for name, file in files.items()}
    return list(files.values())


def _names_in(data: bytes) -> list[str]:
    """Return the ids of the files that a body names, in order.

    Raises:
        ServiceError: The body names too many files.
    """
    count = data.count(_KEY)
    if count > MAX_NAMED:
        message = f"file_id is there {count} times; name at most {MAX_NAMED} files in a request"
        raise invalid("file_id", message)
    return [name.decode() for name in _NAMED.findall(data)] if count else []


async def _read(store: FileStore, file: StoredFile) -> Document:
    data = await store.read(file)
    return Document(file, await asyncio.to_thread(data.decode))
