"""The bodies of OpenAI's chat and completion requests, as typed structures.

Unknown fields are ignored, as in other OpenAI-compatible servers. Known fields that would change
the meaning of the answer are refused by name if the service does not support them.
"""

from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ullage_common.wire.limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_CALLS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPT_TOKENS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOOLS,
)
from ullage_router.http.openai.custom_tools import DefinedCustom

MAX_UINT32 = (1 << 32) - 1
MAX_FIELD_BYTES = 64 << 10
"""Maximum size of a field's JSON in bytes, unless the field is a grammar or an input."""
MAX_GRAMMAR_FIELD_BYTES = 8 * MAX_GRAMMAR_BYTES
"""Maximum bytes of a grammar's JSON, which allows for escapes of six bytes per character."""
INPUT_FIELDS = frozenset({"messages", "tools", "prompt", "input", "instructions", "system"})
"""Fields that may be larger than MAX_FIELD_BYTES.

Some of them have separate limits. The others are limited only by the maximum size of the body.
"""
GRAMMAR_FIELDS = frozenset({"response_format", "structured_outputs", "text", "output_config"})
NULL = msgspec.Raw(b"null")

_USUAL: tuple[object, ...] = (False, [], {})
_SWITCHES = frozenset({"spaces_between_special_tokens"})
"""Boolean fields whose default is true, so that false has an effect."""

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_UINT32)]
Count0 = Annotated[int, msgspec.Meta(ge=0)]
Token = Annotated[int, msgspec.Meta(ge=0, le=MAX_UINT32)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Choice = Annotated[list[str], msgspec.Meta(max_length=MAX_GRAMMAR_BYTES // 2)]
"""A list of texts. The model must answer with one of them.

The length of the list is limited, because each text adds at least two bytes to the grammar, whose
size is limited.
"""
TruncatePromptTokens = Annotated[int, msgspec.Meta(ge=-1, le=MAX_PROMPT_TOKENS)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
Tokens = Annotated[list[Token], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
Prompt = str | Annotated[list[str | Token | Tokens], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]


def unread() -> Any:
    """Define a field whose JSON is decoded later. The field is null if it is not in the body.

    The null comes from a default factory, because msgspec would copy a plain default to the type's
    JSON schema, which cannot express raw JSON.
    """
    return msgspec.field(default_factory=lambda: NULL)


class StreamOptions(msgspec.Struct, frozen=True):
    """Options for a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far. It has an effect only with `include_usage`."""


class FileReference(msgspec.Struct, frozen=True):
    """A file whose text takes the place of the part that names the file."""

    file_id: str | None = None
    file_data: str | None = None
    """The content of the file. This is refused: files have to be uploaded first."""
    filename: str | None = None
    """This field has no effect."""


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    file: FileReference | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A function call by the model, with the arguments as JSON."""

    name: str
    arguments: str = ""


class CustomCall(msgspec.Struct, frozen=True):
    """A custom tool call by the model, with the input as text."""

    name: str
    input: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an assistant message."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str = ""
    type: str = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """A message of a conversation."""

    role: str
    content: str | Annotated[list[ContentPart], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same as `reasoning`, which takes precedence."""
    function_call: msgspec.Raw = unread()
    audio: msgspec.Raw = unread()


class NamedFunction(msgspec.Struct, frozen=True):
    """The function that the model must call."""

    name: str


class AllowedTool(msgspec.Struct, frozen=True):
    """A tool that the model may call."""

    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    """The tools to which a request restricts the model."""

    tools: Annotated[list[AllowedTool], msgspec.Meta(max_length=MAX_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class NamedTool(msgspec.Struct, frozen=True):
    """A tool that the model must call, or the tools that it may call."""

    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class DefinedFunction(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    """JSON Schema of the arguments, which must describe an object."""


class ToolDefinition(msgspec.Struct, frozen=True):
    """A tool that the model may call. `prompts/tools/toolbox.py` checks the definition."""

    type: Literal["function", "custom"]
    function: DefinedFunction | None = None
    custom: DefinedCustom | None = None
    """A tool whose input is free text."""


class JsonSchema(msgspec.Struct, frozen=True):
    """A JSON Schema that the answer must follow."""

    name: str
    schema: msgspec.Raw = unread()
    strict: bool | None = None
    """This field has no effect, because answers always follow the schema."""


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's `response_format`, which constrains the answer."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """Constraints on the answer in vLLM's format."""

    json: msgspec.Raw = unread()
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    """A grammar in llguidance's dialect of Lark."""
    structural_tag: str | dict[str, object] | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    disable_any_whitespace: bool | None = None
    """This field has no effect, because JSON is always compact."""


class Refusing(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of bodies with some fields that the service does not support."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {}
    """The unsupported fields, with the values that have no effect."""

    @classmethod
    def neutral_values(cls, name: str) -> tuple[object, ...]:
        """Return all values of the field that have no effect and are therefore accepted."""
        return cls.NEUTRAL[name]

    def refused(self) -> tuple[str, object] | None:
        """Return the first field that requests an unsupported feature, with its value.

        Return None if there is no such field.
        """
        for name, neutral in self.NEUTRAL.items():
            if (value := getattr(self, name)) not in neutral:
                return name, value
        return None


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that would change the answer but are not supported by the service."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "suffix": ("",),
        "function_call": ("none", "auto"),
        "spaces_between_special_tokens": (True,),
        "modalities": (["text"],),
        "truncation_side": ("left",),
    }
    """Values, by field, that have no effect and are therefore accepted, in addition to null.

    False and empty values have no effect either, unless the field is one of `_SWITCHES`.
    """

    suffix: object = None
    functions: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    function_call: object = None
    modalities: object = None
    audio: object = None
    prediction: object = None
    web_search_options: object = None
    spaces_between_special_tokens: object = None
    chat_template: object = None
    documents: object = None
    prompt_embeds: object = None
    truncation_side: object = None
    """The side that `truncate_prompt_tokens` cuts off. Only the beginning is ever cut off."""
    thinking_token_budget: object = None
    logprob_token_ids: object = None
    repetition_detection: object = None
    watermarking: object = None
    early_stopping: object = None
    vllm_xargs: object = None

    @classmethod
    def neutral_values(cls, name: str) -> tuple[object, ...]:
        """Return all values of the field that have no effect and are therefore accepted."""
        usual = () if name in _SWITCHES else _USUAL
        return (None, *usual, *cls.NEUTRAL.get(name, ()))

    def refused(self) -> tuple[str, object] | None:
        """Return the first unsupported field that has an effect, with its value.

        Return None if there is no such field.
        """
        if _unsupported(self) == _NOTHING:
            return None
        for name in Unsupported.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not self._is_neutral(name, value):
                return name, value
        return None

    def _is_neutral(self, name: str, value: object) -> bool:
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            for neutral in self.neutral_values(name)
        )


_unsupported = attrgetter(*Unsupported.__struct_fields__)
_NOTHING = (None,) * len(Unsupported.__struct_fields__)


class Common(Unsupported, frozen=True, kw_only=True):
    """The fields that chat and completion requests share. Null means the default.

    With vLLM's `use_beam_search`, `best_of` (or `n` if `best_of` is absent) is the beam width.
    """

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: AtLeastOne | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Seed | None = None
    prompt_logprobs: TopLogprobs | None = None
    """Number of alternatives to report for each token of the prompt. 0 reports the tokens only."""
    stop: str | Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Token], msgspec.Meta(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_UINT32)] | None = None
    allowed_token_ids: (
        Annotated[list[Token], msgspec.Meta(max_length=MAX_ALLOWED_TOKENS)] | None
    ) = None
    """The only tokens that may be chosen."""
    bad_words: Annotated[list[str], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    """Words whose last token is not chosen behind their other tokens."""
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether logprobs name tokens as `token_id:5` instead of by their text."""
    truncate_prompt_tokens: TruncatePromptTokens | None = None
    """Number of the prompt's last tokens to keep, or -1 for as many as fit the context."""
    add_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n: Count | None = None
    best_of: Count | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    session_id: str | None = None
    """Id of the session. The header x-session-id takes precedence."""
    prompt_cache_key: str | None = None
    """Requests with the same key go to the engine that has their prefix in its cache."""
    cache_salt: str | None = None
    """Requests share cached KV only with requests of the same tenant that have the same salt."""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class ChatRequest(Common, frozen=True, kw_only=True):
    """The body of a POST request to /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)]
    tools: msgspec.Raw = unread()
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Whether the answer continues the last message instead of being a new one."""
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    """Whether the answer has the model's reasoning. By default it has."""


class CompletionRequest(Common, frozen=True, kw_only=True):
    """The body of a POST request to /v1/completions."""

    prompt: msgspec.Raw
    """The prompt as undecoded JSON of type `Prompt`."""
    max_tokens: Count0 | None = None
    """Maximum number of output tokens, or 0 with `echo` for the prompt alone."""
    logprobs: TopLogprobs | None = None
    echo: bool | None = None


def max_field_bytes(name: str) -> int | None:
    """Return the maximum size of a field's JSON in bytes, or None if it is not limited."""
    if name in INPUT_FIELDS:
        return None
    return MAX_GRAMMAR_FIELD_BYTES if name in GRAMMAR_FIELDS else MAX_FIELD_BYTES
