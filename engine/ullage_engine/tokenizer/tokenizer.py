"""The model's tokenizer, from a tokenizer.json or rebuilt from a GGUF file's metadata.

Text becomes token ids in two ways: raw text gets a leading beginning-of-sequence token when the
model wants one, a rendered chat template does not, because it writes that token itself.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from ullage_engine.tokenizer.gguf import (
    GgufError,
    UnsupportedTokenizer,
    Value,
    build_tokenizer,
    read_metadata,
)

Json = Mapping[str, object]


class TokenizerError(Exception):
    """The model's tokenizer cannot be used; one line naming the file and what to do."""


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer and what the model's files say about its use."""

    tokenizer: Tokenizer
    json_bytes: bytes
    """Contents of a tokenizer.json."""
    chat_template: str
    """Jinja source; empty when the model has none."""
    bos_token: str
    eos_token: str
    eos_token_ids: tuple[int, ...]
    """Tokens that end generation."""
    add_bos: bool
    """Whether raw text starts with `bos_token`."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of raw prompt text."""
        return self._bos_ids() + self.encode_rendered(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat template: exactly the text, special tokens in it recognised."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_whole(self, text: str) -> list[int]:
        """Ids of text with the special tokens that the tokenizer itself puts around it, which
        models for embeddings are trained with."""
        return self.tokenizer.encode(text).ids

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text of the tokens, special tokens left out."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def _bos_ids(self) -> list[int]:
        bos = self.tokenizer.token_to_id(self.bos_token) if self.add_bos else None
        return [] if bos is None else [bos]


def load_tokenizer(path: Path) -> ModelTokenizer:
    """Reads the tokenizer of a model directory or of a GGUF file.

    Raises:
        TokenizerError: a file is missing, broken, or of a kind that is not supported.
    """
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> ModelTokenizer:
    try:
        metadata = read_metadata(path)
        tokenizer = build_tokenizer(metadata)
    except GgufError as error:
        raise TokenizerError(str(error)) from error
    except UnsupportedTokenizer as error:
        raise TokenizerError(f"{path}: {error}") from error
    eos_ids = _gguf_ids(metadata, "eos", "eot", "eom")
    return ModelTokenizer(
        tokenizer=tokenizer,
        json_bytes=tokenizer.to_str().encode(),
        chat_template=str(metadata.get("tokenizer.chat_template", "")),
        bos_token=_token_text(tokenizer, _gguf_ids(metadata, "bos")),
        eos_token=_token_text(tokenizer, eos_ids),
        eos_token_ids=eos_ids,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _gguf_ids(metadata: Mapping[str, Value], *names: str) -> tuple[int, ...]:
    """Ids of special tokens in the order of `names`, each once, absent ones left out."""
    token_ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return tuple(dict.fromkeys(token_id for token_id in token_ids if isinstance(token_id, int)))


def _token_text(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> str:
    return (tokenizer.id_to_token(token_ids[0]) or "") if token_ids else ""


def _from_directory(path: Path) -> ModelTokenizer:
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
    # Files of models for embeddings ask for both, which would change prompts unseen.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    bos, eos = _special(config, "bos_token"), _special(config, "eos_token")
    return ModelTokenizer(
        tokenizer=tokenizer,
        json_bytes=json_bytes,
        chat_template=_chat_template(path, config),
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=_eos_ids(path, tokenizer, eos),
        add_bos=bool(bos) and _adds_first(tokenizer, bos),
    )


def _adds_first(tokenizer: Tokenizer, bos_token: str) -> bool:
    """Whether the tokenizer's own post-processor prepends the token."""
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    return bool(ids) and ids[0] == tokenizer.token_to_id(bos_token)


def _special(config: Json, name: str) -> str:
    """Returns a special token's text from a string, or from an object with the text under
    `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _chat_template(path: Path, config: Json) -> str:
    """The template in its own file, or in the configuration: one, or a list of named ones."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read(file).decode()
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item["name"]: item["template"] for item in value}
        value = named.get("default", "")
    return value if isinstance(value, str) else ""


def _eos_ids(path: Path, tokenizer: Tokenizer, eos_token: str) -> tuple[int, ...]:
    """Reads the end tokens: of generation_config.json, else config.json, else the eos token."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(int(item) for item in value)
    token_id = tokenizer.token_to_id(eos_token) if eos_token else None
    return () if token_id is None else (token_id,)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"{path}: {error.strerror}; the model's directory needs this file"
        ) from error


def _read_json(path: Path) -> Json:
    """Reads a JSON object; empty when the file is absent, for these files are optional."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object; fetch it again")
    return value
