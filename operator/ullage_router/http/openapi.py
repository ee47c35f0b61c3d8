"""The OpenAPI 3.1 document of the HTTP API, generated from the structures that parse requests.

The schemas of request bodies come from those structures, and the schemas of responses from
the modules `answers.py` of the APIs. If this module lacks a description of a server route,
generation fails.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ullage_common import version
from ullage_router.http import client_timeout
from ullage_router.http.anthropic import answers as messages
from ullage_router.http.anthropic.schemas import (
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
    MessagesTool,
    OutputFormat,
)
from ullage_router.http.batches import answers as batches
from ullage_router.http.batches.endpoint import BatchRequest
from ullage_router.http.console.console import CONSOLE, OVERLOAD, Overload
from ullage_router.http.console.console import EVENTS as CONSOLE_EVENTS
from ullage_router.http.files import answers as files
from ullage_router.http.files.endpoint import MAX_PAGE
from ullage_router.http.files.form import MIN_TTL_S, PURPOSES, UPLOADED
from ullage_router.http.files.multipart import FORM
from ullage_router.http.openai import answers
from ullage_router.http.openai.embeddings import EmbeddingsRequest, Input
from ullage_router.http.openai.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    JsonSchema,
    Prompt,
    Refusing,
    StructuredOutputs,
    Token,
    ToolDefinition,
    Unsupported,
)
from ullage_router.http.openai.scores import RerankRequest, ScoreRequest
from ullage_router.http.openai.tokenize import DetokenizeRequest, TokenizeRequest
from ullage_router.http.responses import answers as responses
from ullage_router.http.responses.schemas import ResponsesRequest, ResponsesTool, TextFormat
from ullage_router.pipeline import idempotency, replace

Json = dict[str, Any]

PATH = "/openapi.json"
JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
BYTES = "application/octet-stream"
_REF = "#/components/schemas/{name}"

REFUSING: tuple[type[Unsupported | Refusing], ...] = (
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    ScoreRequest,
    RerankRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
)
"""Types of request bodies that have unsupported fields.

A request is refused if it sets such a field to a value that has an effect.
"""


def refused_fields(body: type[Unsupported | Refusing]) -> tuple[str, ...]:
    """Return the names of a body's unsupported fields."""
    if issubclass(body, Refusing):
        return tuple(body.NEUTRAL)
    return Unsupported.__struct_fields__


AnyObject = dict[str, Any]
RAW_FIELDS: Mapping[tuple[type[msgspec.Struct], str], Any] = {
    (ChatRequest, "tools"): list[ToolDefinition] | None,
    (ChatMessage, "function_call"): None,
    (ChatMessage, "audio"): None,
    (CompletionRequest, "prompt"): Prompt,
    (EmbeddingsRequest, "input"): Input,
    (TokenizeRequest, "tools"): list[ToolDefinition] | None,
    (DetokenizeRequest, "tokens"): list[Token],
    (JsonSchema, "schema"): dict[str, Any] | bool | str | None,
    (ResponsesRequest, "tools"): list[ResponsesTool] | None,
    (ResponsesTool, "parameters"): AnyObject | None,
    (TextFormat, "schema"): AnyObject | bool | str | None,
    (CountTokensRequest, "tools"): list[MessagesTool] | None,
    (MessagesRequest, "tools"): list[MessagesTool] | None,
    (MessagesTool, "input_schema"): AnyObject,
    (OutputFormat, "schema"): AnyObject | bool | str | None,
    (ContentBlock, "input"): AnyObject | None,
    (StructuredOutputs, "json"): dict[str, Any] | bool | str | None,
}
"""Types of the fields whose JSON is decoded later or elsewhere."""

ANY_REQUEST = {
    400: "The request cannot be read, or a field is wrong.",
    403: "The key does not allow it, or a page of another site uses a router on this machine.",
    404: "There is no such path or model.",
    405: "The path takes other methods.",
    408: "The request did not arrive in time.",
    415: "The body is encoded, or its content-type is not application/json.",
    417: "The server cannot meet the expectation.",
    431: "The request line and the headers are too long.",
    500: "The router failed.",
    501: "The transfer encoding is not supported.",
    505: "The version of HTTP is not supported.",
}
"""Descriptions, by HTTP status, of the errors that any request may get."""
WITH_KEY = {
    401: "The key is missing or wrong.",
    429: "The request does not fit now, or a quota is spent.",
    503: "No engine can serve the request now.",
}
WITH_BODY = {
    411: "The request has no body.",
    413: "The body is too large.",
}
WITH_STORE = WITH_KEY | {503: "The store of files cannot be used now."}
STORING = {507: "The store or its disk is full."}
GENERATING = {
    409: "A later request with the same x-ullage-replace took its place, a batch uses the file, or "
    "the batch has ended.",
    422: "Another request had the same Idempotency-Key.",
    504: "The time limit passed before the first token.",
}
UPGRADING = {426: "The request opens no WebSocket."}
_TEXTS = ANY_REQUEST | WITH_KEY | WITH_BODY | STORING | GENERATING | UPGRADING
_ERROR_HEADERS: Mapping[str, tuple[frozenset[int], str]] = {
    "retry-after": (frozenset({429, 503}), "Seconds after which to retry."),
    "www-authenticate": (frozenset({401}), "How to send a key."),
    "upgrade": (frozenset({426}), "The protocol to upgrade to: websocket."),
    "sec-websocket-version": (frozenset({426}), "The version of the protocol: 13."),
    "allow": (frozenset({405}), "The methods that the path allows."),
    "x-should-retry": (frozenset({409}), "Whether to retry: false."),
}
"""Headers of error responses, with the statuses that have them and their descriptions."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of one HTTP method of a path."""

    name: str
    summary: str
    answer: Any = None
    """Type of the JSON response, or None if the response is not JSON."""
    kinds: tuple[str, ...] = (JSON,)
    """Content types of the response. If it can be JSON, `answer` is its type."""
    status: int = 200
    body: Any = None
    """Type of the request body, or None if the request has no JSON body."""
    form: Json | None = None
    """JSON Schema of the form that the request has as its body, or None."""
    query: tuple[str, ...] = ()
    """Parameters that the query may have."""
    events: tuple[type, ...] = ()
    """Event types of the response's stream (empty if the response is never a stream)."""
    is_done_marked: bool = True
    """Whether the last event of the stream is [DONE]."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Descriptions, by HTTP status, of this operation's errors in addition to ANY_REQUEST."""
    headers: tuple[str, ...] = ()
    """Headers that the request may have."""
    more: Mapping[int, Any] = field(default_factory=dict)
    """Types of other responses that are not errors, by status."""
    needs_key: bool = True


_GENERATE_HEADERS = (
    "x-request-id",
    "x-session-id",
    client_timeout.HEADER,
    idempotency.HEADER,
    replace.HEADER,
)
_ANSWER_HEADERS: Mapping[str, str] = {
    "x-request-id": "The request's id.",
    "x-ullage-action": "The decision: accept, shrink, queue or route4.",
    "x-ullage-route": "The pool, or the kind of its engines.",
    "x-ullage-predicted-kv-bytes": "Predicted bytes of KV cache.",
    "x-ullage-degraded": "The parts of the request that were made smaller.",
    "x-ullage-trail": "Each step of the decision, with its reason.",
    "x-ullage-model": "The model that answers.",
    "x-ullage-engine": "The engine that answers.",
    "x-ullage-revision": "The revision of the service.",
    "x-ullage-cached": "Prompt tokens whose KV was cached, by tier.",
    "x-ullage-cascade": "The steps of a cascade.",
    "x-ullage-ignored": "Parts of the request that had no effect.",
    "x-ullage-discarded-tokens": "Tokens of answers that a cascade did not use.",
    "x-ullage-resumed-on": "The engines that resumed a whole answer.",
    "x-ullage-resumed-inexact": "Whether those engines compute differently.",
}
_REQUEST_HEADERS: Mapping[str, str] = {
    "x-request-id": "Id of the request, 1 to 128 printable characters; others are replaced.",
    "x-session-id": "Session whose KV cache is kept.",
    client_timeout.HEADER: "Seconds after which the answer ends with its text so far.",
    idempotency.HEADER: "Requests with the same key get the same answer.",
    replace.HEADER: "A later request with the same key takes this one's place.",
    "x-api-key": "The key, if there is no Authorization header.",
    "anthropic-version": "Accepted, and without effect.",
}


_QUERY_PARAMETERS: Mapping[str, Json] = {
    "limit": {
        "description": "Most objects in the list: up to 10000 files, or 100 batches or items.",
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    },
    "after": {
        "description": "Id of the last object of the page before.",
        "schema": {"type": "string"},
    },
    "order": {
        "description": "Whether the oldest or the newest object comes first.",
        "schema": {"enum": ["asc", "desc"], "default": "desc"},
    },
    "purpose": {"description": "Purpose of the files.", "schema": {"enum": list(PURPOSES)}},
}
_UPLOAD_FORM: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": list(UPLOADED)},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL_S},
    },
}


_PATH_PARAMETERS: Mapping[str, str] = {
    "/v1/files/{name}": "Id of a file.",
    "/v1/files/{name}/content": "Id of a file.",
    "/v1/batches/{name}": "Id of a batch.",
    "/v1/batches/{name}/cancel": "Id of a batch.",
    "/v1/models/{name}": "Name of a model.",
    "/v1/responses/{name}": "Id of a response.",
    "/v1/responses/{name}/input_items": "Id of a response.",
}


class ProcessStatus(answers.Answer, frozen=True, kw_only=True):
    """The status of the router process."""

    status: str


class Overloading(answers.Answer, frozen=True, kw_only=True):
    """The response to a request that starts a test overload."""

    prefix: str
    """Prefix of the overload's request ids."""
    requests: int


class VersionAnswer(answers.Answer, frozen=True, kw_only=True):
    """The version of the router."""

    version: str


class LoadAnswer(answers.Answer, frozen=True, kw_only=True):
    """How busy the router process is."""

    server_load: int
    """Number of requests that the process serves now."""


def _get(operation: Operation) -> dict[str, Operation]:
    return {"GET": operation, "HEAD": operation}


def _ready(name: str, method: str = "") -> Operation:
    return Operation(
        f"{name}{method}",
        "Say whether requests are served.",
        ProcessStatus,
        more={503: ProcessStatus},
        needs_key=False,
    )


def _score(name: str) -> Operation:
    return Operation(
        name,
        "Compare texts.",
        answers.Scores,
        body=ScoreRequest,
        errors=WITH_KEY | WITH_BODY | {504: GENERATING[504]},
        headers=("x-request-id", client_timeout.HEADER),
    )


def _rerank(name: str) -> Operation:
    return Operation(
        name,
        "Sort documents by their relevance to a query.",
        answers.Ranking,
        body=RerankRequest,
        errors=WITH_KEY | WITH_BODY | {504: GENERATING[504]},
        headers=("x-request-id", client_timeout.HEADER),
    )


OPERATIONS: Mapping[str, Mapping[str, Operation]] = {
    "/v1/chat/completions": {
        "POST": Operation(
            "chat",
            "Continue a conversation.",
            answers.ChatCompletion,
            body=ChatRequest,
            kinds=(JSON, EVENTS),
            events=(answers.ChatChunk, answers.ErrorEvent),
            errors=WITH_KEY | WITH_BODY | GENERATING,
            headers=_GENERATE_HEADERS,
        )
    },
    "/v1/completions": {
        "POST": Operation(
            "complete",
            "Continue a text or token ids.",
            answers.Completion,
            body=CompletionRequest,
            kinds=(JSON, EVENTS),
            events=(answers.CompletionChunk, answers.ErrorEvent),
            errors=WITH_KEY | WITH_BODY | GENERATING,
            headers=_GENERATE_HEADERS,
        )
    },
    "/v1/embeddings": {
        "POST": Operation(
            "embed",
            "Compute the vectors of texts.",
            answers.Embeddings,
            body=EmbeddingsRequest,
            errors=WITH_KEY | WITH_BODY | {504: GENERATING[504]},
            headers=("x-request-id", client_timeout.HEADER),
        )
    },
    "/score": {"POST": _score("score")},
    "/v1/score": {"POST": _score("score_v1")},
    "/rerank": {"POST": _rerank("rerank")},
    "/v1/rerank": {"POST": _rerank("rerank_v1")},
    "/v2/rerank": {"POST": _rerank("rerank_v2")},
    "/v1/responses": {
        "POST": Operation(
            "respond",
            "Continue a conversation of items.",
            responses.Response,
            body=ResponsesRequest,
            kinds=(JSON, EVENTS),
            events=responses.EVENTS,
            errors=WITH_KEY | WITH_BODY | GENERATING,
            headers=_GENERATE_HEADERS,
        ),
        "GET": Operation(
            "respond_to_messages",
            "Open a WebSocket, on which each message is a request like those of POST.",
            kinds=(),
            status=101,
            errors=WITH_KEY | UPGRADING,
        ),
    },
    "/v1/responses/input_tokens": {
        "POST": Operation(
            "input_tokens",
            "Count the tokens of a conversation of items.",
            responses.InputTokens,
            body=ResponsesRequest,
            errors=WITH_KEY | WITH_BODY | GENERATING,
            headers=("x-request-id", client_timeout.HEADER),
        )
    },
    "/v1/responses/{name}": {
        **_get(
            Operation("response", "Return a stored response.", responses.Response, errors=WITH_KEY)
        ),
        "DELETE": Operation(
            "delete_response",
            "Delete a stored response.",
            responses.DeletedResponse,
            errors=WITH_KEY,
        ),
    },
    "/v1/responses/{name}/input_items": _get(
        Operation(
            "input_items",
            "List the items that a stored response answers.",
            responses.InputItemList,
            errors=WITH_KEY,
            query=("limit", "after", "order"),
        )
    ),
    "/v1/files": {
        **_get(
            Operation(
                "files",
                "List the stored files.",
                files.FileList,
                errors=WITH_STORE,
                query=("limit", "after", "order", "purpose"),
            )
        ),
        "POST": Operation(
            "upload_file",
            "Store a file.",
            files.FileObject,
            form=_UPLOAD_FORM,
            errors=WITH_STORE | WITH_BODY | STORING,
        ),
    },
    "/v1/files/{name}": {
        **_get(Operation("file", "Describe a file.", files.FileObject, errors=WITH_STORE)),
        "DELETE": Operation(
            "delete_file",
            "Delete a file.",
            files.DeletedFile,
            errors=WITH_STORE | {409: GENERATING[409]},
        ),
    },
    "/v1/files/{name}/content": _get(
        Operation("file_content", "Return the bytes of a file.", kinds=(BYTES,), errors=WITH_STORE)
    ),
    "/v1/batches": {
        **_get(
            Operation(
                "batches",
                "List the batches.",
                batches.BatchList,
                errors=WITH_STORE,
                query=("limit", "after"),
            )
        ),
        "POST": Operation(
            "create_batch",
            "Answer the requests of a file.",
            batches.BatchObject,
            body=BatchRequest,
            errors=WITH_STORE | WITH_BODY | STORING,
        ),
    },
    "/v1/batches/{name}": _get(
        Operation("batch", "Describe a batch.", batches.BatchObject, errors=WITH_STORE)
    ),
    "/v1/batches/{name}/cancel": {
        "POST": Operation(
            "cancel_batch",
            "Cancel a batch.",
            batches.BatchObject,
            errors=WITH_STORE | STORING | {409: GENERATING[409]},
        )
    },
    "/v1/messages": {
        "POST": Operation(
            "message",
            "Continue a conversation of blocks.",
            messages.MessageAnswer,
            body=MessagesRequest,
            kinds=(JSON, EVENTS),
            events=messages.EVENTS,
            is_done_marked=False,
            errors=WITH_KEY | WITH_BODY | GENERATING,
            headers=(*_GENERATE_HEADERS, "x-api-key", "anthropic-version"),
        )
    },
    "/v1/messages/count_tokens": {
        "POST": Operation(
            "count_tokens",
            "Count the tokens of a conversation of blocks.",
            messages.TokenCount,
            body=CountTokensRequest,
            errors=WITH_KEY | WITH_BODY | GENERATING,
            headers=("x-request-id", client_timeout.HEADER, "x-api-key", "anthropic-version"),
        )
    },
    "/v1/models": _get(Operation("models", "List the models.", answers.ModelList, errors=WITH_KEY)),
    "/v1/models/{name}": _get(
        Operation("model", "Describe a model.", answers.ModelCard, errors=WITH_KEY)
    ),
    "/healthz": _get(
        Operation("alive", "Say that the process lives.", ProcessStatus, needs_key=False)
    ),
    "/readyz": _get(_ready("ready")),
    "/health": _get(_ready("health")),
    "/ping": {**_get(_ready("ping")), "POST": _ready("ping", "_post")},
    "/version": _get(Operation("version", "Return the version.", VersionAnswer, needs_key=False)),
    "/load": _get(
        Operation("load", "Count the requests being served.", LoadAnswer, needs_key=False)
    ),
    "/tokenize": {
        "POST": Operation(
            "tokenize",
            "Return the tokens of a prompt or a conversation.",
            answers.TokenizeAnswer,
            body=TokenizeRequest,
            errors=WITH_KEY | WITH_BODY,
        )
    },
    "/detokenize": {
        "POST": Operation(
            "detokenize",
            "Return the text of tokens.",
            answers.DetokenizeAnswer,
            body=DetokenizeRequest,
            errors=WITH_KEY | WITH_BODY,
        )
    },
    "/tokenizer_info": _get(
        Operation(
            "tokenizer_info",
            "Describe the tokenizer.",
            answers.TokenizerInfo,
            errors=WITH_KEY,
        )
    ),
    PATH: _get(Operation("openapi", "Return this document.", dict[str, Any], needs_key=False)),
    "/stats": _get(
        Operation("stats", "Return the state of a process.", dict[str, Any], errors=WITH_KEY)
    ),
    "/metrics": _get(
        Operation("metrics", "Return metrics for Prometheus.", kinds=(TEXT,), needs_key=False)
    ),
    CONSOLE: _get(
        Operation("console", "Return the console.", kinds=("text/html",), needs_key=False)
    ),
    f"{CONSOLE}/console.css": _get(
        Operation("console_css", "Return its style.", kinds=("text/css",), needs_key=False)
    ),
    f"{CONSOLE}/console.js": _get(
        Operation("console_js", "Return its script.", kinds=("text/javascript",), needs_key=False)
    ),
    CONSOLE_EVENTS: {
        "GET": Operation("console_events", "Send what happens.", kinds=(EVENTS,), errors=WITH_KEY)
    },
    OVERLOAD: {
        "POST": Operation(
            "overload",
            "Send many long requests to this process.",
            Overloading,
            status=202,
            body=Overload,
            errors=WITH_KEY | WITH_BODY,
        )
    },
}
"""Operations by path and HTTP method."""


def document(routes: Iterable[tuple[str, str]]) -> bytes:
    """Return the OpenAPI document for the given paths and methods, as JSON.

    Raises:
        KeyError: A given path and method has no entry in OPERATIONS.
    """
    schemas = Schemas()
    paths: dict[str, Json] = {}
    errors: dict[int, Json] = {}
    for path, method in routes:
        operation = OPERATIONS[path][method]
        described = _operation(operation, path, method, schemas)
        paths.setdefault(path, {})[method.lower()] = described
        errors |= {status: _error(status, schemas) for status in _errors(operation)}

    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Ullage",
                "version": version(),
                "description": "OpenAI's API and Anthropic's Messages API. "
                "Fields that are not described are ignored.",
                "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
            },
            "paths": paths,
            "components": {
                "schemas": schemas.components,
                "responses": {f"Error{status}": errors[status] for status in sorted(errors)},
                "headers": {name: _header(text) for name, text in _ANSWER_HEADERS.items()},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


class Schemas:
    """Generates the JSON Schemas of types.

    Attributes:
        components: The schemas of structures, by name.
    """

    def __init__(self) -> None:
        self.components: dict[str, Json] = {}

    def of(self, kind: Any) -> Json:
        """Return the schema of a type, with references to the components."""
        (schema,), named = msgspec.json.schema_components(
            [kind], schema_hook=_any, ref_template=_REF
        )
        for name, component in named.items():
            if name not in self.components:
                self.components[name] = component
                self._complete(name)
        return schema

    def _complete(self, name: str) -> None:
        """Set the schemas of fields whose Python types do not show which JSON is allowed.

        These are the fields whose JSON is decoded later, and the unsupported fields.
        """
        for (struct, unread), kind in RAW_FIELDS.items():
            if struct.__name__ == name:
                self._set(name, unread, self.of(kind))
        for struct in REFUSING:
            if struct.__name__ == name:
                for refused in refused_fields(struct):
                    values = struct.neutral_values(refused)
                    self._set(name, refused, {"enum": list(values), "deprecated": True})

    def _set(self, name: str, field_name: str, schema: Json) -> None:
        properties = self.components[name]["properties"]
        default = {key: value for key, value in properties[field_name].items() if key == "default"}
        properties[field_name] = schema | default


def _any(kind: type) -> Json:
    """Return the schema of `object`, which every value matches."""
    if kind is object:
        return {"description": "any value"}  # an empty schema would count as none
    raise NotImplementedError


def _operation(operation: Operation, path: str, method: str, schemas: Schemas) -> Json:
    is_head = method == "HEAD"
    name = f"{operation.name}_head" if is_head else operation.name
    described: Json = {"operationId": name, "summary": operation.summary}
    parameters = [_parameter(header) for header in operation.headers]
    parameters += [
        {"name": query, "in": "query", **_QUERY_PARAMETERS[query]} for query in operation.query
    ]
    if "{name}" in path:
        parameters.append(_path_parameter(path))
    if parameters:
        described["parameters"] = parameters

    if operation.body is not None:
        content = {JSON: {"schema": schemas.of(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.form is not None:
        content = {FORM: {"schema": operation.form}}
        described["requestBody"] = {"required": True, "content": content}
    if operation.needs_key:
        described["security"] = [{"key": []}, {}]

    answered = {operation.status: "It is served."} | dict.fromkeys(operation.more, "It is not.")
    responses: dict[str, Json] = {}
    for status, text in answered.items():
        response: Json = {"description": text}
        if operation.needs_key:
            response["headers"] = {
                header: {"$ref": f"#/components/headers/{header}"} for header in _ANSWER_HEADERS
            }
        if not is_head:
            response["content"] = _content(operation, status, schemas)
        responses[str(status)] = response

    for status in _errors(operation):
        if status not in answered:
            responses[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    return described | {"responses": responses}


def _content(operation: Operation, status: int, schemas: Schemas) -> Json:
    if status != operation.status:
        return {JSON: {"schema": schemas.of(operation.more[status])}}
    content: Json = {}
    for kind in operation.kinds:
        if kind == JSON:
            content[kind] = {"schema": schemas.of(operation.answer)}
        elif kind == EVENTS:
            # OpenAPI 3.1 has no schema of a single event. Programs take a schema of the stream, a
            # string, for one of each event. OpenAPI 3.2 calls it `itemSchema`.
            content[kind] = {}
            if operation.events:
                events = [schemas.of(event) for event in operation.events]
                if operation.is_done_marked:
                    events.append({"const": "[DONE]"})
                content[kind]["x-itemSchema"] = {"oneOf": events}
        else:
            content[kind] = {"schema": {"type": "string"}}
    return content


def _errors(operation: Operation) -> dict[int, str]:
    return dict(sorted({**ANY_REQUEST, **operation.errors}.items()))


def _error(status: int, schemas: Schemas) -> Json:
    headers = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
    for name, (statuses, text) in _ERROR_HEADERS.items():
        if status in statuses:
            headers[name] = _header(text)
    forms = [schemas.of(form) for form in (answers.ErrorAnswer, messages.MessagesError)]
    content = {JSON: {"schema": {"oneOf": forms}}}
    return {"description": _TEXTS[status], "headers": headers, "content": content}


def _header(text: str) -> Json:
    return {"description": text, "schema": {"type": "string"}}


def _parameter(name: str) -> Json:
    described = {"name": name, "in": "header", "schema": {"type": "string"}}
    return described | {"description": _REQUEST_HEADERS[name]}


def _path_parameter(path: str) -> Json:
    return {
        "name": "name",
        "in": "path",
        "schema": {"type": "string"},
        "required": True,
        "description": _PATH_PARAMETERS[path],
    }
