"""Resource limits for grammars, and a sandbox process that checks whether a grammar compiles.

A malicious schema may exhaust the stack or the memory of the process that compiles it. A new
grammar is therefore first compiled by `python -m ullage_engine.protocol.grammar`, a separate
process. It reads the grammar from standard input. If the grammar is unusable, it writes the reason
to standard output as one line, and then the path to the invalid part of a JSON Schema. Otherwise,
it writes nothing.
"""

import json
import re
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""Resource limits for matching one answer against its grammar.

Lexer states take 1 to 2 kB each and are created as text is matched, so limiting their number limits
memory. The fuel and item limits cap the time at about 20 ms at first, and then at 15 ms per token.
"""

COMPACT: "JsonCompileOptions" = {
    # With flexible white space a model at a high temperature may write nothing else.
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    # Refuse unknown keywords, never ignore them.
    "lenient": False,
    "coerce_one_of": False,
}
"""Options with which JSON Schemas are compiled."""

COMPILE_STACK_BYTES = 64 << 20
"""Stack size of a worker's compiler thread, many times the sandbox process's stack size."""

_FIRST_STACK_BYTES = 4 << 20
"""Stack size for compiling a grammar in the sandbox process."""
_MOST_BYTES = 24 << 20
"""Maximum number of bytes that compiling a grammar may use before any text is matched."""
_HARD_BYTES = 2 << 30
"""Maximum address space of the sandbox process in bytes. Exceeding it kills the process."""
_SPECIAL = re.compile(r"<\|[\w.-]{1,64}\|>")
"""Matches a special token in a grammar, such as `<|message|>`."""
_END = "<|end of the answer|>"
_CPU_SECONDS = 3
"""Maximum CPU time of the sandbox process, in seconds."""
_MAX_SUBSCHEMAS = 256
"""Maximum number of subschemas to compile while searching for the invalid one."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = ("items", "additionalProperties")


def compile_error(text: str) -> str:
    """Return why a grammar in llguidance's format is invalid, or "" if it is valid."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    return " ".join(messages[0].split())[:300] if is_error else ""


def _cost_error(text: str) -> str:
    """Compile a grammar as a test, and return why it fails or takes too much memory.

    Return "" on success. The grammar is compiled for a vocabulary of single bytes.
    """
    vocabulary = _bytes_and(sorted(set(_SPECIAL.findall(text))))
    before = _peak_bytes()
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()
    if matcher.is_error():
        return " ".join(matcher.get_error().split())[:300]
    used = _peak_bytes() - before
    if used > _MOST_BYTES:
        return f"it takes {used >> 20} MiB to compile, and at most {_MOST_BYTES >> 20} are allowed"
    return ""


def _bytes_and(special: Sequence[str]) -> LLTokenizer:
    """Return a vocabulary of single bytes, and of the special tokens that a grammar names.

    A worker's vocabulary shows later which of them the model has.
    """
    if not special:
        return LLTokenizer("byte")
    # Few grammars need it, and each is compiled in a process of its own.
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: i for i, letter in enumerate(sorted(letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END, *special])
    return LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(_END))


def subschemas(schema: object, path: str = "") -> Iterator[tuple[str, dict[str, object]]]:
    """Yield a schema and all its subschemas with their paths, innermost first."""
    if not isinstance(schema, dict):
        return
    for key in _MAPS:
        inner = schema.get(key)
        for name, part in inner.items() if isinstance(inner, dict) else ():
            yield from subschemas(part, f"{path}.{key}.{name}")
    for key in _LISTS:
        inner = schema.get(key)
        for place, part in enumerate(inner) if isinstance(inner, list) else ():
            yield from subschemas(part, f"{path}.{key}[{place}]")
    for key in _SINGLE:
        yield from subschemas(schema.get(key), f"{path}.{key}")
    yield path, schema


def _path_of(error: str, text: str) -> str:
    """Return the path to the error in a JSON Schema, like `.properties.name`.

    The path leads to the deepest subschema that fails with the same error on its own. It is empty
    if the grammar is no JSON Schema, if the error concerns the whole schema, or if it cannot be
    located.

    Args:
        error: the error of the whole grammar.
        text: the grammar in llguidance's format.
    """
    try:
        schema = json.loads(text)["grammars"][0]["json_schema"]
    except (ValueError, LookupError, TypeError):  # a grammar of another kind
        return ""
    if not isinstance(schema, dict):
        return ""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for _, (path, part) in zip(range(_MAX_SUBSCHEMAS), subschemas(schema), strict=False):
        try:
            grammar = LLMatcher.grammar_from_json_schema(shared | part, overrides=COMPACT)
        except ValueError:
            continue
        if path and compile_error(grammar) == error:
            return path
    return ""


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    """Check a grammar from standard input. If it is unusable, write why and where.

    If the grammar exceeds a resource limit, a signal kills this process. The signal is never
    SIGKILL, which would mean that the machine is short of memory.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_HARD_BYTES, _HARD_BYTES))
    # With an equal hard limit it would end by SIGKILL, which means a shortage of memory.
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 1))
    text = sys.stdin.buffer.read().decode()

    def write_error() -> None:
        if error := compile_error(text):
            # A subschema may kill this process, although the whole schema was refused at once.
            print(error, flush=True)
            sys.stdout.write(_path_of(error, text))
        elif error := _cost_error(text):
            print(error)

    threading.stack_size(_FIRST_STACK_BYTES)
    thread = threading.Thread(target=write_error)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
