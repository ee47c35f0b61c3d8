"""Creates the router's errors, which are all ServiceErrors, and maps them to HTTP statuses.

ServiceError comes from `ullage_common.wire.errors`. These are the statuses:

gRPC status         HTTP  type
INVALID_ARGUMENT    400   invalid_request_error
UNAUTHENTICATED     401   invalid_request_error   no key or a wrong one
PERMISSION_DENIED   403   permission_error
NOT_FOUND           404   invalid_request_error   no such path, or no such model
RESOURCE_EXHAUSTED  429   rate_limit_error        with Retry-After, for a quota: requests or tokens
UNAVAILABLE         503   service_unavailable     with Retry-After
DEADLINE_EXCEEDED   504   timeout_error
ABORTED             409   conflict_error          a later request replaced it, a batch uses the file
FAILED_PRECONDITION 503   service_unavailable     the service is stopped, without Retry-After
                    507   service_unavailable     no room for files
CANCELLED           499   the client has disconnected, only in logs and metrics
anything else       500   server_error
"""

import errno
import math
import random
from collections.abc import Collection, Iterable

import grpc

from ullage_common.wire.errors import ServiceError, served_names
from ullage_router.policy.next_step import Refuse
from ullage_router.policy.quota import Limit, Shortage
from ullage_router.policy.retry import (
    MAX_RETRY_AFTER_S,
    UNKNOWN_RETRY_AFTER_S,
    unknown_retry_after,
)
from ullage_router.thread_pool import NoThread

CLIENT_CLOSED = 499
RATE_LIMIT_EXCEEDED = "RATE_LIMIT_EXCEEDED"
INVALID_API_KEY = "INVALID_API_KEY"
REPLACED = "REPLACED"
STOPPED = "STOPPED"
ENGINE_SILENT = "ENGINE_SILENT"
ENGINE_LOST = "ENGINE_LOST"
ENGINE_RECOVERING = "ENGINE_RECOVERING"
ENGINE_STALLED = "ENGINE_STALLED"
KEY_REUSED = "IDEMPOTENCY_KEY_REUSED"
FILE_STORE_FULL = "FILE_STORE_FULL"
DISK_FULL = "DISK_FULL"
FILE_IN_USE = "FILE_IN_USE"
BATCH_ENDED = "BATCH_ENDED"
UPGRADE_REQUIRED = "UPGRADE_REQUIRED"
NO_RETRY = frozenset({REPLACED, FILE_STORE_FULL, DISK_FULL, FILE_IN_USE, BATCH_ENDED})
"""Error reasons that a retry cannot help, although OpenAI's clients retry their statuses."""

_STATUSES = {
    grpc.StatusCode.OK: (200, ""),
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "invalid_request_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
    grpc.StatusCode.ABORTED: (409, "conflict_error"),
    grpc.StatusCode.FAILED_PRECONDITION: (503, "service_unavailable"),
    grpc.StatusCode.CANCELLED: (CLIENT_CLOSED, "cancelled"),
}
STATUSES_BY_REASON = {
    "CASCADE_LOOP": 400,
    "METHOD_NOT_ALLOWED": 405,
    "REQUEST_TIMEOUT": 408,
    "LENGTH_REQUIRED": 411,
    "BODY_TOO_LARGE": 413,
    "CONTENT_ENCODING_NOT_SUPPORTED": 415,
    "CONTENT_TYPE_NOT_SUPPORTED": 415,
    "EXPECTATION_FAILED": 417,
    KEY_REUSED: 422,
    UPGRADE_REQUIRED: 426,
    "HEADERS_TOO_LARGE": 431,
    FILE_STORE_FULL: 507,
    DISK_FULL: 507,
    "TRANSFER_ENCODING_NOT_SUPPORTED": 501,
    "HTTP_VERSION_NOT_SUPPORTED": 505,
}
"""HTTP statuses for error reasons that need a more specific status than their gRPC code implies."""

LEAVING = frozenset({"DRAINING", "NO_ENGINE"})
"""Error reasons meaning that an engine currently accepts no requests."""
OF_THE_ROUTER = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
"""gRPC statuses with which an engine rejects the router's credentials or ticket.

Engines never see clients' API keys, so these errors are not the client's fault.
"""
_NOT_THE_ENGINES_FAULT = LEAVING | {"REQUEST_FAILED", ENGINE_RECOVERING}
_FAULTS = OF_THE_ROUTER | frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
_THE_REQUESTS = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_KINDS = {
    "invalid": grpc.StatusCode.INVALID_ARGUMENT,
    "busy": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
}


def http_status(error: ServiceError) -> int:
    """Return the HTTP status for an error."""
    return STATUSES_BY_REASON.get(error.reason) or _STATUSES.get(error.code, (500, ""))[0]


def error_type(error: ServiceError) -> str:
    """Return an error's `type` field in OpenAI's error format."""
    if error.reason == "CASCADE_LOOP":
        return "invalid_request_error"
    if error.reason == RATE_LIMIT_EXCEEDED:
        return "tokens" if error.metadata.get("limit") == "tokens_per_minute" else "requests"
    return _STATUSES.get(error.code, (500, "server_error"))[1]


def retry_after_s(error: ServiceError) -> int | None:
    """Return the Retry-After value in whole seconds, or None if the error has no such header."""
    if error.retry_after_s is not None and error.reason == RATE_LIMIT_EXCEEDED:
        return max(1, math.ceil(error.retry_after_s))  # exact, so not bounded like a forecast
    if error.retry_after_s is not None:
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(error.retry_after_s)))
    if error.reason == STOPPED:
        return None  # stopped until somebody starts the service again
    if http_status(error) in (429, 503):
        return UNKNOWN_RETRY_AFTER_S
    return None


def is_engine_fault(error: ServiceError) -> bool:
    """Return whether an error is the engine's fault rather than the request's.

    Invalid requests, cancellations, deadlines and full memory do not count against the engine. A
    stalled answer does. If the engine's worker dies during a request, the engine is not blamed,
    because otherwise a single bad request could take one engine after another out of service.
    """
    if error.reason == ENGINE_STALLED:
        return True
    died_over_it = (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "WORKER_LOST")
    is_excused = error.reason in _NOT_THE_ENGINES_FAULT or died_over_it
    return error.code in _FAULTS and not is_excused


def is_failure(error: ServiceError) -> bool:
    """Return whether an error counts as a failure of a service revision in a rollout.

    Errors caused by the request itself, by full memory or by the lack of an engine do not count.
    All other errors do, even if no single engine is to blame.
    """
    return error.code not in _THE_REQUESTS and error.reason not in LEAVING


def stalled(engine: str, timeout_s: float) -> ServiceError:
    """Return the error for an answer whose next token did not arrive in time."""
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        ENGINE_STALLED,
        f"engine {engine} sent no further token for {timeout_s:g} s",
    )


def silent_engine(engine: str, silent_s: float) -> ServiceError:
    """Return the error for a request whose engine has stopped responding."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        ENGINE_SILENT,
        f"engine {engine} has sent nothing for {silent_s:.1f} s; retry, another one will answer",
        retry_after_s=1,
    )


def recovering_engine(engine: str, seconds: float) -> ServiceError:
    """Return the error for a request whose engine has had no worker for some seconds."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        ENGINE_RECOVERING,
        f"engine {engine} has had no worker for {seconds:.1f} s; retry, another one will answer",
        retry_after_s=1,
    )


def is_left_worker(error: ServiceError) -> bool:
    """Return whether the request left an engine because its next worker took too long."""
    return error.reason == ENGINE_RECOVERING


def no_stream(engine: str) -> ServiceError:
    """Return the error for a request to an engine that has no open stream."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", f"the stream to engine {engine} is not open"
    )


def cut_off(engine: str, silent_s: float, timeout_s: float) -> ServiceError:
    """Return the error for an answer that hit its time limit on an unresponsive engine."""
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        ENGINE_SILENT,
        f"the answer broke off: engine {engine} has sent nothing for {silent_s:.1f} s and the time "
        f"limit of {timeout_s:g} s has passed; retry",
    )


def not_resumed(engine: str, timeout_s: float, cause: ServiceError) -> ServiceError:
    """Return the error for an answer that no other engine was able to resume in time."""
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        ENGINE_LOST,
        f"the answer broke off: engine {engine} was lost ({cause.message}) and no other "
        f"resumed it within the time limit of {timeout_s:g} s; retry",
    )


def refusal(refuse: Refuse) -> ServiceError:
    """Return the error for a request that admission refuses."""
    metadata = {}
    if refuse.kind == "invalid":
        metadata["field"] = refuse.field
    if refuse.demand:
        metadata |= {
            "needed_bytes": str(refuse.demand.kv_bytes),
            "available_bytes": str(max(0, refuse.available)),
        }
    return ServiceError(
        _KINDS[refuse.kind],
        refuse.reason,
        refuse.message,
        metadata=metadata,
        retry_after_s=refuse.retry_after_s,
    )


def some_retry_after_s() -> int:
    """Return a retry delay for a wait of unknown length, with jitter to spread clients' retries."""
    return unknown_retry_after(random.getrandbits(30))


def _soon_s() -> int:
    """Return a short random retry delay in seconds, for when memory should be free soon."""
    return random.randint(1, UNKNOWN_RETRY_AFTER_S)


def no_engine() -> ServiceError:
    """Return the error for a request that arrived before any engine was known."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "NO_ENGINE",
        "no engine is known yet; retry when one has started",
        retry_after_s=some_retry_after_s(),
    )


def stopped(model: str) -> ServiceError:
    """Return the error for a request to a service that was stopped intentionally."""
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        STOPPED,
        f"{model} is stopped on purpose, so waiting does not help; to start it again set spec.stop "
        "of its LLMService to false",
    )


def draining() -> ServiceError:
    """Return the error for a new request while the router is shutting down."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "DRAINING",
        "this router is stopping; retry, another one will answer",
        retry_after_s=1,
    )


def deadline(timeout_s: float) -> ServiceError:
    """Return the error for a request whose first token did not arrive in time."""
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE",
        f"no token within the time limit of {timeout_s:g} s; shorten the prompt or retry later",
    )


def unknown_model(
    name: str, served: str, adapters: Iterable[str] = (), allowed: Collection[str] = ()
) -> ServiceError:
    """Return the error for a request that names an unknown model. It lists the allowed names.

    Args:
        name: The requested name.
        served: The name of the served model.
        adapters: The names of the served model's adapters.
        allowed: Names that the tenant may use, or empty for all.
    """
    usable = [adapter for adapter in adapters if not allowed or adapter in allowed]
    if not allowed or served in allowed:
        names = served_names(served, usable)
    else:
        names = ", ".join(map(repr, sorted(usable))) or "a key that may use one of the models"
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"model {name!r} is not served here; use {names}",
        metadata={"field": "model"},
    )


def broken_stream(reason: str) -> ServiceError:
    """Return the error for an answer whose stream ended unexpectedly."""
    return ServiceError(grpc.StatusCode.INTERNAL, "WORKER_LOST", f"the answer broke off: {reason}")


def unauthenticated(message: str) -> ServiceError:
    """Return the error for a request with a missing or invalid API key."""
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, INVALID_API_KEY, message)


def forbidden(reason: str, message: str, field: str = "") -> ServiceError:
    """Return the error for a request that the client is not permitted to make."""
    metadata = {"field": field} if field else {}
    return ServiceError(grpc.StatusCode.PERMISSION_DENIED, reason, message, metadata=metadata)


def over_quota(tenant: str, shortage: Shortage) -> ServiceError:
    """Return the error for an exhausted quota. It names the limit and says when to retry."""
    limit = shortage.limit.replace("_", " ")
    wait_s = UNKNOWN_RETRY_AFTER_S if shortage.wait_s is None else shortage.wait_s
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        RATE_LIMIT_EXCEEDED,
        f"rate limit of tenant {tenant} reached: {limit} {shortage.allowed:g}; "
        f"retry in {max(1, math.ceil(wait_s))} s",
        metadata={"limit": shortage.limit, "allowed": f"{shortage.allowed:g}"},
        retry_after_s=wait_s,
    )


def above_quota(prompt_tokens: int, allowed: float) -> ServiceError:
    """Return the error for a prompt longer than the key's limit on tokens per minute."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "PROMPT_ABOVE_QUOTA",
        f"the prompt has {prompt_tokens} tokens, more than the tokens per minute of this key "
        f"({allowed:g}); shorten it",
        metadata={"field": "input", "limit": "tokens_per_minute", "allowed": f"{allowed:g}"},
    )


def inputs_above_quota(count: int, amount: int, limit: Limit, allowed: float) -> ServiceError:
    """Return the error for a request whose inputs would exceed even an unused quota."""
    tokens = f", which have {amount} tokens or more" if limit == "tokens_per_minute" else ""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "INPUTS_ABOVE_QUOTA",
        f"input has {count} inputs{tokens}, and the {limit.replace('_', ' ')} of this key are "
        f"{allowed:g}; send fewer at a time",
        metadata={"field": "input", "limit": limit, "allowed": f"{allowed:g}"},
    )


def internal(request_id: str = "") -> ServiceError:
    """Return the error for an internal failure, whose cause is only written to the router's log."""
    where = f"its log names request {request_id}" if request_id else "its log has the cause"
    return ServiceError(grpc.StatusCode.INTERNAL, "INTERNAL", f"the router failed; {where}")


def broken_call(name: str) -> ServiceError:
    """Return the error for a stream that has begun a call whose arguments are no JSON object."""
    return ServiceError(
        grpc.StatusCode.INTERNAL,
        "BROKEN_CALL",
        f"the model's call of {name} has arguments that are no JSON object; send the request again",
    )


def console_busy(message: str) -> ServiceError:
    """Return the error for a console request that is refused because the console is in use.

    Either too many readers are watching the console, or a test overload is already running.
    """
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "CONSOLE_BUSY", message, retry_after_s=MAX_RETRY_AFTER_S
    )


def unknown_path(path: str, see: str) -> ServiceError:
    """Return the error for a request to a path that does not exist."""
    return ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", f"there is no {path}; see {see}")


def unknown_response(name: str, why: str) -> ServiceError:
    """Return the error for a request for a response that is not stored.

    Args:
        name: The id of the response.
        why: A clause that says why it is not stored, and what to do.
    """
    return ServiceError(
        grpc.StatusCode.NOT_FOUND, "RESPONSE_NOT_FOUND", f"response is {name[:160]}, {why}"
    )


def no_compaction() -> ServiceError:
    """Return the error for a request to compact a conversation."""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "COMPACTION_NOT_SUPPORTED",
        "this service compacts no conversations; summarise the older items yourself, or set "
        "spec.prompts.compress of the service, or send truncation: auto if spec.routing.ladder has "
        "ShrinkContext",
    )


def method_not_allowed(path: str, allowed: str) -> ServiceError:
    """Return the error for an HTTP method that the path does not support."""
    return invalid_head("METHOD_NOT_ALLOWED", f"{path} takes {allowed}")


def upgrade_required() -> ServiceError:
    """Return the error for a GET request to a path that serves WebSockets only."""
    return invalid_head(
        UPGRADE_REQUIRED,
        "a GET request here must open a WebSocket: send Upgrade: websocket and "
        "Sec-WebSocket-Version: 13, or send a POST request",
    )


def websocket_too_old(max_age_s: float) -> ServiceError:
    """Return the error for a WebSocket that closes because of its age."""
    return invalid_head(
        "WEBSOCKET_CONNECTION_LIMIT_REACHED",
        f"a WebSocket is open for at most {max_age_s / 60:g} minutes; open another one to continue",
    )


def invalid_head(reason: str, message: str) -> ServiceError:
    """Return the error for a request with an invalid method, version or header."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, reason, message)


def malformed(cause: str) -> ServiceError:
    """Return the error for bytes that cannot be parsed as an HTTP request."""
    return invalid_head("MALFORMED_REQUEST", f"this is not an HTTP/1.1 request: {cause}")


def head_too_large(max_bytes: int, max_headers: int) -> ServiceError:
    """Return the error for a request whose request line or headers are too long."""
    return invalid_head(
        "HEADERS_TOO_LARGE",
        f"request line and headers are too long; send at most {max_bytes} bytes and "
        f"{max_headers} headers",
    )


def kept_headers_too_large(names: str, max_bytes: int) -> ServiceError:
    """Return the error for a WebSocket whose headers are too long to be kept while it is open."""
    return invalid_head(
        "HEADERS_TOO_LARGE",
        f"headers that hold for each message ({names}) are too long; send at most {max_bytes} "
        "bytes of them",
    )


def late(part: str, limit_s: float) -> ServiceError:
    """Return the error for a request whose headers or body (`part`) did not arrive in time."""
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "REQUEST_TIMEOUT",
        f"the {part} did not arrive within {limit_s:g} s; send it at once",
    )


def slow_upload(rate: int) -> ServiceError:
    """Return the error for an upload that arrives too slowly."""
    return ServiceError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "REQUEST_TIMEOUT",
        f"the upload arrives more slowly than {rate} bytes per second; send it faster, or in "
        "smaller files",
    )


def length_required() -> ServiceError:
    """Return the error for a request that requires a body but has none."""
    return invalid_head("LENGTH_REQUIRED", "the request has no body; send one with Content-Length")


def content_type_not_supported(kind: str, expected: str = "application/json") -> ServiceError:
    """Return the error for a request whose Content-Type is not the expected one."""
    given = f"is {kind[:60]!r}" if kind else "is missing"
    return invalid_head(
        "CONTENT_TYPE_NOT_SUPPORTED",
        f"content-type {given}; send {expected}, as the body is",
    )


def body_too_large(size: str, limit: int) -> ServiceError:
    """Return the error for a request whose body exceeds the size limit."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "BODY_TOO_LARGE",
        f"the body has {size}; send at most {limit}",
        metadata={"field": "body"},
    )


def bodies_full() -> ServiceError:
    """Return the error for a request whose body cannot be read because memory is scarce."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "BODIES_FULL",
        "requests that arrive fill the memory for their bodies; retry",
        retry_after_s=_soon_s(),
    )


def texts_full() -> ServiceError:
    """Return the error for a long text that cannot be tokenised because memory is scarce."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "TEXTS_FULL",
        "long texts that wait to be tokenised fill the memory for them; retry",
        retry_after_s=_soon_s(),
    )


def no_thread(cause: OSError) -> ServiceError:
    """Return the error for work that needs a thread while none can be started."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "NO_THREAD",
        f"the router cannot start a thread ({cause.strerror}); retry, or allow its container more "
        "processes",
        retry_after_s=_soon_s(),
    )


def vectors_full() -> ServiceError:
    """Return the error for embeddings that cannot be returned because memory is scarce."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "VECTORS_FULL",
        "answers with embeddings fill the memory for their vectors; retry",
        retry_after_s=_soon_s(),
    )


def answers_full() -> ServiceError:
    """Return the error for a whole response that cannot be kept because memory is scarce."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "ANSWERS_FULL",
        "whole answers with log-probabilities or long texts fill the memory for them; retry, or "
        "ask for less",
        retry_after_s=_soon_s(),
    )


def files_off() -> ServiceError:
    """Return the error for a request that needs files in a service that stores none."""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "FILES_OFF",
        "this service stores no files; set spec.router.files of its LLMService",
    )


def unknown_file(name: str) -> ServiceError:
    """Return the error for a file that does not exist, has expired or belongs to another tenant."""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "FILE_NOT_FOUND",
        f"file_id is {name[:160]}, which is not stored here (any more); upload the file to "
        "/v1/files, or list the files there",
        metadata={"field": "file_id"},
    )


def file_too_large(limit: int) -> ServiceError:
    """Return the error for an uploaded file above the size limit."""
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "BODY_TOO_LARGE",
        f"file has more than {limit} bytes, the most of a file; send less, or raise "
        "spec.router.files.maxFileBytes of the service",
        metadata={"field": "file"},
    )


def file_store_full(limit: str, allowed: int, *, of_tenant: bool) -> ServiceError:
    """Return the error for a file for which the store has no room.

    Args:
        limit: The field of the limit, such as maxBytes.
        allowed: The limit.
        of_tenant: Whether the tenant's half of the limit is reached, rather than the whole.
    """
    share = "your half of the store" if of_tenant else "the store"
    unit = "files" if limit == "maxFiles" else "bytes"
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        FILE_STORE_FULL,
        f"{share} of files is full, with {allowed} {unit}; delete files that you no longer need, "
        f"or raise spec.router.files.{limit} of the service",
        metadata={"field": "file"},
    )


def file_store_failed(cause: OSError) -> ServiceError:
    """Return the error for a file that the disk did not take or give, or for want of a thread."""
    if isinstance(cause, NoThread):
        return no_thread(cause)
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            DISK_FULL,
            "the disk of the store of files is full, and nothing was stored; delete files, or give "
            "the volume of spec.router.files more space",
        )
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "FILE_STORE_FAILED",
        f"the disk of the store of files failed ({cause.strerror}); retry, and look at the volume "
        "of spec.router.files",
        retry_after_s=some_retry_after_s(),
    )


def file_store_closed(why: str) -> ServiceError:
    """Return the error for a request for files while this router cannot use the store."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "FILE_STORE_CLOSED",
        f"the store of files is not open here yet: {why}; retry",
        retry_after_s=some_retry_after_s(),
    )


def uploads_full(most: int) -> ServiceError:
    """Return the error for an upload while many others run."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "UPLOADS_FULL",
        f"{most} uploads run at this router already; retry",
        retry_after_s=_soon_s(),
    )


def file_in_use(name: str, user: str) -> ServiceError:
    """Return the error for the deletion of a file that a running batch reads."""
    return ServiceError(
        grpc.StatusCode.ABORTED,
        FILE_IN_USE,
        f"{name} is the input of {user}, which has not ended; cancel it first",
        metadata={"field": "file_id"},
    )


def unknown_batch(name: str) -> ServiceError:
    """Return the error for a batch that does not exist or belongs to another tenant."""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "BATCH_NOT_FOUND",
        f"batch is {name[:160]}, which is not known here (any more); list the batches at "
        "/v1/batches",
    )


def batch_ended(name: str, status: str) -> ServiceError:
    """Return the error for the cancellation of a batch that has ended or is about to."""
    return ServiceError(
        grpc.StatusCode.ABORTED,
        BATCH_ENDED,
        f"{name} is {status}, and can no longer be cancelled",
    )


def batches_full(most: int) -> ServiceError:
    """Return the error for a new batch while too many have not ended."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "BATCHES_FULL",
        f"{most} batches have not ended yet; wait for one of them or cancel it, or raise "
        "spec.router.files.batches.maxActive of the service",
        retry_after_s=MAX_RETRY_AFTER_S,
    )


def tenant_without_key(name: str) -> ServiceError:
    """Return the error for a request of a batch whose tenant has no key any more."""
    return unauthenticated(f"tenant {name} has no API key any more")
