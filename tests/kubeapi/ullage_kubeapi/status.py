"""The API server's errors: exceptions that carry a Kubernetes `Status` body."""

from collections.abc import Sequence
from typing import Any


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        causes: Sequence[dict[str, str]] = (),
        retry: int = 0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.causes = list(causes)
        self.retry = retry

    def body(self) -> dict[str, Any]:
        details = {"causes": self.causes} if self.causes else {}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": details,
            "code": self.code,
        }


def not_found(resource: str, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource} "{name}" not found')


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(resource: str, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{resource} "{name}" already exists')


def stale(resource: str, name: str) -> ApiError:
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {resource} "{name}": the object has been modified; '
        "please apply your changes to the latest version and try again",
    )


def apply_conflict(causes: Sequence[dict[str, str]]) -> ApiError:
    listed = "\n".join(f"- {cause['field']} ({cause['message']})" for cause in causes)
    plural = "s" if len(causes) > 1 else ""
    return ApiError(
        409, "Conflict", f"Apply failed with {len(causes)} conflict{plural}:\n{listed}", causes
    )


def invalid(kind: str, name: str, causes: Sequence[dict[str, str]]) -> ApiError:
    listed = [f"{cause['field']}: {cause['message']}" for cause in causes]
    text = listed[0] if len(listed) == 1 else f"[{', '.join(listed)}]"
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {text}', causes)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def expired(asked: int, oldest: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {asked} ({oldest})")


def cause(reason: str, field: str, message: str) -> dict[str, str]:
    return {"reason": reason, "field": field, "message": message}
