"""Run a benchmark by its name.

usage: python -m benchmarks NAME [ARGS]
"""

import importlib
import sys
from dataclasses import dataclass

USAGE = "usage: python -m benchmarks NAME [ARGS]"
WRONG_NAME = 2
INTERRUPTED = 130


@dataclass(frozen=True)
class Benchmark:
    """An entry of the list.

    Attributes:
        module: module below `benchmarks` whose `main` runs the benchmark.
        summary: one line about what the benchmark measures.
        example: arguments of a typical run.
    """

    module: str
    summary: str
    example: str


BENCHMARKS = {
    # a whole service
    "compare": Benchmark(
        "compare.benchmark",
        "speed, memory and start-up next to llama.cpp's server and vLLM",
        ".peers --quality --json bench.json",
    ),
    "survive": Benchmark(
        "survive.benchmark",
        "streams of others while memory runs out or a worker dies, next to llama.cpp and vLLM",
        ".peers --only ullage,vllm --json survive.json",
    ),
    "vllm": Benchmark(
        "vllm.benchmark",
        "Ullage around vLLM next to `vllm serve`, and resumed answers of vLLM",
        "server --rounds 3",
    ),
    "faults": Benchmark(
        "faults",
        "recovery from injected faults under load, without an error or a changed token",
        "--faults 200",
    ),
    "overload": Benchmark(
        "overload.benchmark",
        "goodput and refusals at ten times the capacity",
        "--seconds 60 --factor 10",
    ),
    "replay": Benchmark(
        "replay",
        "a trace on a real service against the same trace in virtual time",
        "--seconds 60 --rate 1.5",
    ),
    "soak": Benchmark(
        "soak",
        "half an hour of conversations with KV tiers: flat memory, bounded files, cache hits",
        "--minutes 30 --plot soak.svg",
    ),
    "settings": Benchmark(
        "settings",
        "goodput of the default settings next to static ones while prompts change their length",
        "--rounds 2",
    ),
    "tiers": Benchmark(
        "tiers.benchmark",
        "bandwidth of KV tiers, time to first token by tier, and the overhead of tiers",
        "--only store --quick",
    ),
    # router and operator
    "router": Benchmark(
        "router.benchmark",
        "requests/s, added latency, streams and memory of the router",
        "--quick --engines 1,16",
    ),
    "pick": Benchmark(
        "pick",
        "placements/s by Pick, and answers with tickets against answers through the router",
        "--seconds 3 --engines 4",
    ),
    "operator": Benchmark(
        "operator_services",
        "memory, CPU and latency of the operator with many LLMServices",
        "--services 1000",
    ),
    "metrics": Benchmark(
        "metrics",
        "CPU time of a scrape, and the share of metrics in a request, a token and a step",
        "--quick",
    ),
    # the engine
    "token-cost": Benchmark(
        "token_cost",
        "CPU time of a streamed token outside the model, by process",
        "--concurrency 32 --tokens 2048 --rounds 1",
    ),
    "step": Benchmark(
        "step",
        "milliseconds of one engine step, without server and scheduler",
        "--quantization int8 --kv-dtype fp8",
    ),
    "growth": Benchmark(
        "growth",
        "cost of a token as sequences, context and KV pool grow",
        "--only scheduling",
    ),
    "speculation": Benchmark(
        "speculation",
        "tokens/s with and without speculative decoding by prompt lookup",
        "--texts 'repetitive, greedy' --sequences 1",
    ),
    "experts": Benchmark(
        "experts",
        "milliseconds of one mixture-of-experts layer by each implementation",
        "--hidden 256 --width 128",
    ),
    "quality": Benchmark(
        "quality",
        "perplexity, agreement and size of each quantization format",
        "--forms int8 int4 --tokens 1024",
    ),
    "predict": Benchmark(
        "predict",
        "predicted against allocated bytes, for every model family",
        "",
    ),
    # a GPU machine
    "gpu": Benchmark(
        "gpu.__main__",
        "the programme for one NVIDIA GPU, also run by `python -m benchmarks.gpu`",
        "list",
    ),
}


def listing() -> str:
    """Return every name with its summary and an example."""
    lines = [USAGE, "", "`python -m benchmarks NAME --help` explains one benchmark.", ""]
    for name, benchmark in BENCHMARKS.items():
        lines.append(f"{name:12} {benchmark.summary}")
        lines.append(f"{'':12} python -m benchmarks {name} {benchmark.example}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Run the named benchmark with the remaining arguments, and return its exit status."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
        return 0

    if name not in BENCHMARKS:
        names = ", ".join(BENCHMARKS)
        print(f"error: there is no benchmark {name!r}; choose from {names}", file=sys.stderr)
        return WRONG_NAME

    # Only the chosen module is imported: others need packages that not every machine has.
    module = importlib.import_module(f"benchmarks.{BENCHMARKS[name].module}")
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    try:
        return int(module.main() or 0)
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
