"""A model's vocabulary for matching grammars, which forked workers inherit from the fork server.

Building a vocabulary takes about a second of CPU time. The fork server builds it once, after a
worker has matched the first answer, so that requests with grammars resume as fast as others.
"""

from llguidance import LLTokenizer

from ullage_common.process.memory import trim_heap
from ullage_engine.model_loader.source import resolve_source
from ullage_engine.protocol.errors import WeightsError
from ullage_engine.tokenizer.tokenizer import TokenizerError, load_tokenizer
from ullage_engine.worker.grammar import GrammarError, vocabulary

_inherited: dict[tuple[str, int], LLTokenizer] = {}
"""Vocabularies that this process or its fork server has built, by model source and size."""


def vocabulary_of(source: str, vocab_size: int) -> LLTokenizer:
    """Return a model's vocabulary, which is built unless this process has inherited it.

    Args:
        source: the model's source, as configured.
        vocab_size: number of tokens for which the model computes logits.

    Raises:
        GrammarError: the model does not support grammars.
    """
    inherited = _inherited.get((source, vocab_size))
    if inherited is not None:
        return inherited
    try:
        return vocabulary(load_tokenizer(resolve_source(source).path), vocab_size)
    except (TokenizerError, WeightsError) as error:
        raise GrammarError(str(error)) from error


def keep_vocabulary(source: str, vocab_size: int) -> None:
    """Build a model's vocabulary for all processes that this one forks from now on.

    For the arguments and errors, see `vocabulary_of`.
    """
    _inherited[source, vocab_size] = vocabulary_of(source, vocab_size)
    # The tokenizer is freed by now, and a heap keeps freed memory.
    trim_heap()
