"""The command of the worker; see `ullage_engine.worker.loop` for what it does."""

import argparse
import sys
from collections.abc import Sequence

from ullage_common.config.engine import EngineConfig
from ullage_engine.protocol.messages import Loading
from ullage_engine.worker import loop


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a worker; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ullage_engine.vllm_worker",
        description="Compute with vLLM for one ullage-engine, which starts this process itself.",
    )
    return loop.run(parser, _start, arguments)


def _start(
    config: EngineConfig, report: loop.Report, options: argparse.Namespace
) -> loop.StartedEngine:
    # vLLM takes seconds to import, and the server is to know that this process lives.
    report(Loading(stage="imports", done_bytes=0, total_bytes=1))
    from ullage_engine.vllm_worker.startup import start

    return start(config, report)


if __name__ == "__main__":
    sys.exit(main())
