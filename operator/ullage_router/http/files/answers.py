"""The bodies of the Files API's responses, as typed structures."""

from typing import Literal

from ullage_router.files.catalog import Purpose, StoredFile
from ullage_router.http.openai.answers import Answer


class FileObject(Answer, frozen=True, kw_only=True):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    """Size of the file in bytes."""
    created_at: int
    """Unix time in seconds."""
    expires_at: int
    """Unix time in seconds."""
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FileList(Answer, frozen=True, kw_only=True):
    """A page of the stored files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Answer, frozen=True, kw_only=True):
    """The response to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


def described(file: StoredFile) -> FileObject:
    """Return the description of a file for clients."""
    return FileObject(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
    )
