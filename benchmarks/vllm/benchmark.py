"""Measure vLLM inside Ullage.

server    Ullage with vLLM next to vLLM's own server: speed, a killed engine, an overload
resume    the settings of vLLM with which a resumed greedy answer equals the uninterrupted answer

Run these benchmarks with a Python that has vLLM (`make install-vllm`).

examples:
  .venv-vllm/bin/python -m benchmarks vllm server --quick
  .venv-vllm/bin/python -m benchmarks vllm resume --settings "float32"
"""

import argparse

from benchmarks.support.options import new_parser
from benchmarks.vllm import resume, server


def main() -> int:
    parser = new_parser("vllm", __doc__)
    parts = parser.add_subparsers(dest="part", required=True, metavar="{server,resume}")
    for name, part in (("server", server), ("resume", resume)):
        own = parts.add_parser(
            name, description=part.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        part.add_options(own)
        own.set_defaults(run=part.main)

    options = parser.parse_args()
    return int(options.run(options))
