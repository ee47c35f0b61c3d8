"""A fork server of fake workers: `fake_fork_server.py IMPORT_S`, with a socket as standard input.

It takes so many seconds to import, as it were, its libraries. A vocabulary is only printed.
"""

import os
import sys
import time

from ullage_testing import fake_worker

from ullage_engine.worker.fork_server import ForkServer, take_standard_input
from ullage_engine.worker.forks import die_with_parent


def print_vocabulary(source: str, vocab_size: int) -> None:
    print(f"vocabulary of {source} with {vocab_size} tokens", file=sys.stderr, flush=True)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    time.sleep(float(sys.argv[1]))
    with take_standard_input() as channel:
        ForkServer(channel, fake_worker.main, print_vocabulary).serve()
