"""From text to token ids, once a request, with the tokenizer that the engines publish."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from tokenizers import Tokenizer

from ullage.inference.v1 import inference_pb2
from ullage_router.segments import SegmentEncoder
from ullage_rpc.chat import ChatTemplate, ChatTemplateError
from ullage_rpc.heap import give_back_heap, settle_heap
from ullage_rpc.tool_formats import ToolFormat, Turn

# Encoding this many characters takes about a millisecond; longer texts leave the event loop.
INLINE_CHARACTERS = 4096
TOKENIZER_THREADS = 2

T = TypeVar("T")


class PromptError(Exception):
    """The prompt cannot become tokens; the message is one line."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the router knows of the served model."""

    name: str
    fingerprint: str
    """The same for engines whose token ids mean the same."""
    tokenizer: Tokenizer
    encoder: SegmentEncoder
    template: ChatTemplate | None
    add_bos: str
    """Text that precedes raw prompts; empty for none."""
    vocab_size: int
    bytes_per_token: int
    """The most that one token can stand for; 0 when the tokenizer does not let one say."""
    description: inference_pb2.GetModelResponse

    @property
    def tool_format(self) -> ToolFormat:
        """How it writes calls."""
        return self.template.tool_format if self.template else ToolFormat.PLAIN

    def render(
        self,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str = "",
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: turns, oldest first.
            tools: functions that the model may call, as OpenAI has them.
            opening: text that the assistant's turn begins with.
            arguments: variables of the template.

        Raises:
            PromptError: the model has no chat template or its template refuses the messages.
        """
        if self.template is None:
            raise PromptError("the model has no chat template; use /v1/completions")
        try:
            text = self.template.render(messages, tools=tools, arguments=arguments)
        except ChatTemplateError as error:
            raise PromptError(str(error)) from error
        return self.encoder.encode(text + opening)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text."""
        return self.encoder.encode(self.add_bos + text)

    def fewest_tokens(self, text: str) -> int:
        """A bound from below that costs no tokenising."""
        return len(text.encode()) // self.bytes_per_token if self.bytes_per_token else 0

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def fingerprint(response: inference_pb2.GetModelResponse) -> str:
    """Identifies what turns text into token ids."""
    digest = hashlib.sha256(response.tokenizer_json)
    for part in (response.chat_template, response.bos_token, response.eos_token):
        digest.update(b"\0" + part.encode())
    digest.update(bytes([response.add_bos]))
    return digest.hexdigest()[:16]


def load_model(response: inference_pb2.GetModelResponse) -> Model:
    """Builds the tokenizer; takes up to a second for a large vocabulary.

    Raises:
        ValueError: the tokenizer or the chat template is not valid.
    """
    try:
        tokenizer = Tokenizer.from_buffer(response.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        template = (
            ChatTemplate(response.chat_template, response.bos_token, response.eos_token)
            if response.chat_template
            else None
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"model {response.model}: tokenizer: {error}") from error
    model = Model(
        name=response.model,
        fingerprint=fingerprint(response),
        tokenizer=tokenizer,
        encoder=SegmentEncoder(tokenizer),
        template=template,
        add_bos=response.bos_token if response.add_bos else "",
        vocab_size=response.vocab_size or tokenizer.get_vocab_size(),
        bytes_per_token=_bytes_per_token(tokenizer),
        description=response,
    )
    give_back_heap()  # parsing took as much again
    settle_heap()
    return model


def _bytes_per_token(tokenizer: Tokenizer) -> int:
    """The longest entry of a byte-level vocabulary; a normalizer could shorten the text first."""
    if tokenizer.normalizer is not None:
        return 0
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=0)


class TokenizerThreads:
    """Keeps long texts off the event loop; the tokenizer releases the interpreter's lock."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def run(self, num_characters: int, work: Callable[[], T]) -> T:
        """The result of `work`, made here when it is short."""
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
