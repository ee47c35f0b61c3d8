"""The clients, with their pinned packages, and what each is judged by.

Everything here is data. To add a client, add an entry and its program in `programs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

NODE = "22.23.3"
"""Version of Node, which each client for Node runs on. The newest SDKs need 22."""
DEFAULT_TIMEOUT_S = 600.0


class ClientKind(StrEnum):
    """The language of a client, or how its environment comes about."""

    PYTHON = "Python"
    NODE = "Node"
    VLLM = "vLLM"
    """In .venv-vllm, which `make install-vllm` makes."""


class ServerName(StrEnum):
    """A server that clients are judged against."""

    ULLAGE = "ullage"
    VLLM = "vllm"
    """vLLM's own server, as `vllm serve` starts it."""


class ClientError(Exception):
    """A client cannot be judged, or an option is wrong. The message says how to go on."""


@dataclass(frozen=True)
class JudgedClient:
    """One client.

    name
        as in `--only`; also the name of the environment
    title
        the client's name in the table
    requirements
        packages with their versions: `NAME==VERSION` of PyPI, or `NAME@VERSION` of npm. The first
        is the client itself
    program
        file in `programs`
    checks
        in the program's order: what each shows, by the check's name
    python
        the oldest Python that the packages take
    reasons
        why Ullage refuses what vLLM's own server answers, by the check's name: how the refusal
        protects memory
    """

    name: str
    title: str
    kind: ClientKind
    requirements: tuple[str, ...]
    program: str
    checks: Mapping[str, str]
    python: tuple[int, int] = (3, 11)
    timeout_s: float = DEFAULT_TIMEOUT_S
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The pinned version of the client itself (empty if another place pins it)."""
        return pin(self.requirements[0])[1] if self.requirements else ""


def pin(requirement: str) -> tuple[str, str]:
    """Return the name and the version of a pinned requirement, the name without extras.

    Raises:
        ClientError: the requirement names no single version.
    """
    name, separator, version = requirement.rpartition("==")
    if not separator:
        name, separator, version = requirement.rpartition("@")
    if not name or not version or not version[0].isdigit():
        raise ClientError(f"{requirement}: pin one version, as in NAME==1.2.3 or NAME@1.2.3")
    return name.partition("[")[0], version


def choose(names: Sequence[str]) -> tuple[JudgedClient, ...]:
    """Return the clients of these names in the catalogue's order, or all of them.

    Raises:
        ClientError: no client has one of the names.
    """
    if unknown := [name for name in names if name not in CLIENTS]:
        raise ClientError(
            f"--only: no client is called {', '.join(unknown)}; choose from {', '.join(CLIENTS)}"
        )
    return tuple(client for client in CLIENTS.values() if not names or client.name in names)


MODELS = {"models": "the list of models names the served one"}
CREATE = {"create": "an answer with its usage"}
STREAM = {"stream": "a stream of pieces"}
FORCED = {"forced tool": "a call of the named tool, with arguments that its schema allows"}
AUTO = {"auto tool": "text or a call, with the finish reason of either"}
SCHEMA = {"JSON schema": "an answer that the schema allows"}
CHOICES = {"choices": "two answers to one prompt"}
ERRORS = {
    "wrong model": "the SDK's own exception for a model that does not exist",
    "long prompt": "the SDK's own exception for a prompt beyond the context",
}
EMBEDDINGS = {"embeddings": "a refusal by name, as the model generates"}
OWN_WORDS = frozenset(EMBEDDINGS)
"""Checks that ask for Ullage's own words. Another server fails them although it refuses, too."""

OPENAI_CHECKS = (
    MODELS
    | CREATE
    | STREAM
    | FORCED
    | AUTO
    | {"tool result": "an answer after the result of a call"}
    | SCHEMA
    | CHOICES
    | {"logprobs": "log-probabilities of the answer's tokens"}
    | {"completions": "a text continued"}
    | {"responses": "a response with its usage"}
    | {"responses stream": "events up to response.completed or response.incomplete"}
    | {"responses tool": "an item function_call"}
    | ERRORS
    | EMBEDDINGS
)
ANTHROPIC_CHECKS = (
    MODELS
    | CREATE
    | STREAM
    | FORCED
    | {"tool stream": "the arguments of a forced call, piece by piece"}
    | AUTO
    | {"tool result": "an answer after the result of a call"}
    | SCHEMA
    | {"token count": "the tokens of a prompt, as the answer's usage counts them"}
    | ERRORS
)
AGENT_CHECKS = (
    {"task": "a task that ends with text"}
    | {"task with a tool": "a task whose tool is run, and whose answer comes after its result"}
    | {"stream": "the events of a streamed task"}
)
LOAD = {"load": "every request answered, none failed"}

_ALL = (
    JudgedClient(
        name="openai",
        title="`openai` for Python",
        kind=ClientKind.PYTHON,
        requirements=("openai==3.57.0",),
        program="openai_python.py",
        checks=OPENAI_CHECKS | {"async client": "an answer to the asynchronous client"},
    ),
    JudgedClient(
        name="anthropic",
        title="`anthropic` for Python",
        kind=ClientKind.PYTHON,
        requirements=("anthropic==2.14.0",),
        program="anthropic_python.py",
        checks=ANTHROPIC_CHECKS | {"tool runner": "a tool that the SDK runs by itself"},
    ),
    JudgedClient(
        name="langchain-openai",
        title="`langchain-openai`",
        kind=ClientKind.PYTHON,
        requirements=("langchain-openai==1.7.4",),
        program="langchain_openai_client.py",
        checks=(
            CREATE
            | STREAM
            | FORCED
            | AUTO
            | SCHEMA
            | {"batch": "answers to three prompts at once"}
            | {"responses": "an answer by /v1/responses"}
            | ERRORS
            | EMBEDDINGS
        ),
    ),
    JudgedClient(
        name="litellm",
        title="`litellm`",
        kind=ClientKind.PYTHON,
        requirements=("litellm==1.110.2",),
        program="litellm_client.py",
        checks=(
            CREATE
            | STREAM
            | FORCED
            | AUTO
            | SCHEMA
            | CHOICES
            | {"responses": "an answer by /v1/responses"}
            | {"messages": "an answer by /v1/messages, as provider anthropic"}
            | ERRORS
            | EMBEDDINGS
        ),
    ),
    JudgedClient(
        name="pydantic-ai",
        title="`pydantic-ai-slim`",
        kind=ClientKind.PYTHON,
        requirements=("pydantic-ai-slim[openai]==2.68.0",),
        program="pydantic_ai_client.py",
        checks=(
            AGENT_CHECKS
            | {"typed output": "an object by a forced tool"}
            | SCHEMA
            | {"responses": "a task by /v1/responses"}
            | ERRORS
        ),
    ),
    JudgedClient(
        name="instructor",
        title="`instructor`",
        kind=ClientKind.PYTHON,
        requirements=("instructor==1.17.0",),
        program="instructor_client.py",
        checks=(
            {"tools": "an object by a forced tool"}
            | SCHEMA
            | {"partial": "an object that grows while it streams"}
            | ERRORS
        ),
    ),
    JudgedClient(
        name="openai-agents",
        title="`openai-agents` for Python",
        kind=ClientKind.PYTHON,
        requirements=("openai-agents==0.24.0",),
        program="openai_agents_python.py",
        checks=AGENT_CHECKS | SCHEMA | {"chats": "a task by /v1/chat/completions"} | ERRORS,
    ),
    JudgedClient(
        name="node-openai",
        title="`openai` for Node",
        kind=ClientKind.NODE,
        requirements=("openai@7.59.0",),
        program="openai_node.mjs",
        checks=OPENAI_CHECKS,
    ),
    JudgedClient(
        name="node-anthropic",
        title="`@anthropic-ai/sdk` for Node",
        kind=ClientKind.NODE,
        requirements=("@anthropic-ai/sdk@1.14.0",),
        program="anthropic_node.mjs",
        checks=ANTHROPIC_CHECKS,
    ),
    JudgedClient(
        name="node-ai",
        title="`ai` with `@ai-sdk/openai-compatible`",
        kind=ClientKind.NODE,
        requirements=("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
        program="ai_node.mjs",
        checks=CREATE | STREAM | FORCED | AUTO | SCHEMA | ERRORS | EMBEDDINGS,
    ),
    JudgedClient(
        name="lm-eval",
        title="`lm-eval`, `local-completions`",
        kind=ClientKind.PYTHON,
        requirements=("lm-eval[api]==0.4.13",),
        program="lm_eval_client.py",
        checks={
            "loglikelihood": "every choice of a local task scored, below zero",
            "generation": "every example of a local task continued",
        },
    ),
    JudgedClient(
        name="vllm-bench",
        title="`vllm bench serve`",
        kind=ClientKind.VLLM,
        requirements=(),
        program="vllm_bench.py",
        checks=LOAD,
    ),
    JudgedClient(
        name="guidellm",
        title="`guidellm`",
        kind=ClientKind.PYTHON,
        requirements=("guidellm==0.8.1",),
        program="guidellm_client.py",
        checks=LOAD,
    ),
    JudgedClient(
        name="inference-perf",
        title="`inference-perf`",
        kind=ClientKind.PYTHON,
        requirements=("inference-perf==0.7.0",),
        program="inference_perf_client.py",
        checks=LOAD,
        python=(3, 12),
    ),
    JudgedClient(
        name="aiperf",
        title="`aiperf`",
        kind=ClientKind.PYTHON,
        requirements=("aiperf==0.13.0",),
        program="aiperf_client.py",
        checks=LOAD,
    ),
    JudgedClient(
        name="node-agents",
        title="`@openai/agents` for Node",
        kind=ClientKind.NODE,
        requirements=("@openai/agents@0.20.0", "openai@7.59.0", "zod@4.6.7"),
        program="openai_agents_node.mjs",
        checks=AGENT_CHECKS | ERRORS,
    ),
    JudgedClient(
        name="codex",
        title="`@openai/codex`, without its web search",
        kind=ClientKind.NODE,
        requirements=("@openai/codex@0.171.0",),
        program="codex_node.mjs",
        checks={
            "long prompt": "Codex's own words for a prompt beyond the context",
            "task": "a task of `codex exec` with short instructions: a message, maybe cut",
        },
    ),
)

CLIENTS: Mapping[str, JudgedClient] = MappingProxyType({client.name: client for client in _ALL})
"""All clients by name, in the order in which they are judged and shown."""
