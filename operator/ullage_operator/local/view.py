"""Progress of the start: one live table on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table


class StartView:
    """Shows what every pod is doing until all are ready."""

    def __init__(self, names: list[str], console: Console) -> None:
        self._doing = dict.fromkeys(names, "starting")
        self._console = console
        self._started = time.monotonic()
        self._live = Live(console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> "StartView":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def update(self, name: str, doing: str) -> None:
        if self._doing.get(name) == doing:
            return
        self._doing[name] = doing
        if self._live.is_started:
            self._live.update(self._table())
        else:
            self._console.print(f"{self.seconds:5.1f} s  {name}: {doing}", highlight=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, doing in self._doing.items():
            table.add_row(name, doing, f"{self.seconds:.1f} s")
        return table
