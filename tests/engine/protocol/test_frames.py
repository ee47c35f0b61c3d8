"""Messages on a stream: whole and in order however they are cut, and a peer that goes or stalls."""

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_engine.protocol.frames import BlockingLink, Frames, connect, framed


@given(st.lists(st.binary(max_size=40)), st.integers(1, 60))
def test_messages_come_whole_and_in_order_however_the_stream_is_cut(
    messages: list[bytes], piece: int
) -> None:
    stream = b"".join(map(framed, messages))
    frames = Frames()
    fed = [frames.feed(stream[i : i + piece]) for i in range(0, len(stream), piece)]
    assert [message for each in fed for message in each] == messages


def test_all_that_a_process_sent_before_it_went_is_received(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sender = connect(path, 1.0)
        receiver = BlockingLink(listener.accept()[0], 1.0)
    assert receiver.receive(0.0) is None
    sent = [b"", b"x" * 100_000, b"last"]
    for message in sent:
        sender.send(message)
    receiver.send(b"never read")
    sender.close()
    assert [receiver.receive(1.0) for _ in sent] == sent
    with pytest.raises(OSError):
        receiver.receive(1.0)
    with pytest.raises(OSError):
        receiver.send(b"to nobody")
    receiver.close()
    with pytest.raises(OSError):
        connect(path, 1.0)


def test_a_message_to_a_process_that_reads_nothing_fails() -> None:
    own, other = socket.socketpair()
    link = BlockingLink(own, 0.01)
    with other, pytest.raises(OSError):
        while True:
            link.send(b"x" * 100_000)
    link.close()
