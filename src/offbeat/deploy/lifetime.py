"""A process that ends itself where its work hangs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lifetime(seconds: float) -> Iterator[None]:
    """The process is ended if what is inside takes longer, even where it never returns to Python."""
    signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles the signal, so the system acts on it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
