"""Reads the form of an upload: the file, which goes to the disk, and the fields around it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import get_args

from ullage_common.wire.errors import invalid
from ullage_common.wire.validation import invalid_value
from ullage_router.files.catalog import Purpose, StoredFile
from ullage_router.files.store import FileStore, Upload
from ullage_router.http.files.multipart import FormParser, PartBegan, malformed_form

FORM_BYTES = 64 << 10
"""Bytes that the form may have in addition to the file."""
MAX_FIELD_BYTES = 1 << 10
MAX_FILENAME = 255
MIN_TTL_S = 3600
"""Shortest lifetime that a client may choose, in seconds, as in OpenAI's API."""
UPLOADED: tuple[Purpose, ...] = ("batch", "user_data")
"""The purposes for which clients upload files."""
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_ANCHOR = "expires_after[anchor]"
_SECONDS = "expires_after[seconds]"
_FIELDS = ("purpose", _ANCHOR, _SECONDS)


@dataclass(frozen=True, slots=True)
class UploadOptions:
    """The fields of an upload's form."""

    purpose: Purpose
    ttl: float
    """Seconds after which the file expires."""


def read_options(fields: dict[str, str], most_s: float) -> UploadOptions:
    """Check the fields of an upload.

    Args:
        fields: The fields of the form.
        most_s: Longest lifetime of a file, in seconds.

    Raises:
        ServiceError: A field is missing or invalid.
    """
    purpose = fields.get("purpose", "missing")
    if purpose not in UPLOADED:
        raise invalid_value("purpose", purpose, ", ".join(UPLOADED))
    return UploadOptions(purpose, _ttl(fields, most_s))


def _ttl(fields: dict[str, str], most_s: float) -> float:
    anchor = fields.get(_ANCHOR)
    text = fields.get(_SECONDS)
    if anchor is None and text is None:
        return most_s
    if anchor != "created_at":
        raise invalid_value(_ANCHOR, anchor or "missing", "created_at")
    permitted = f"{min(MIN_TTL_S, int(most_s))} to {int(most_s)}"
    if text is None:
        raise invalid_value(_SECONDS, "missing", permitted)
    is_number = text.isascii() and text.isdigit() and len(text) < 12
    if not is_number or not min(MIN_TTL_S, int(most_s)) <= int(text) <= most_s:
        raise invalid_value(_SECONDS, text, permitted)
    return float(text)


async def receive_file(
    store: FileStore, tenant: str, parser: FormParser, pieces: AsyncIterator[bytes]
) -> StoredFile:
    """Store the file of a form, and return its description.

    Args:
        store: The store.
        tenant: The tenant that uploads the file.
        parser: Parses the form.
        pieces: The pieces of the body.

    Raises:
        ServiceError: The form or a field is invalid, the file is too large or is not text, the
            store is full, or the disk failed.
    """
    upload = await store.begin_upload(tenant)
    try:
        reader = _FormReader(upload)
        async for piece in pieces:
            for event in parser.feed(piece):
                await reader.add(event)
        parser.end()
        options = read_options(reader.fields(), store.section.ttl)
        return await upload.finish(options.purpose, options.ttl)
    finally:
        await upload.abort()


class _FormReader:
    """Sends the file of a form to its upload, and collects the fields."""

    def __init__(self, upload: Upload) -> None:
        self._upload = upload
        self._fields: dict[str, bytearray] = {}
        self._name = ""
        self._has_file = False

    async def add(self, event: PartBegan | bytes) -> None:
        if isinstance(event, PartBegan):
            self._begin(event)
        elif self._name == "file":
            await self._upload.write(event)
        elif self._name in self._fields:
            value = self._fields[self._name]
            value += event
            if len(value) > MAX_FIELD_BYTES:
                raise invalid_value(self._name, f"{len(value)} bytes", f"{MAX_FIELD_BYTES} bytes")

    def fields(self) -> dict[str, str]:
        """Return the fields of a complete form."""
        if not self._has_file:
            raise invalid_value("file", "missing", "a part of the form that has a filename")
        try:
            return {name: value.decode() for name, value in self._fields.items()}
        except UnicodeDecodeError as error:
            raise malformed_form("a field is not UTF-8") from error

    def _begin(self, part: PartBegan) -> None:
        self._name = part.name
        if part.name == "file":
            if self._has_file:
                raise invalid_value("file", "given twice", "one file in each request")
            self._has_file = True
            self._upload.begin(_filename(part.filename))
        elif part.name in _FIELDS:
            self._fields[part.name] = bytearray()


def _filename(given: str | None) -> str:
    """Return the name of a file without the folders that some clients send.

    Raises:
        ServiceError: The name is missing, too long, or has control characters.
    """
    name = (given or "").replace("\\", "/").rpartition("/")[2]
    if not name:
        raise invalid_value("file", "without a filename", "a filename in Content-Disposition")
    if len(name) > MAX_FILENAME or not name.isprintable():
        permitted = f"up to {MAX_FILENAME} printable characters"
        raise invalid("file", f"file has the filename {name[:60]!r}; possible: {permitted}")
    return name
