"""The documentation, examples and help show only commands that the programs take."""

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.__main__ import BENCHMARKS

from ullage_cli.main import COMMANDS, make_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [*sorted((ROOT / "charts").rglob("*.md")), ROOT / "engine" / "ullage_kv" / "README.md"]
PAGES.remove(ROOT / "CHANGELOG.md")
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))

FENCED = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
SPAN = re.compile(r"`([^`\n]+)`")
SHELL = {"", "sh", "bash", "console"}
ULLAGE = re.compile(r"(?:^(?:\$ )?|[|;&({]\s*)(?:[A-Z_]+=\S+ )*(?:[\w.-]+/)*ullage (?=[a-z-])(.*)")
"""A command at the beginning of a line, of a pipe's end or of a group, as helm and kubectl have
arguments of the same name.
"""

EXAMPLE = re.compile(r"^  (ullage [a-z-].*?)(?: {2,}.*)?$", re.MULTILINE)
"""A command among the examples of a help text, without the explanation beside it."""

PART_OF_A_COMMAND = re.compile(r"arguments are required|expected (one|at least one) argument")
"""Errors of a command that a sentence names without all of its arguments."""

BENCHMARK = re.compile(r"python -m benchmarks ([a-z][\w-]*)([^`\n#|]*)")
OPTION = re.compile(r"`(--[a-z][\w-]*)[^`]*`")
OTHER_OPTIONS = {
    "--checksum-algorithm",  # aws
    "--enable-auto-tool-choice",  # vllm serve
    "--force-conflicts",  # helm
    "--kv-unified",  # llama-server
    "--max-graceful-termination-sec",  # cluster-autoscaler
    "--migration-limit",  # Dynamo
    "--reasoning-parser",  # vllm serve
    "--slots",  # llama-server
    "--take-ownership",  # helm
}
"""Options of other programs that pages name."""

OF_CLIENTS = {"anthropic", "openai"}
"""Packages of clients that a page shows and that tests run elsewhere."""


def code_of(text: str) -> Iterator[str]:
    """Yield the lines of shell in a page's blocks, with continued lines joined."""
    blocks = [block for language, block in FENCED.findall(text) if language in SHELL]
    blocks += INDENTED.findall(text)
    for block in blocks:
        yield from block.replace("\\\n", " ").splitlines()


def prose_of(text: str) -> str:
    return FENCED.sub("", text)


def words_of(command: str) -> list[str]:
    """Return the arguments of a command, up to the end of it in its line."""
    plain = re.sub(r'"\$\([^)]*\)"', "1", re.sub(r"<\(.*?\)(?= |$)", "FILE", command))
    try:
        lexer = shlex.shlex(plain, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:  # the command is inside of quotes
        words = re.split(r"[)\"'`]", plain)[0].split()

    end = next((at for at, word in enumerate(words) if set(word) <= set("();<>|&")), len(words))
    is_redirection = words[end : end + 1] == [">"] and words[end - 1].isdigit()
    return words[: end - 1] if is_redirection else words[:end]


def error_of(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Return the reason why the command refuses its arguments (empty if it takes them)."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            options, unknown = parser.parse_known_args(words)
    except SystemExit as end:
        return errors.getvalue().strip().rpartition("\n")[2] if end.code else ""
    if words[0] == "quantize":  # the engine has the parser
        unknown = [each for each in options.arguments if each.startswith("-")]
        unknown = [each for each in unknown if f'"{each}"' not in quantize_source()]
    return f"unrecognized arguments: {unknown}" if unknown else ""


def quantize_source() -> str:
    source = ROOT / "engine" / "ullage_engine" / "quantize" / "convert.py"
    return source.read_text(encoding="utf-8")


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser and those of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers_of(each)


def problems_of(parser: argparse.ArgumentParser, text: str) -> list[str]:
    """Return the commands of a page that the parser refuses, with the reasons."""
    problems = []
    for line in code_of(text):
        for match in ULLAGE.finditer(line):
            error = error_of(parser, words_of(match[1]))
            problems += [f"ullage {match[1]}: {error}"] if error else []
    for span in SPAN.findall(prose_of(text)):
        if match := ULLAGE.match(span):
            error = error_of(parser, words_of(match[1]))
            is_wrong = error and not PART_OF_A_COMMAND.search(error)
            problems += [f"{span}: {error}"] if is_wrong else []
    return problems


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return make_parser()


def test_every_command_that_a_page_shows_is_parsed(parser: argparse.ArgumentParser) -> None:
    wrong = [
        f"{page.relative_to(ROOT)}: {problem}"
        for page in PAGES
        for problem in problems_of(parser, page.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_command_at_the_top_of_an_example_is_parsed(parser: argparse.ArgumentParser) -> None:
    wrong = []
    for path in EXAMPLES:
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := re.match(r"#\s{2,}(?:\S+/)?ullage (.*)", line):
                error = error_of(parser, words_of(match[1]))
                wrong += [f"{path.relative_to(ROOT)}: {line}: {error}"] if error else []
    assert not wrong, "\n".join(wrong)


def test_every_example_of_the_help_is_parsed(parser: argparse.ArgumentParser) -> None:
    wrong = []
    for each in parsers_of(parser):
        examples = EXAMPLE.findall((each.epilog or "").replace("\\\n", " "))
        for example in examples:
            error = error_of(parser, words_of(example.removeprefix("ullage ")))
            wrong += [f"{each.prog} --help: {example}: {error}"] if error else []
    assert not wrong, "\n".join(wrong)


def test_the_help_of_every_command_has_examples(parser: argparse.ArgumentParser) -> None:
    """docs/guide/commands.md promises them. `ullage quantize` prints the help of the engine."""
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    assert len(commands.choices) == len(COMMANDS)
    helps = {name: str(each.epilog) for name, each in commands.choices.items()}
    assert [name for name, text in helps.items() if "examples:\n" not in text] == ["quantize"]
    assert "examples:\n" in quantize_source()


def test_a_wrong_command_is_found(parser: argparse.ArgumentParser) -> None:
    text = """
Run `ullage up`, `ullage bench URL --loads 1,2` or `ullage bench URL --clients 1,2`.

```
$ VAR=1 .venv/bin/ullage up -f service.yaml --port 8000    # no such option
(ullage plan -f a.yaml -o json 2>plan.log | jq .)
echo 'eval "$(ullage completion bash)"' >> ~/.bashrc
ullage up -f <(sed s/a/b/ a.yaml)
ullage verify inject http://127.0.0.1:8000 --pid "$(pgrep -of 'ullage up')"
ullage profile chat --steps 50 \\
    --lane
ullage serving model
ullage quantize --model file:///m --bits 4
```
"""
    problems = [problem.partition(":")[0] for problem in problems_of(parser, text)]
    assert [each.split()[:2] for each in problems] == [
        ["ullage", "up"],
        ["ullage", "profile"],
        ["ullage", "serving"],
        ["ullage", "quantize"],
        ["ullage", "bench"],
    ]


def test_every_option_that_a_page_names_exists(parser: argparse.ArgumentParser) -> None:
    options = {o for each in parsers_of(parser) for a in each._actions for o in a.option_strings}
    programs = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    programs += [*(ROOT / "operator").glob("*/main.py"), *(ROOT / "engine").glob("*/main.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in programs) + quantize_source()
    options |= set(re.findall(r'"(--[a-z][\w-]*)"', text)) | OTHER_OPTIONS
    wrong = [
        f"{page.relative_to(ROOT)}: {option}"
        for page in PAGES
        for option in OPTION.findall(prose_of(page.read_text(encoding="utf-8")))
        if option not in options
    ]
    assert not wrong, "\n".join(wrong)


def test_every_target_and_variable_of_make_that_a_page_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    # This script reads its settings from the environment.
    base = (ROOT / "docker" / "base.sh").read_text(encoding="utf-8")
    variables = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", makefile + base))
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = [line for line in code_of(text) if not line.startswith("  ")]
        for line in [*code, *SPAN.findall(prose_of(text))]:
            for match in re.finditer(r"^(?:\$ |sudo )?make (.+)", line):
                words = words_of(match[1])
                named = [word.partition("=")[0] for word in words if "=" in word]
                unknown = [name for name in named if name not in variables]
                unknown += [word for word in words if "=" not in word and word not in targets]
                wrong += [f"{page.relative_to(ROOT)}: {line}: {unknown}"] if unknown else []
    assert not wrong, "\n".join(wrong)


def has_value(values: Any, path: str) -> bool:
    """Return whether the chart's values have a path. An empty map takes any key."""
    for part in path.split("."):
        if values == {}:
            return True
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True


def test_every_value_of_the_chart_that_a_page_sets_exists() -> None:
    chart = ROOT / "charts" / "ullage" / "values.yaml"
    values = yaml.safe_load(chart.read_text(encoding="utf-8"))
    paths = {
        (page, path)
        for page in PAGES
        for path in re.findall(r"--set '?([\w.]+)=", page.read_text(encoding="utf-8"))
    }
    assert len(paths) > 10
    wrong = [(page, path) for page, path in paths if not has_value(values, path)]
    assert not [f"{page.relative_to(ROOT)}: {path}" for page, path in wrong]


def test_commands_of_helm_name_the_namespace_of_the_installation() -> None:
    """Helm finds no release elsewhere. Values that a newer chart adds need their defaults."""
    commands = {
        (page, command)
        for page in PAGES
        for command in re.findall(
            r"helm (?:install|upgrade|test|rollback|uninstall) ullage\b[^`\n]*",
            page.read_text(encoding="utf-8"),
        )
    }
    assert len(commands) > 5
    wrong = [
        f"{page.relative_to(ROOT)}: {command}"
        for page, command in commands
        if not re.search(r" (-n|--namespace) ullage-system\b", command)
        or " --reuse-values" in command
    ]
    assert not wrong, "\n".join(wrong)


def test_every_benchmark_that_a_page_names_has_the_options() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, rest in BENCHMARK.findall(text):
            if name not in BENCHMARKS:
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
                continue
            sources = benchmark_sources(name)
            options = re.findall(r"(?<= )--[a-z][\w-]*", rest)
            unknown = [each for each in options if f'"{each}"' not in sources]
            wrong += [f"{page.relative_to(ROOT)}: {name} {each}" for each in unknown]
    assert not wrong, "\n".join(wrong)


def benchmark_sources(name: str) -> str:
    """Return the sources of a benchmark, and those of the options that benchmarks share."""
    file = ROOT / "benchmarks" / f"{BENCHMARKS[name].module.replace('.', '/')}.py"
    is_package = file.parent.name != "benchmarks"
    files = sorted(file.parent.glob("*.py")) if is_package else [file]
    files += sorted((ROOT / "benchmarks" / "support").glob("*.py"))
    return "".join(each.read_text(encoding="utf-8") for each in files)


def imports_of(block: str) -> Iterator[tuple[str, str]]:
    """Yield each imported module, with the imported name (empty for the module itself)."""
    for node in ast.walk(ast.parse(textwrap.dedent(block))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_every_program_in_python_that_a_page_shows_finds_its_imports() -> None:
    wrong = []
    for page in PAGES:
        for language, block in FENCED.findall(page.read_text(encoding="utf-8")):
            for module, name in imports_of(block) if language == "python" else ():
                if module.partition(".")[0] in OF_CLIENTS:
                    continue
                is_known = not name or hasattr(importlib.import_module(module), name)
                if not is_known and not importlib.util.find_spec(f"{module}.{name}"):
                    wrong.append(f"{page.relative_to(ROOT)}: {module}.{name}")
    assert not wrong, "\n".join(wrong)


def test_no_page_installs_the_package_by_its_name() -> None:
    """No package index has it: a package of that name there would be somebody else's."""
    name = re.compile(r"pip install[^\n#`]*['\" ]ullage(?![\w-])")
    assert not [page.name for page in PAGES if name.search(page.read_text(encoding="utf-8"))]


def test_the_first_program_of_the_kv_store_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "guide" / "kv-store.md").read_text(encoding="utf-8")
    program = next(block for language, block in FENCED.findall(text) if language == "python")
    exec(compile(program, "docs/guide/kv-store.md", "exec"), {})
    stored, tiers, *results = capsys.readouterr().out.splitlines()
    assert stored == "['stored', 'stored', 'stored']"
    assert tiers == "['host', 'host', 'host']"
    assert results[:3] == ["hit host 1048576"] * 3
