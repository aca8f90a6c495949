"""Handles Ctrl-C: the first stops a run soon, the second immediately."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed. The second Ctrl-C raises `KeyboardInterrupt`.

    Python handles signals in its main thread. In other threads, and if the user has set a handler, nothing changes.
    """
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            print("\nCtrl-C: the run stops soon. Press again to stop immediately.", file=sys.stderr)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
