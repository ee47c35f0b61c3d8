"""Checks, piece by piece, that a file is text that a model can read."""

import codecs

from ullage_common.wire.errors import ServiceError, invalid

_MARKUP = {b"%PDF-": "a PDF", b"{\\rtf": "RTF", b"%!PS": "PostScript"}
"""Beginnings of documents that are text to a computer, but that no model reads as written."""
_BEGINNING = max(map(len, _MARKUP))


class TextCheck:
    """Checks the pieces of one file.

    Args:
        filename: Name of the file in errors.
    """

    def __init__(self, filename: str) -> None:
        self._filename = filename
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._beginning = b""
        self._num_bytes = 0

    def add(self, piece: bytes) -> None:
        """Check the next piece.

        Raises:
            ServiceError: The file is not text.
        """
        if len(self._beginning) < _BEGINNING:
            self._beginning += piece[: _BEGINNING - len(self._beginning)]
            for start, kind in _MARKUP.items():
                if self._beginning.startswith(start):
                    raise self._refusal(f"is {kind}")
        if (at := piece.find(b"\0")) >= 0:
            raise self._refusal(f"has a zero byte at {self._num_bytes + at}")
        self._decode(piece, is_last=False)
        self._num_bytes += len(piece)

    def end(self) -> None:
        """Check that the file does not end within a character.

        Raises:
            ServiceError: The file ends within a character.
        """
        self._decode(b"", is_last=True)

    def _decode(self, piece: bytes, *, is_last: bool) -> None:
        try:
            self._decoder.decode(piece, is_last)
        except UnicodeDecodeError as error:
            raise self._refusal("is not UTF-8 text") from error

    def _refusal(self, why: str) -> ServiceError:
        return invalid(
            "file",
            f"file {self._filename[:100]!r} {why}; send UTF-8 text, such as plain text, Markdown, "
            "JSON, JSON Lines or CSV",
            "FILE_NOT_TEXT",
        )
