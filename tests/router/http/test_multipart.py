"""Forms, in any pieces."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ullage_common.wire.errors import ServiceError
from ullage_router.http.files.multipart import FormParser, PartBegan, boundary_of

BOUNDARY = "xyz"


def encoded(parts: list[tuple[str, str | None, bytes]], boundary: str = BOUNDARY) -> bytes:
    body = b""
    for name, filename, content in parts:
        more = f'; filename="{filename}"' if filename is not None else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
        body += head.encode() + content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


def parsed(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    parser = FormParser(BOUNDARY.encode())
    parts: list[tuple[str, str | None, bytes]] = []
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, PartBegan):
                parts.append((event.name, event.filename, b""))
            else:
                name, filename, content = parts[-1]
                parts[-1] = (name, filename, content + event)
    parser.end()
    return parts


def part_of(parameters: str) -> bytes:
    head = f"--xyz\r\nContent-Disposition: form-data; {parameters}\r\n\r\n"
    return head.encode() + b"x\r\n--xyz--"


Content = st.one_of(
    st.binary(max_size=60),
    # Text that resembles a boundary
    st.lists(st.sampled_from([b"\r\n", b"--", b"-", b"xy", b"\r", b"\n"]), max_size=12).map(
        b"".join
    ),
).filter(lambda content: b"\r\n--xyz" not in b"\r\n" + content)
Name = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=8)


@given(
    st.lists(st.tuples(Name, st.none() | Name, Content), min_size=1, max_size=4),
    st.integers(0, 1 << 32),
)
def test_parts_are_the_same_however_the_body_is_cut(
    parts: list[tuple[str, str | None, bytes]], seed: int
) -> None:
    body = b"a preamble\r\n" * (seed % 2) + encoded(parts)
    generator = random.Random(seed)
    pieces = []
    while body:
        size = generator.randint(1, 9)
        pieces.append(body[:size])
        body = body[size:]
    assert parsed(pieces) == parts


@given(st.binary(max_size=200))
def test_bytes_that_are_no_form_are_refused(body: bytes) -> None:
    with pytest.raises(ServiceError, match="multipart/form-data"):
        parsed([body])


@pytest.mark.parametrize(
    "body",
    [
        encoded([("a", None, b"x")])[:-6],
        b"--xyz\r\nContent-Type: text/plain\r\n\r\nx\r\n--xyz--",
        b"--xyz\r\n" + b"X-Long: " + b"x" * 9000,
        b"--xyzq\r\n",
        encoded([("a", None, b"x")] * 17),
        b'--xyz\r\nContent-Disposition: form-data; name="\xff"\r\n\r\nx\r\n--xyz--',
        part_of("name=file; x=" + ";" * 33),
        part_of('name=file; x="' + ";" * 8000),
        part_of(f"name*{'9' * 5000}=a; name=file"),
        part_of("name=file; filename*=punycode''-" + "b" * 7000),
        part_of("name=file; filename*=idna''" + "b" * 7000),
    ],
)
def test_a_malformed_form_is_refused(body: bytes) -> None:
    with pytest.raises(ServiceError, match="the body is not multipart/form-data"):
        parsed([body])


def test_names_may_have_any_letters() -> None:
    assert parsed([encoded([("file", "Übersicht 1.md", b"x")])])[0][1] == "Übersicht 1.md"
    star = "--xyz\r\ncontent-disposition: form-data; name=file; filename*=UTF-8''%C3%BC.md\r\n\r\n"
    assert parsed([star.encode() + b"x\r\n--xyz--"])[0][1] == "ü.md"


def test_the_boundary_is_read_from_the_content_type() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    for wrong in ("", "application/json", "multipart/mixed; boundary=x"):
        with pytest.raises(ServiceError, match="send multipart/form-data"):
            boundary_of(wrong)
    many = "; x=1" * 33
    for wrong in (
        "multipart/form-data",
        f"multipart/form-data; boundary={'x' * 71}",
        f"multipart/form-data; boundary=x{many}",
        f"multipart/form-data; boundary*{'9' * 5000}=x",
    ):
        with pytest.raises(ServiceError, match=r"boundary|content-type"):
            boundary_of(wrong)
