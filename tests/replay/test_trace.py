"""Traces in three formats, and the errors of wrong rows."""

from pathlib import Path

import pytest

from ullage_replay.tokens import TokenSource
from ullage_replay.trace import TraceError, TraceRequest, read_trace


def trace_of(tmp_path: Path, text: str, name: str = "t.jsonl") -> list[TraceRequest]:
    path = tmp_path / name
    path.write_text(text)
    return read_trace(path)


def test_own_rows_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    rows = trace_of(
        tmp_path,
        '{"at": 2, "prompt_tokens": 9, "output_tokens": 3, "session": "s", "priority": -2}\n\n'
        '{"at": 0.5, "prompt_tokens": 40, "output_tokens": 7, "max_tokens": 5, '
        '"prefix": {"id": "p", "tokens": 32}}\n',
    )
    assert rows == [
        TraceRequest(
            at=0.5, prompt_tokens=40, output_tokens=7, max_tokens=5, prefix="p", prefix_tokens=32
        ),
        TraceRequest(at=2.0, prompt_tokens=9, output_tokens=3, session="s", priority=-2),
    ]


def test_mooncakes_rows_begin_at_the_first_timestamp(tmp_path: Path) -> None:
    rows = trace_of(
        tmp_path,
        '{"timestamp": 27000, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}\n'
        '{"timestamp": 27500, "input_length": 600, "output_length": 6, "hash_ids": [3]}\n',
    )
    assert [(row.at, row.prompt_tokens, row.blocks) for row in rows] == [
        (0.0, 700, (3, 4)),
        (0.5, 600, (3,)),
    ]
    first, second = map(TokenSource().prompt, rows[:1] + rows[1:])
    assert (len(first), len(second)) == (700, 600)


def test_mooncakes_first_row_must_be_the_earliest(tmp_path: Path) -> None:
    row = '{"timestamp": %d, "input_length": 7, "output_length": 5, "hash_ids": []}\n'
    rows = trace_of(tmp_path, row % 27000 + row % 29000 + row % 28000)
    assert [each.at for each in rows] == [0.0, 1.0, 2.0]
    with pytest.raises(TraceError, match=":3: timestamp: 26000 is before the first row's; sort"):
        trace_of(tmp_path, row % 27000 + row % 29000 + row % 26000)


def test_unix_times_are_refused(tmp_path: Path) -> None:
    row = '{"at": %d, "prompt_tokens": 1, "output_tokens": 1}\n'
    wanted = ":1: at: 1790000000 is more than a week; write seconds from the beginning of the trace"
    with pytest.raises(TraceError, match=wanted):
        trace_of(tmp_path, row % 1_790_000_000)
    assert trace_of(tmp_path, row % 604_800 + row % 604_801)[1].at == 604_801.0


def test_azures_rows_have_seven_digits_of_a_second(tmp_path: Path) -> None:
    rows = trace_of(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
        "azure.csv",
    )
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109)]
    assert rows[1].at == pytest.approx(4.314579)


def test_a_wrong_row_is_named_by_line_field_value_and_remedy(tmp_path: Path) -> None:
    good = '{"at": 0, "prompt_tokens": 1, "output_tokens": 1}\n'
    own = '{"at": 1, "prompt_tokens": 8, "output_tokens": 1'
    cases = {
        "nonsense\n": ":2: 'nonsense' is not JSON; write",
        "[1]\n": ":2: '[1]' is no object",
        '{"at": -1, "prompt_tokens": 1, "output_tokens": 1}': ":2: at: -1 is no number from 0",
        '{"at": 1, "prompt_tokens": 0, "output_tokens": 1}': ":2: prompt_tokens: 0 is no number",
        '{"at": 1, "prompt_tokens": true, "output_tokens": 1}': ":2: prompt_tokens: True is no",
        '{"at": 1, "prompt_tokens": 1}': ":2: output_tokens: None is no number of tokens",
        own + ', "max_token": 3}': ":2: max_token: 3 is not a field of a trace; leave it out",
        own + ', "session": 7}': ":2: session: 7 is no text; put it in quotes",
        own + ', "priority": 101}': ":2: priority: 101 is no priority; write -100 to 100",
        own + ', "prefix": "p"}': ":2: prefix: 'p' is not understood; write",
        own + ', "prefix": {"id": "p", "tokens": 9}}': ":2: prefix.tokens: 9 exceeds prompt_tokens",
        own + ', "prefix": {"id": "p", "tokens": 9}, "session": "s"}': "leave one of them out",
        '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}': (
            ":2: hash_ids: 2 blocks of 512 tokens exceed input_length 5"
        ),
    }
    wrong = []
    for line, message in cases.items():
        try:
            trace_of(tmp_path, good + line)
        except TraceError as error:
            if message not in str(error):
                wrong.append((line, str(error)))
        else:
            wrong.append((line, "no error"))
    assert not wrong


def test_a_wrong_csv_row_and_an_empty_file_are_named(tmp_path: Path) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    cases = {
        head + "yesterday,1,2\n": ":2: TIMESTAMP: 'yesterday' is no time; write 2023",
        head + "2023-11-16 18:15:46,x,2\n": ":2: ContextTokens: 'x' is no whole number",
        head + "2023-11-16 18:15:46,1\n": ":2: GeneratedTokens: nothing; give the columns",
        "": "no requests; give at least one row",
    }
    for text, message in cases.items():
        with pytest.raises(TraceError) as caught:
            trace_of(tmp_path, text, "azure.csv")
        assert message in str(caught.value)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "missing.jsonl")


def request(**fields: object) -> TraceRequest:
    return TraceRequest(at=0.0, prompt_tokens=40, output_tokens=5, **fields)  # type: ignore[arg-type]


def test_prompts_are_equal_exactly_as_far_as_the_trace_says() -> None:
    source = TokenSource()
    one = source.prompt(request(prefix="p", prefix_tokens=16))
    other = source.prompt(request(prefix="p", prefix_tokens=32))
    alone = source.prompt(request())
    assert one[:16] == other[:16]
    assert not set(one[16:]) & set(other)
    assert not set(alone) & {*one, *other}
    assert [len(each) for each in (one, other, alone)] == [40, 40, 40]


def test_a_sessions_turn_continues_the_turn_before_and_its_answer() -> None:
    source = TokenSource()
    first = request(session="s")
    prompt = source.prompt(first)
    answer = [source.output(first)(position) for position in range(40, 45)]
    later = source.prompt(TraceRequest(at=1.0, prompt_tokens=60, output_tokens=1, session="s"))
    assert later[:45] == prompt + answer
