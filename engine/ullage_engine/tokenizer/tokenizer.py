"""The model's tokenizer, from a tokenizer.json or rebuilt from a GGUF file's metadata.

The model's files also define special tokens, chat templates and sampling parameters. Special tokens
such as BOS are added around raw prompt text, but not around a rendered chat template, which already
contains them.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from ullage_common.chat.affixes import Affixes, affixes_of
from ullage_engine.tokenizer.generation import (
    GenerationError,
    SamplingDefaults,
    gguf_sampling_defaults,
    sampling_defaults,
)
from ullage_engine.tokenizer.gguf import UnsupportedTokenizer, build_tokenizer
from ullage_engine.tokenizer.gguf_file import GgufError, Value, read_metadata
from ullage_engine.tokenizer.gguf_special_tokens import end_token_ids, special_token_ids

log = logging.getLogger("ullage.engine")

Json = Mapping[str, object]

TEMPLATE_FILE = "chat_template.jinja"
"""File with the default chat template, which overrides those in tokenizer_config.json."""
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder with additional chat templates."""

_NO_PRE = (
    "tokenizer.ggml.pre is missing: text is split as GPT-2 does, and answers are worse if the "
    "model was trained otherwise; convert the model to GGUF again"
)
_NO_DEFAULT = (
    "chat templates %s, but none named default: chats are refused; add chat_template.jinja"
)


class TokenizerError(Exception):
    """Raised if the model's tokenizer cannot be used.

    The message is one line that names the file and the remedy.
    """


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer, together with the settings in the model's files that affect its use."""

    tokenizer: Tokenizer
    json_bytes: bytes
    """The tokenizer, serialised as the contents of a tokenizer.json."""
    chat_template: str
    """Jinja source of the chat template, or an empty string if the model has none."""
    eos_token_ids: tuple[int, ...]
    """Ids of the tokens that end generation."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Maps special tokens' names in templates, such as `bos_token`, to their text."""
    tool_chat_template: str = ""
    """Jinja source for conversations with tools, or an empty string if `chat_template` is used."""
    chat_adds_bos: bool = False
    """Whether `bos_token` is prepended to rendered conversations that do not begin with it."""
    sampling_defaults: SamplingDefaults = field(default_factory=dict)
    """Sampling parameters for requests that omit them."""

    @property
    def bos_token(self) -> str:
        """Text of the beginning-of-sequence token, or "" if there is none."""
        return self.special_tokens.get("bos_token", "")

    @property
    def eos_token(self) -> str:
        """Text of the end-of-sequence token, or "" if there is none."""
        return self.special_tokens.get("eos_token", "")

    @property
    def add_bos(self) -> bool:
        """Whether `bos_token` is prepended to raw text."""
        return bool(self.bos_token) and self.affixes.prefix == (self._bos_id,)

    @cached_property
    def affixes(self) -> Affixes:
        """Special tokens that are added before and after raw text."""
        return affixes_of(self.tokenizer)

    @property
    def _bos_id(self) -> int | None:
        token_id: int | None = self.tokenizer.token_to_id(self.bos_token)
        return token_id

    def encode_text(self, text: str) -> list[int]:
        """Tokenise raw prompt text, and add special tokens (such as BOS and EOS) if missing."""
        return self.affixes.around(self._encode(text))

    def encode_bare(self, text: str) -> list[int]:
        """Tokenise raw prompt text without adding special tokens."""
        return self._encode(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokenise a rendered chat template, prepending a BOS token if `chat_adds_bos`.

        Special tokens in the text are recognised.
        """
        return self.begin(self._encode(text))

    def begin(self, ids: list[int]) -> list[int]:
        """Return a conversation's token ids, with a BOS token prepended if `chat_adds_bos`.

        No second BOS token is added if the ids already begin with one.
        """
        bos_id = self._bos_id if self.chat_adds_bos else None
        return ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]

    def decode(self, token_ids: list[int]) -> str:
        """Convert token ids to text, skipping special tokens."""
        # Unlike `decode`, this releases the GIL.
        texts: list[str] = self.tokenizer.decode_batch([token_ids], skip_special_tokens=True)
        return texts[0]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def load_tokenizer(path: Path, generation_defaults: bool = False) -> ModelTokenizer:
    """Load the tokenizer from a model directory or a GGUF file.

    Args:
        path: the directory or the file.
        generation_defaults: whether to read the sampling parameters that the files recommend.

    Raises:
        TokenizerError: if a file is missing, corrupt, or of an unsupported type.
    """
    load = _from_directory if path.is_dir() else _from_gguf
    return load(path, generation_defaults)


def _from_gguf(path: Path, generation_defaults: bool) -> ModelTokenizer:
    try:
        metadata = read_metadata(path)
        tokenizer = build_tokenizer(metadata)
        defaults = gguf_sampling_defaults(metadata) if generation_defaults else {}
    except GgufError as error:
        raise TokenizerError(str(error)) from error
    except (UnsupportedTokenizer, GenerationError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if "tokenizer.ggml.pre" not in metadata:
        log.warning("%s: %s", path, _NO_PRE)

    model_tokenizer = ModelTokenizer(
        tokenizer=tokenizer,
        json_bytes=tokenizer.to_str().encode(),
        chat_template=str(metadata.get("tokenizer.chat_template", "")),
        tool_chat_template=str(metadata.get("tokenizer.chat_template.tool_use", "")),
        eos_token_ids=end_token_ids(metadata),
        special_tokens=_gguf_special_tokens(metadata, tokenizer),
        sampling_defaults=defaults,
    )
    # llama.cpp tokenises chats like raw text, and removes a BOS token that is there twice.
    return replace(model_tokenizer, chat_adds_bos=model_tokenizer.add_bos)


def _gguf_special_tokens(metadata: Mapping[str, Value], tokenizer: Tokenizer) -> dict[str, str]:
    texts = {
        name: tokenizer.id_to_token(token_id)
        for name, token_id in special_token_ids(metadata).items()
    }
    return {name: text for name, text in texts.items() if text}


def _from_directory(path: Path, generation_defaults: bool) -> ModelTokenizer:
    source = path / "tokenizer.json"
    if not source.exists():
        raise TokenizerError(
            f"{source}: absent, and other kinds of tokenizers are not read; write it with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    json_bytes = _read(source)
    try:
        tokenizer = Tokenizer.from_str(json_bytes.decode())
    except Exception as error:  # the Rust library raises plain Exception
        raise TokenizerError(f"{source}: not a tokenizer ({error}); fetch it again") from error
    # Files of embedding models ask for both, which would change prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()

    config = _tokenizer_config(path)
    special_tokens = _special_tokens(config)
    chat_template, tool_chat_template = _chat_templates(path, config)
    return ModelTokenizer(
        tokenizer=tokenizer,
        json_bytes=json_bytes,
        chat_template=chat_template,
        tool_chat_template=tool_chat_template,
        eos_token_ids=_eos_ids(path, tokenizer, special_tokens.get("eos_token", "")),
        special_tokens=special_tokens,
        sampling_defaults=_sampling_defaults(path) if generation_defaults else {},
    )


def _tokenizer_config(path: Path) -> Json:
    """Read tokenizer_config.json, taking special_tokens_map.json into account.

    As in transformers, special_tokens_map.json takes precedence unless tokenizer_config.json lists
    added tokens.
    """
    config = _read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return {**config, **_read_json(path / "special_tokens_map.json")}


def _special_tokens(config: Json) -> dict[str, str]:
    """Return special tokens' texts by name.

    The configuration stores each text as a string or as an object with `content`.
    """
    more = config.get("extra_special_tokens")
    texts = {str(k): _text(value) for k, value in more.items()} if isinstance(more, dict) else {}
    texts |= {name: _text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text}


def _text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_templates(path: Path, config: Json) -> tuple[str, str]:
    """Return the chat templates for conversations without tools and with tools.

    They are stored in separate files or in tokenizer_config.json, which may hold one template or
    several named ones. A template that does not exist is returned as an empty string.
    """
    templates = _template_files(path) or _configured_templates(path, config)
    if templates and "default" not in templates:
        log.warning(f"%s: {_NO_DEFAULT}", path, sorted(templates))
        return "", ""
    return templates.get("default", ""), templates.get("tool_use", "")


def _template_files(path: Path) -> dict[str, str]:
    templates = {}
    file = path / TEMPLATE_FILE
    if file.is_file():
        templates["default"] = _read_text(file)
    for file in sorted((path / TEMPLATE_FOLDER).glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    return templates


def _configured_templates(path: Path, config: Json) -> dict[str, str]:
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        # A list of objects, as it is written, or a mapping.
        pairs = value.items() if isinstance(value, dict) else map(_named_template, value)  # type: ignore[call-overload]
        templates = dict(pairs)
    except (TypeError, KeyError) as error:
        raise _odd_template(path) from error
    if not all(isinstance(text, str) for text in templates.values()):
        raise _odd_template(path)
    return templates


def _named_template(item: Mapping[str, str]) -> tuple[str, str]:
    return item["name"], item["template"]


def _odd_template(path: Path) -> TokenizerError:
    return TokenizerError(
        f"{path / 'tokenizer_config.json'}: chat_template is neither a text nor a list of objects "
        "with name and template; fetch it again"
    )


def _eos_ids(path: Path, tokenizer: Tokenizer, eos_token: str) -> tuple[int, ...]:
    """Return the ids of all end tokens in generation_config.json, config.json and the tokenizer."""
    token_ids = list[int]()
    for name in ("generation_config.json", "config.json"):
        values = _read_json(path / name)
        token_ids += _token_ids(path / name, values.get("eos_token_id"))
        # Multimodal models have a section for text.
        section = values.get("text_config")
        if isinstance(section, dict):
            token_ids += _token_ids(path / name, section.get("eos_token_id"))
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    return _each_once([*token_ids, *([] if own is None else [own])])


def _token_ids(path: Path, value: object) -> list[int]:
    """Return the token ids given by `eos_token_id`, which may be null, an id or a list of ids."""
    token_ids = list[int]()
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise TokenizerError(
                f"{path}: eos_token_id is {value!r}, neither a token id nor a list of them; "
                "fetch it again"
            )
        token_ids.append(item)
    return token_ids


def _each_once(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_ids))


def _sampling_defaults(path: Path) -> SamplingDefaults:
    source = path / "generation_config.json"
    try:
        return sampling_defaults(_read_json(source))
    except GenerationError as error:
        raise TokenizerError(f"{source}: {error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"{path}: {error.strerror}; the model's directory needs this file"
        ) from error


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not UTF-8 ({error}); fetch it again") from error


def _read_json(path: Path) -> Json:
    """Read a JSON object from an optional file. Return an empty object if the file is missing."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object; fetch it again")
    return value
