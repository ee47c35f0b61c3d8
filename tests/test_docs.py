"""The documentation names only what exists: links, headings, and paths of files in backticks."""

import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import yaml
from benchmarks.__main__ import BENCHMARKS

from ullage_common.config.engine import EngineConfig

ROOT = Path(__file__).resolve().parents[1]
HIDDEN = {"node_modules", "dist", "__pycache__"}
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
PAGES += sorted((ROOT / "charts").rglob("*.md"))
PAGES += [ROOT / "engine" / "ullage_kv" / "README.md", ROOT / "newsfragments" / "README.md"]

LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = re.compile(r"`([A-Za-z0-9_][\w./-]*/[\w.-]+\.(?:py|md|sh|toml|tpl))`")
"""A file in backticks, with at least one folder before it."""

PLACEHOLDER = re.compile(r"wheels/|dist/|NAME")
FIELD = re.compile(r"`((?:[a-z][A-Za-z]*)(?:\.[A-Za-z]+)+)`")
OTHER_NAMES = {"tls.crt", "tls.key", "image.repository", "image.pullPolicy"}
OTHER_NAMES |= {"tenants.keys.problems", "status.storedVersions"}
OTHER_NAMES |= {"model.safetensors", "model.safetensors.index.json", "memory.events"}
"""Files, values of the chart, parts of /stats and of the definition, which look like fields."""

CODE = re.compile(r"`[^`\n]+`|^```yaml.*?^```", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"\b([A-Za-z]+): \"?(\w+)")
WORD = re.compile(r"`(\w+)`")
QUEUE = ROOT / "docs" / "guide" / "gpu-queue.md"
PROGRAMME = ROOT / "benchmarks" / "gpu" / "programme.py"
OF_ENGINES = [QUEUE, ROOT / "docs" / "reference" / "model-keys.md"]
"""Pages about engines' own files, whose values are in lower case."""

OTHER_SETTINGS = {("strategy", "None"), ("strategy", "Webhook")}
"""How a definition's versions are converted."""

OTHER_WORDS = {"auto", "none", "error", "info", "debug", "bfloat16", "cuda", "ullage"}
OTHER_WORDS |= {"large", "queue", "route", "reject", "true", "false", "in", "vllm", "native"}
OTHER_WORDS |= {"local"}
"""Values in small letters that are also words of requests, headers, logs and engines' files."""

LOOKS = re.compile(
    r"kubectl (--namespace \S+ )?(get|describe|logs|port-forward|auth can-i|exec POD -- nvidia-smi)"
    r"|curl -s |ullage (trace|top) "
)
"""Commands that change nothing."""

MENTIONED = re.compile(r"\b(docs/[\w/-]+\.md)\b")
SOURCES = ["operator", "engine", "proto", "charts", "crds", "docker", "examples", "scripts"]
TEXT = {".py", ".yaml", ".yml", ".proto", ".sh", ".txt", ".tpl"}


@cache
def files() -> frozenset[str]:
    """Every file of the repository, with its path from the root."""
    found = set()
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in HIDDEN]
        found |= {str((Path(folder) / name).relative_to(ROOT)) for name in names}
    return frozenset(found)


def exists(named: str) -> bool:
    """Whether a path is a file, told from the root or from any folder below it."""
    return named in files() or any(path.endswith(f"/{named}") for path in files())


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub makes of a page's headings."""
    titles = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", t) for t in HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_relative_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in LINK.findall(prose(page)):
            if link.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, fragment = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            is_known = target.suffix != ".md" or not fragment or fragment in anchors(target)
            if not target.exists() or not is_known:
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_every_file_that_a_page_names_exists() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {named}"
        for page in PAGES
        for named in NAMED.findall(prose(page))
        if not PLACEHOLDER.search(named) and not exists(named)
    ]
    assert not missing, "\n".join(missing)


def test_every_page_that_the_sources_name_exists() -> None:
    sources = [
        path
        for folder in [*SOURCES, "tests"]
        for path in (ROOT / folder).rglob("*")
        if path.suffix in TEXT and path.is_file()
    ]
    missing = [
        f"{source.relative_to(ROOT)}: {named}"
        for source in sources
        for named in MENTIONED.findall(source.read_text(encoding="utf-8"))
        if not (ROOT / named).exists()
    ]
    assert not missing, "\n".join(missing)


def test_no_page_has_a_line_that_waits_for_its_text() -> None:
    waiting = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for line in prose(page).splitlines()
        if re.fullmatch(r"[A-Z_]{4,}", line.strip())
    ]
    assert not waiting


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    decisions = {page for page in pages if page.startswith("reasons/decisions/0")}
    assert not [page for page in pages - decisions - {"README.md"} if f"]({page})" not in index]


def test_every_decision_has_a_date_and_a_status_and_is_in_the_index() -> None:
    folder = ROOT / "docs" / "reasons" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    stamp = re.compile(r"^Date: \d{4}-\d\d-\d\d\. Status: (Accepted|Superseded by \d+)\.$", re.M)
    decisions = sorted(folder.glob("0*.md"))[1:]  # the first is the template
    assert not [d.name for d in decisions if f"]({d.name})" not in index]
    assert not [d.name for d in decisions if not stamp.search(d.read_text(encoding="utf-8"))]


def test_the_code_map_shows_every_room_on_its_floor() -> None:
    page = (ROOT / "docs" / "reasons" / "code-map.md").read_text(encoding="utf-8")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        floors = [floor.split(" | ") for floor in contract.get("layers", ())]
        [package] = contract["containers"] if floors else [""]
        places = [[place_of(package, room, page) for room in floor] for floor in floors]
        for above, below in pairwise(places):
            assert max(above) < min(below), f"{contract['name']}: {above} {below}"


def place_of(package: str, room: str, page: str) -> int:
    """Where the page first names a room, in the section of its package."""
    section = page.index(f"/{package}")
    place = re.compile(rf"`{room}(\.py)?`").search(page, page.rindex("\n## ", 0, section + 1))
    assert place, f"docs/reasons/code-map.md does not name {package}.{room}"
    return place.start()


def has_field(schema: dict[str, Any], path: str) -> bool:
    """Whether a schema has the field and takes it, `NAME` standing for any key of a map."""
    for part in path.split("."):
        while "items" in schema:
            schema = schema["items"]
        below = schema.get("properties", {}).get(part) or schema.get("additionalProperties")
        if not isinstance(below, dict):
            return False
        schema = below
    return True


def definition() -> dict[str, Any]:
    """The schema of LLMService."""
    crd = ROOT / "crds" / "llmservices.serving.ullage.dev.yaml"
    versions = yaml.safe_load(crd.read_text(encoding="utf-8"))["spec"]["versions"]
    schema: dict[str, Any] = versions[0]["schema"]["openAPIV3Schema"]
    return schema


def test_every_field_of_the_api_that_a_page_names_exists() -> None:
    service = definition()
    sections = service["properties"]["spec"]["properties"]
    unknown = []
    for page in PAGES:
        if page.name == "llmservice.md":  # is made from the definition
            continue
        for field in FIELD.findall(page.read_text(encoding="utf-8")):
            first = field.split(".")[0]
            if first not in {"spec", "status", *sections} or field in OTHER_NAMES:
                continue
            full = field if first in {"spec", "status"} else f"spec.{field}"
            if not field.endswith(".py") and not has_field(service, full):
                unknown.append(f"{page.relative_to(ROOT)}: {field}")
    assert not unknown, "\n".join(unknown)


def test_runbooks_confirm_each_alert_and_their_commands_only_look() -> None:
    """A section without a query or a command says nothing of how to tell whether it applies."""
    wrong = []
    for page in sorted((ROOT / "docs" / "runbooks").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
            if not re.search(r"^```(promql|console)$", section, re.MULTILINE):
                wrong.append(f"{page.name}: {section.splitlines()[0]}")
        for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            wrong += [
                f"{page.name}: {each}" for each in block.splitlines() if not LOOKS.match(each)
            ]
    assert not wrong, "\n".join(wrong)


def enumerations(schema: dict[str, Any], name: str = "") -> Iterator[tuple[str, str]]:
    """Each value of the enumerations below a field, with the name of its field."""
    yield from ((name, value) for value in schema.get("enum", ()))
    yield from enumerations(schema["items"], name) if "items" in schema else ()
    for field, below in schema.get("properties", {}).items():
        yield from enumerations(below, field)
    if isinstance(below := schema.get("additionalProperties"), dict):
        yield from enumerations(below)


def test_values_are_spelt_as_in_the_definition() -> None:
    of_kubernetes = {"kind", "status", "type"}  # which all its objects have
    values = {pair for pair in enumerations(definition()) if pair[0] not in of_kubernetes}
    fields = {field for field, _ in values}
    spelt = {value.lower(): value for _, value in values if value.lower() not in OTHER_WORDS}
    wrong = []
    for page in PAGES:
        if page in OF_ENGINES:
            continue
        code = "\n".join(CODE.findall(page.read_text(encoding="utf-8")))
        settings = {pair for pair in SETTING.findall(code) if pair[0] in fields} - OTHER_SETTINGS
        words = {
            word for word in WORD.findall(prose(page)) if spelt.get(word.lower(), word) != word
        }
        wrong += [f"{page.relative_to(ROOT)}: {each}" for each in {*(settings - values), *words}]
    assert not wrong, "\n".join(wrong)


def test_commands_that_wait_for_a_gpu_can_be_given() -> None:
    """Files exist, programs have the options, and engines' files the settings with these values."""
    wrong = []
    known = {"first", "second", "python", "compile"}
    known |= set(re.findall(r'Part\("(\w+)"', PROGRAMME.read_text(encoding="utf-8")))
    for row in QUEUE.read_text(encoding="utf-8").splitlines():
        wrong += [
            path
            for path in re.findall(r"(?:tests|benchmarks)/[\w/.]*\w", row)
            if not (ROOT / path).exists()
        ]
        for name, rest in re.findall(r"python -m benchmarks ([\w-]+)([^`]*)`", row):
            options = re.findall(r"--[\w-]+", rest)
            sources = benchmark_sources(name)
            wrong += [f"{name} {each}" for each in options if f'"{each}"' not in sources]
        for given in re.findall(r"ullage-engine --config <\(echo '([^']+)'\)", row):
            wrong += [] if is_configuration(given) else [given]
        parts = re.findall(r"(?:gpu\.sh|benchmarks\.gpu) ([a-z]\w+)", row)
        wrong += [part for part in parts if part not in known]
        if row.startswith("|") and not row.startswith(("|---", "| check |")):
            wrong += [] if row.split(" | ")[1].strip(" |").startswith("`") else [row]
    assert not wrong, "\n".join(wrong)


def benchmark_sources(name: str) -> str:
    """Return the sources of a benchmark's package, or of its file; empty for an unknown name."""
    if name not in BENCHMARKS:
        return ""
    file = ROOT / "benchmarks" / f"{BENCHMARKS[name].module.replace('.', '/')}.py"
    is_package = file.parent.name != "benchmarks"
    files = sorted(file.parent.glob("*.py")) if is_package else [file]
    return "".join(each.read_text(encoding="utf-8") for each in files)


def is_configuration(given: str) -> bool:
    """Whether an engine's file may have these contents."""
    settings = yaml.safe_load(given)
    try:
        config = msgspec.to_builtins(msgspec.convert(settings, EngineConfig))
    except msgspec.ValidationError:
        return False
    return contains(config, settings)


def contains(whole: Any, part: Any) -> bool:
    """Whether a mapping has another one's keys, and their values."""
    if not isinstance(part, dict):
        return bool(whole == part)
    return all(key in whole and contains(whole[key], part[key]) for key in part)
