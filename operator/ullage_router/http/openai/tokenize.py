"""Serves vLLM's /tokenize, /detokenize and /tokenizer_info, which need no engine.

A prompt is tokenised exactly as for a completion or a chat, so the count is the one that a request
would have.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.errors import invalid
from ullage_common.wire.limits import MAX_MESSAGES, MAX_PROMPT_TOKENS
from ullage_common.wire.validation import (
    check_prompt_tokens,
    invalid_value,
    validate_request,
)
from ullage_router.http.files.attach import attach_documents
from ullage_router.http.messages import Body, Reply, Request
from ullage_router.http.openai.decoding import (
    body_decoder,
    decode_field,
    long_token_lists,
    parse_fields,
    utf8,
)
from ullage_router.http.openai.endpoint import CHARACTER_BYTES
from ullage_router.http.openai.errors import ignored_header
from ullage_router.http.openai.requests import from_chat
from ullage_router.http.openai.schemas import NULL, ChatMessage, ChatRequest, Token, unread
from ullage_router.policy.facts import Side
from ullage_router.server.service import RouterService
from ullage_router.tenants.session import TenantSession
from ullage_router.tokenizer.model import Model, special_tokens

_JSON = (b"content-type", b"application/json")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
TOKEN_BYTES = 16
"""Bytes of text per token for which the work of decoding is planned."""
_TOKEN_IDS = msgspec.json.Decoder(
    Annotated[list[Token], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
)


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a POST request to /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tools: msgspec.Raw = unread()
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Whether special tokens are added. By default they are added to a prompt only."""
    return_token_strs: bool | None = None

    def refused(self) -> None:
        """Return None, since no field is unsupported."""


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a POST request to /detokenize."""

    tokens: msgspec.Raw
    """The token ids as undecoded JSON."""
    model: str | None = None

    def refused(self) -> None:
        """Return None, since no field is unsupported."""


_TOKENIZE = body_decoder(TokenizeRequest)
_DETOKENIZE = body_decoder(DetokenizeRequest)


class TokenizeEndpoint:
    """Serves requests to /tokenize."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def __call__(self, request: Request, reply: Reply) -> None:
        service = self._service
        tenant = service.tenants.open_session(request.headers.get("authorization"))
        body = await request.read_json(tenant.name)
        await attach_documents(service.files, service.intake, request, body, tenant.name)
        size = body.num_bytes
        asked, wants_strings, unknown = await service.intake.run(
            size, tenant.name, partial(_tokenize_request, body)
        )
        model = _model(service, asked.model, tenant)
        validate_request(asked)
        prompt = await service.prompts.build(model, asked, tenant.name)
        request.end_turn()

        answer = partial(_tokens_answer, model, prompt.token_ids, wants_strings)
        headers = [_JSON]
        if ignored := (*unknown, *prompt.ignored):
            headers.append((b"x-ullage-ignored", ignored_header(ignored).encode()))
        await reply.whole(200, headers, await asyncio.to_thread(answer))


class DetokenizeEndpoint:
    """Serves requests to /detokenize."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def __call__(self, request: Request, reply: Reply) -> None:
        service = self._service
        tenant = service.tenants.open_session(request.headers.get("authorization"))
        body = await request.read_json(tenant.name)
        name, ids = await service.intake.run(
            body.num_bytes, tenant.name, partial(_detokenize_request, body)
        )
        model = _model(service, name, tenant)
        most = service.engines.max_model_len
        if len(ids) > most:
            permitted = f"at most {most} at a time, the model's length"
            raise invalid_value("tokens", f"a list of {len(ids)} tokens", permitted)
        check_prompt_tokens(ids, model.vocab_size, "tokens")
        request.end_turn()

        # A token has up to a hundred characters, so texts are made one at a time.
        decode = partial(model.decode, ids)
        text = await service.intake.run(TOKEN_BYTES * len(ids), tenant.name, decode)
        request.keep(CHARACTER_BYTES * len(text))
        answer = await asyncio.to_thread(msgspec.json.encode, {"prompt": text})
        await reply.whole(200, [_JSON], answer)


class TokenizerInfoEndpoint:
    """Serves requests to /tokenizer_info, as clients that tokenise by /tokenize need it."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    async def __call__(self, request: Request, reply: Reply) -> None:
        tenant = self._service.tenants.open_session(request.headers.get("authorization"))
        model = _model(self._service, "", tenant)
        await reply.whole(200, [_JSON], msgspec.json.encode(_tokenizer_info(model)))


def _model(service: RouterService, name: str, tenant: TenantSession) -> Model:
    """Return the model whose tokenizer is used.

    Raises:
        ServiceError: The tenant may not use the model, it does not exist, or no engine is known.
    """
    tenant.check_model(name or service.config.model)
    service.engines.adapter_of(name, tenant.rules.models)
    return service.engines.served_model(name, Side.STABLE, tenant.rules.models)


def _tokenize_request(body: Body) -> tuple[inference_pb2.GenerateRequest, bool, tuple[str, ...]]:
    """Return the request to tokenise, whether tokens' texts are wanted, and the unknown fields."""
    asked, unknown = parse_fields(_TOKENIZE, body.take())
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "prompt and messages: send one of them")
    if asked.prompt is not None and asked.tools != NULL:
        raise invalid("tools", "tools is for messages; leave it out, or send messages")
    if asked.messages is not None:
        request = from_chat(
            ChatRequest(
                model=asked.model or "",
                messages=asked.messages,
                tools=asked.tools,
                chat_template_kwargs=asked.chat_template_kwargs,
                reasoning_effort=asked.reasoning_effort,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                add_special_tokens=asked.add_special_tokens,
            ),
            body.documents,
        )
    else:
        request = inference_pb2.GenerateRequest(
            model=utf8("model", asked.model or ""),
            text=utf8("prompt", asked.prompt or ""),
            omit_special_tokens=asked.add_special_tokens is False,
        )
    return request, bool(asked.return_token_strs), unknown


def _detokenize_request(body: Body) -> tuple[str, Sequence[int]]:
    """Return the model's name and the token ids.

    Raises:
        ServiceError: The body is not a list of token ids.
    """
    asked, _ = parse_fields(_DETOKENIZE, body.take())
    lists = long_token_lists(asked.tokens, "tokens")
    if lists is not None and len(lists) == 1:
        return asked.model or "", lists[0]
    return asked.model or "", decode_field(_TOKEN_IDS, asked.tokens, "tokens")


def _tokenizer_info(model: Model) -> dict[str, object]:
    """Return the model's tokenizer as tokenizer_config.json describes it."""
    description = model.description
    tokens = special_tokens(description)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": description.max_model_len,
        "add_bos_token": description.add_bos,
        "chat_template": description.chat_template or None,
        **{name: tokens.get(name) for name in _SPECIAL_TOKENS},
    }


def _tokens_answer(model: Model, ids: Sequence[int], wants_strings: bool) -> bytes:
    texts = [model.tokenizer.id_to_token(i) or "" for i in ids] if wants_strings else None
    return msgspec.json.encode(
        {
            "count": len(ids),
            "max_model_len": model.description.max_model_len,
            "tokens": list(ids),
            "token_strs": texts,
        }
    )
