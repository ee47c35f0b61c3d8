"""Guards duties that the router repeats for as long as it runs."""

import contextlib
import logging
import time
from collections.abc import Iterator

QUIET_S = 60.0
"""Seconds for which a duty that fails again with the same error is not logged again."""

log = logging.getLogger(__name__)

_logged: dict[str, tuple[str, float]] = {}
"""The error of each duty that was logged last, and the time."""


@contextlib.contextmanager
def failures_logged(duty: str) -> Iterator[None]:
    """Log an exception of the `with` block and go on, so that a duty does not end unnoticed.

    An error that lasts is logged once a minute, though duties may run several times a second.

    Args:
        duty: the duty, for the log.
    """
    try:
        yield
    except Exception as error:
        if _is_news(duty, repr(error), time.monotonic()):
            log.exception("a duty failed; it is repeated", extra={"duty": duty})


def _is_news(duty: str, error: str, now: float) -> bool:
    last_error, logged_at = _logged.get(duty, ("", 0.0))
    if error == last_error and now - logged_at < QUIET_S:
        return False
    _logged[duty] = error, now
    return True
