"""The limits of grammars, and a process that checks whether a grammar can be compiled.

A malicious schema may exhaust the stack or the memory of the process that compiles it. So a new
grammar is first compiled by a separate process, `python -m ullage_engine.protocol.grammar`. The
process reads the grammar from its standard input and writes the reason why the grammar cannot be
used, or nothing.
"""

import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""Resource limits for the grammar of one answer.

Lexer states take 1 to 2 kB each and are made while text is matched, so their number bounds the
memory. Fuel and items bound the time to about 20 ms at first, and then to 15 ms per token.
"""

COMPILE_STACK_BYTES = 64 << 20
"""Stack size of a worker's compiler thread, many times the size for the first compilation."""

_FIRST_STACK_BYTES = 4 << 20
"""Stack size for the first compilation."""
_MOST_BYTES = 24 << 20
"""Maximum memory in bytes that a grammar may use before it has matched anything."""
_HARD_BYTES = 2 << 30
"""Maximum bytes of address space. A process that needs more is killed."""
_CPU_SECONDS = 3
"""Maximum CPU time of the process, in seconds."""


def compile_error(text: str) -> str:
    """Return why a grammar in llguidance's form cannot be used, or "" if it can."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    return " ".join(messages[0].split())[:300] if is_error else ""


def _cost_error(text: str) -> str:
    """Return why a grammar cannot be used with a vocabulary of single bytes, or "" if it can."""
    before = _peak_bytes()
    matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0, limits=LIMITS)
    matcher.compute_bitmask()
    if matcher.is_error():
        return " ".join(matcher.get_error().split())[:300]
    used = _peak_bytes() - before
    if used > _MOST_BYTES:
        return f"it takes {used >> 20} MiB to compile, and at most {_MOST_BYTES >> 20} are allowed"
    return ""


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> None:
    """Read a grammar from standard input and write the error, if any.

    If the grammar exceeds a resource limit, a signal other than SIGKILL ends the process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_HARD_BYTES, _HARD_BYTES))
    # With an equal hard limit it would end by SIGKILL, which means a shortage of memory.
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 1))
    text = sys.stdin.buffer.read().decode()

    def write_error() -> None:
        sys.stdout.write(compile_error(text) or _cost_error(text))

    threading.stack_size(_FIRST_STACK_BYTES)
    thread = threading.Thread(target=write_error)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
