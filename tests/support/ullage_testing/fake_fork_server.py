"""A fork server of fake workers: `fake_fork_server.py IMPORT_S`, with a socket as standard input.

It takes so many seconds to import, as it were, its libraries.
"""

import os
import sys
import time

from ullage_testing import fake_worker

from ullage_engine.worker.fork_server import ForkServer, take_standard_input
from ullage_engine.worker.forks import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    time.sleep(float(sys.argv[1]))
    with take_standard_input() as channel:
        ForkServer(channel, fake_worker.main).serve()
