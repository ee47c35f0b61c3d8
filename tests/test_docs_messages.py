"""Messages of programs that the documentation quotes are messages of the code."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
UPGRADING = DOCS / "guide" / "upgrading.md"
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((DOCS / "guide").glob("*.md"))]
PAGES += [*sorted((DOCS / "reference").glob("*.md")), *sorted((DOCS / "runbooks").glob("*.md"))]

BLOCK = re.compile(r"^[ \t]*```.*?^[ \t]*```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
MESSAGE = re.compile(r"[A-Za-z][\w '.,:;…-]*")
"""Code that has words and punctuation only."""

COMMANDS = re.compile(
    r"(buildah|cp|curl|docker|from|git|helm|hf|kubectl|make|nvidia-smi|pip|python|scripts|skopeo"
    r"|source|ullage|vllm)\b"
)
ENDS = re.compile(r"[:;…] ?|…")
"""Ends of the parts of a message, between which are values."""

WORD = re.compile(r"(?:[a-z'-]+|[A-Z]\w*),?")
PAST = {(UPGRADING, "prompt loaded from tiers")}
OF_OTHERS = {
    "CUDA out of memory",
    "Hostname Verification Check failed",
    "compute-sanitizer python -m pytest",
    "etcd-server containerd runc containernetworking-plugins kubernetes-client iptables iproute2",
}
"""Beginnings of messages of PyTorch and OpenSSL, and of other commands."""


def messages(page: Path) -> list[str]:
    """Return the code of a page that looks like a message."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    spans = [span for span in SPAN.findall(text) if MESSAGE.fullmatch(span)]
    return [
        span
        for span in spans
        if not COMMANDS.match(span)
        and not any(span.startswith(other) for other in OF_OTHERS)
        and (page, span) not in PAST
    ]


def parts(message: str) -> list[str]:
    """Return the parts of a message without values, that is of three plain words or more."""
    split = [part.strip(" .,") for part in ENDS.split(message)]
    return [
        part for part in split if len(part.split()) >= 3 and all(map(WORD.fullmatch, part.split()))
    ]


def written() -> str:
    """Return the sources, with the literals that stand in several lines joined."""
    folders = ("operator", "engine", "proto", "benchmarks", "crds")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files = [path for path in files if path.suffix in {".py", ".yaml"} and path.is_file()]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", text)).lower()


def test_every_message_that_a_page_quotes_is_in_the_code() -> None:
    sources = written()
    quoted = [(page, part) for page in PAGES for each in messages(page) for part in parts(each)]
    assert len(quoted) > 20
    wrong = [
        f"{page.relative_to(ROOT)}: {part}" for page, part in quoted if part.lower() not in sources
    ]
    assert not wrong, "\n".join(wrong)


def test_a_message_is_read_without_its_values() -> None:
    assert parts("the leader has the files …, and that one …") == [
        "the leader has the files",
        "and that one",
    ]
    assert parts("temperature is 2.5; possible: from 0 to 2") == []
