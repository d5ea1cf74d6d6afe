"""Keeps Ctrl-C out of work that must not stop half-way; the engine wraps its book-keeping in it.

An interrupt may strike between any two lines. In the middle of a forward pass that is harmless, since a step can be
rolled back as a whole; between "block taken" and "block entered in the table" nothing could put it right.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """A SIGINT that comes inside the block takes effect at its end."""
    # Python runs signal handlers in the main thread only. A handler of None is none of Python's and stays where it is.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if came:
            signal.raise_signal(signal.SIGINT)
