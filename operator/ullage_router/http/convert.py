"""From an OpenAI body to the GenerateRequest that both protocols share."""

import re
from typing import TypeVar

import msgspec

from ullage.inference.v1 import inference_pb2
from ullage_router.http.conversation import from_conversation, utf8
from ullage_router.http.formats import grammar, logit_bias
from ullage_router.http.schemas import (
    MAX_UINT32,
    ChatRequest,
    Common,
    CompletionRequest,
)
from ullage_router.validate import wrong
from ullage_rpc.errors import ServiceError, invalid
from ullage_rpc.limits import MAX_BEAM_WIDTH

Request = inference_pb2.GenerateRequest
T = TypeVar("T", bound=Common)

# What OpenAI calls deprecated, by what it calls the successor.
SUCCESSORS = {"functions": "tools", "function_call": "tool_choice"}

_AT = re.compile(r"^(?P<what>.*) - at `(?P<key>key in )?\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_CHAT = msgspec.json.Decoder(ChatRequest)
_COMPLETION = msgspec.json.Decoder(CompletionRequest)


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ServiceError INVALID_ARGUMENT that names the field."""
    return _parse(_CHAT, body)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ServiceError INVALID_ARGUMENT that names the field."""
    return _parse(_COMPLETION, body)


def from_chat(chat: ChatRequest) -> Request:
    """The same request in the wire's form."""
    request = _from_common(chat, chat.max_completion_tokens or chat.max_tokens)
    # Set even when empty, so that the check names `messages` and not the missing input.
    request.messages.CopyFrom(from_conversation(chat))
    if chat.top_logprobs and not chat.logprobs:
        raise wrong("top_logprobs", chat.top_logprobs, "0, or any up to 20 with logprobs: true")
    if chat.logprobs:
        request.output.top_logprobs = chat.top_logprobs or 0
    request.output.echo = bool(chat.echo)
    return request


def from_completion(completion: CompletionRequest) -> Request:
    """The same request in the wire's form."""
    _check_no_chat(completion)
    request = _from_common(completion, completion.max_tokens)
    _set_prompt(request, completion.prompt)
    if completion.logprobs is not None:
        if completion.echo:
            raise wrong("logprobs", completion.logprobs, "null together with echo")
        request.output.top_logprobs = completion.logprobs
    request.output.echo = bool(completion.echo)
    return request


def _check_no_chat(completion: CompletionRequest) -> None:
    for name in ("chat_template_kwargs", "reasoning_effort"):
        if getattr(completion, name):
            raise invalid(name, f"{name} is for chats; leave it out or use /v1/chat/completions")


def _parse(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        parsed = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from error
    except UnicodeDecodeError as error:
        raise invalid("body", "body: the JSON is not valid UTF-8; encode it as UTF-8") from error
    except msgspec.DecodeError as error:
        raise invalid("body", f"body: {error}; send one JSON object") from error
    except RecursionError as error:
        raise invalid("body", "body: the JSON is nested too deeply; flatten it") from error
    if refused := parsed.refused():
        name, value = refused
        remedy = f"send {SUCCESSORS[name]}" if name in SUCCESSORS else "leave it out"
        raise invalid(name, f"{name} is {_short(value)}, which is not supported; {remedy}")
    return parsed


def _validation_error(text: str) -> ServiceError:
    if match := _AT.match(text):
        field = match["path"] or "body"
        return invalid(field, f"{field}: {_lower(match['what'])}")
    if match := _MISSING.search(text):
        return invalid(match["name"], f"{match['name']} is missing; it is required")
    return invalid("body", f"body: {_lower(text)}")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:57] + "..."


def _from_common(common: Common, max_tokens: int | None) -> Request:
    sampling = inference_pb2.SamplingParams(
        temperature=common.temperature,
        top_p=common.top_p,
        # vLLM says -1 for all.
        top_k=None if common.top_k is None else min(max(common.top_k, 0), MAX_UINT32),
        min_p=common.min_p,
        repetition_penalty=common.repetition_penalty,
        presence_penalty=common.presence_penalty,
        frequency_penalty=common.frequency_penalty,
        # OpenAI's seeds are signed, the wire's are not.
        seed=None if common.seed is None else common.seed % (1 << 64),
        logit_bias=logit_bias(common),
    )
    stop = inference_pb2.StopConditions(
        max_tokens=None if max_tokens is None else min(max_tokens, MAX_UINT32),
        stop_token_ids=common.stop_token_ids or (),
        ignore_eos=bool(common.ignore_eos),
        min_tokens=common.min_tokens or 0,
    )
    texts = [common.stop] if isinstance(common.stop, str) else common.stop or []
    stop.stop_strings.extend(utf8("stop", text) for text in texts)
    output = inference_pb2.OutputOptions(return_token_ids=bool(common.return_token_ids))
    return Request(
        model=utf8("model", common.model),
        session_id=utf8("session_id", common.session_id or ""),
        sampling=sampling,
        stop=stop,
        output=output,
        samples=_samples(common),
        grammar=grammar(common),
    )


def _samples(common: Common) -> inference_pb2.Samples | None:
    """None: one answer."""
    if common.use_beam_search:
        return _beam_search(common)
    if common.length_penalty not in (None, 1.0):
        wanted = "1, or another with use_beam_search: true"
        raise wrong("length_penalty", common.length_penalty, wanted)
    if common.n is None and common.best_of is None:
        return None
    if common.stream and (common.best_of or 1) > (common.n or 1):
        raise wrong("best_of", common.best_of, f"{common.n or 1} with stream, more without")
    return inference_pb2.Samples(n=common.n, best_of=common.best_of)


def _beam_search(common: Common) -> inference_pb2.Samples:
    n = common.n or 1
    name, width = ("n", n) if common.best_of is None else ("best_of", common.best_of)
    if not n <= width <= MAX_BEAM_WIDTH:
        least = 1 if name == "n" else min(n, MAX_BEAM_WIDTH)
        raise wrong(name, width, f"{least} to {MAX_BEAM_WIDTH} with use_beam_search")
    if common.stream:
        raise wrong("stream", True, "false with use_beam_search, whose end decides its beginning")
    beam = inference_pb2.BeamSearch(width=width, length_penalty=common.length_penalty)
    return inference_pb2.Samples(n=n, beam=beam)


def _set_prompt(request: Request, prompt: str | list[str | int | list[int]]) -> None:
    """One prompt: a text, token ids, or a list of one of these."""
    if isinstance(prompt, str):
        request.text = utf8("prompt", prompt)
        return
    if all(isinstance(item, int) for item in prompt):
        _set_tokens(request, prompt)
        return
    if len(prompt) > 1:
        raise wrong("prompt", f"a list of {len(prompt)} prompts", "one prompt a request")
    only = prompt[0]
    if isinstance(only, list):
        _set_tokens(request, only)
    else:
        request.text = utf8("prompt", str(only))


def _set_tokens(request: Request, ids: list[int] | list[str | int | list[int]]) -> None:
    request.token_ids.SetInParent()
    request.token_ids.ids.extend(token for token in ids if isinstance(token, int))
