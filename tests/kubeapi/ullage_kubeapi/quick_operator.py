"""The operator as tests start it: what it does at long intervals comes soon."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ullage_operator.controller.controller import Options
from ullage_operator.controller.headroom_streams import StreamTimes
from ullage_operator.controller.reconciler import ReconcileTimes
from ullage_operator.main import main


def run(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Is this process's whole life: its standard error is the log."""
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    defaults = Options(
        reconcile_times=ReconcileTimes(retry_s=0.2),
        stream_times=StreamTimes(status_interval_s=1.0, tick_s=0.5),
    )
    sys.exit(main(arguments, defaults))
