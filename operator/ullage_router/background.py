"""Guards duties that the router repeats for as long as it runs."""

import contextlib
import logging
from collections.abc import Iterator

log = logging.getLogger(__name__)


@contextlib.contextmanager
def failures_logged(duty: str) -> Iterator[None]:
    """Log an exception of the `with` block and go on, so that a duty does not end unnoticed.

    Args:
        duty: the duty, for the log.
    """
    try:
        yield
    except Exception:
        log.exception("a duty failed; it is repeated", extra={"duty": duty})
