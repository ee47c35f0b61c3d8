"""The operator as tests start it: what it does at long intervals comes soon."""

import sys

from ullage_operator.controller.controller import Options
from ullage_operator.controller.healer import StreamTimes
from ullage_operator.controller.reconciler import ReconcileTimes
from ullage_operator.main import main

if __name__ == "__main__":
    defaults = Options(
        reconcile_times=ReconcileTimes(retry_s=0.2),
        stream_times=StreamTimes(status_interval_s=1.0, tick_s=0.5),
    )
    sys.exit(main(defaults=defaults))
