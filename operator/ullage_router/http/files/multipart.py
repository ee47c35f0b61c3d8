"""Parses multipart/form-data (RFC 7578) as it arrives, so that no file has to fit in memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message

from ullage_common.wire.errors import ServiceError, invalid
from ullage_router.errors import content_type_not_supported

FORM = "multipart/form-data"
MAX_BOUNDARY = 70
"""Maximum length of a boundary (RFC 2046)."""
MAX_PART_HEAD_BYTES = 8 << 10
MAX_PARTS = 16
FILENAME_CHARSETS = ("utf-8", "us-ascii", "iso-8859-1", "")
"""Character sets of the names of files, in lower case ("" if none is given)."""
MAX_PARAMETERS = 32
"""Maximum number of semicolons in a header.

The standard library takes a time proportional to their number times the header's length.
"""

_BOUNDARY = re.compile(r"[ -~]{0,69}[!-~]")
_PADDING = b" \t"


@dataclass(frozen=True, slots=True)
class PartBegan:
    """The beginning of a part of the form."""

    name: str
    filename: str | None
    """Name of the file, or None if the part is a field."""


Event = PartBegan | bytes
"""The beginning of a part, or a piece of the content of the part that began last."""


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a request's content type names.

    Raises:
        ServiceError: The body is not a form, or its boundary is missing or invalid.
    """
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() != FORM:
        raise content_type_not_supported(content_type, FORM)
    boundary = str(_parameter(header, "content-type", "boundary"))
    if len(boundary) > MAX_BOUNDARY or not _BOUNDARY.fullmatch(boundary):
        raise malformed_form(f"its boundary {boundary[:80]!r} is not valid")
    return boundary.encode()


def malformed_form(why: str) -> ServiceError:
    """Return the error for a body that is not a form."""
    return invalid("body", f"the body is not {FORM}: {why}", "MALFORMED_FORM")


class FormParser:
    """Parses the body of one request.

    Args:
        boundary: The boundary between the parts, from the content type.

    Attributes:
        is_complete: Whether the end of the form has arrived.
    """

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # The first boundary has no line break before it.
        self._buffer = bytearray(b"\r\n")
        self._is_preamble = True
        self._is_head = False
        self._num_parts = 0
        self.is_complete = False

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events of the next piece of the body.

        Raises:
            ServiceError: The body is not a form.
        """
        if self.is_complete:  # an epilogue has no meaning
            return
        self._buffer += data
        while not self.is_complete:
            if self._is_head:
                if (part := self._read_head()) is None:
                    return
                yield part
            else:
                content, has_boundary = self._read_content()
                if content and not self._is_preamble:
                    yield content
                if not (has_boundary and self._read_boundary()):
                    return

    def end(self) -> None:
        """Check that the form is complete.

        Raises:
            ServiceError: The end of the form is missing.
        """
        if not self.is_complete:
            raise malformed_form("its last boundary is missing; send the whole form")

    def _read_content(self) -> tuple[bytes, bool]:
        """Take the content up to the next boundary, and return whether the boundary is there."""
        buffer = self._buffer
        at = buffer.find(self._delimiter)
        # The end of the buffer may be the beginning of a boundary.
        size = at if at >= 0 else max(0, len(buffer) - len(self._delimiter) + 1)
        content = bytes(buffer[:size])
        del buffer[:size]
        return content, at >= 0

    def _read_boundary(self) -> bool:
        """Take the boundary at the beginning of the buffer, and return whether it was whole."""
        buffer = self._buffer
        size = len(self._delimiter)
        rest = bytes(buffer[size : size + MAX_PART_HEAD_BYTES])
        if rest.startswith(b"--"):
            self.is_complete = True
            buffer.clear()
            return True
        line = rest.lstrip(_PADDING)
        if line.startswith(b"\r\n"):
            del buffer[: size + len(rest) - len(line) + 2]
            self._is_head = True
            self._is_preamble = False
            return True
        if line in (b"", b"\r", b"-") and len(rest) < MAX_PART_HEAD_BYTES:
            return False
        raise malformed_form("a boundary is followed by other text")

    def _read_head(self) -> PartBegan | None:
        """Take the headers of a part, or return None if they have not arrived."""
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n", 0, MAX_PART_HEAD_BYTES)
        if end < 0:
            if len(buffer) >= MAX_PART_HEAD_BYTES:
                raise malformed_form(
                    f"the headers of a part have more than {MAX_PART_HEAD_BYTES} bytes"
                )
            return None
        head = bytes(buffer[:end])
        del buffer[: end + 4]
        self._is_head = False
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise malformed_form(f"it has more than {MAX_PARTS} parts")
        return _part(head)


def _part(head: bytes) -> PartBegan:
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError as error:
        raise malformed_form("the headers of a part are not UTF-8") from error
    values = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }
    header = Message()
    header["content-disposition"] = values.get("content-disposition", "")
    name = _parameter(header, "content-disposition", "name")
    if header.get_content_disposition() != "form-data" or not isinstance(name, str) or not name:
        raise malformed_form("a part has no Content-Disposition: form-data; name=...")
    filename = _parameter(header, "content-disposition", "filename")
    if isinstance(filename, tuple) and (filename[0] or "").lower() not in FILENAME_CHARSETS:
        charsets = ", ".join(filter(None, FILENAME_CHARSETS))
        raise malformed_form(f"the filename* of a part has another charset than {charsets}")
    return PartBegan(name, header.get_filename())


def _parameter(header: Message, name: str, parameter: str) -> str | tuple[str | None, ...]:
    """Return a parameter of a header, as a tuple if its character set is given, or "".

    Raises:
        ServiceError: The header has too many parameters, or one with an invalid number.
    """
    if str(header[name]).count(";") > MAX_PARAMETERS:
        raise malformed_form(f"{name} has more than {MAX_PARAMETERS} parameters")
    try:
        return header.get_param(parameter, "", name)
    except ValueError as error:
        raise malformed_form(f"the parameters of {name} cannot be read") from error
