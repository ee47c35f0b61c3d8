"""Files whose texts take the place of the parts of a request that name them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ullage_common.wire.errors import ServiceError, invalid
from ullage_common.wire.validation import invalid_value
from ullage_router.errors import body_too_large, files_off, unknown_file
from ullage_router.files.catalog import Purpose, StoredFile

PURPOSE: Purpose = "user_data"
"""Purpose of the files that requests may name."""
MAX_SHOWN = 8
"""Maximum number of files that an error names."""


@dataclass(frozen=True, slots=True)
class Document:
    """A file that a request names."""

    file: StoredFile
    text: str


Documents = Mapping[str, Document]
"""The files that a request names, by id."""


def document_text(field: str, name: str | None, documents: Documents | None) -> str:
    """Return the text of a file that a part of a request names.

    Args:
        field: Path of the part in the body, for errors.
        name: The id of the file, or None if the part has none.
        documents: The files that the request names, or None if the service stores no files.

    Raises:
        ServiceError: The part has no id, or there is no such file with the right purpose.
    """
    if documents is None:
        refusal = files_off()
        raise invalid(field, f"{field} names a file, and {refusal.message}", refusal.reason)
    if not name:
        raise invalid_value(f"{field}.file_id", "missing", "the id of a file of /v1/files")
    document = documents.get(name)
    if document is None:
        raise unknown_file(name)
    if document.file.purpose != PURPOSE:
        raise wrong_purpose(f"{field}.file_id", document.file, PURPOSE)
    return document.text


def wrong_purpose(field: str, file: StoredFile, purpose: Purpose) -> ServiceError:
    """Return the error for a file that was uploaded for another purpose."""
    return invalid(
        field,
        f"{field} is {file.id}, whose purpose is {file.purpose}; possible: files with purpose "
        f"{purpose}",
    )


def too_long(size: int, limit: int, files: Iterable[StoredFile]) -> ServiceError:
    """Return the error for a request that is too long with the files that it names."""
    return body_too_large(f"{size} bytes with {_named(files)}", limit)


def naming_files(error: ServiceError, files: Iterable[StoredFile]) -> ServiceError:
    """Return an error about a prompt that is too long, with the files that the prompt contains."""
    message = f"{error.message}; the prompt contains {_named(files)}"
    return ServiceError(error.code, error.reason, message, metadata=error.metadata)


def _named(files: Iterable[StoredFile]) -> str:
    shown = [f"{file.id} ({file.filename}, {file.num_bytes} bytes)" for file in files]
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return ", ".join(shown[:MAX_SHOWN]) + more
