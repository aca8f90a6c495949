"""Ctrl-C: pressed once it asks a run to stop soon, pressed again it ends the run at once."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def noticed() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed inside; the second time raises `KeyboardInterrupt`.

    Python handles signals in its main thread. In other threads, and where a handler has been set, nothing changes.
    """
    pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True
        with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
            print("\nCtrl-C: the run stops soon. Press it again to stop at once.", file=sys.stderr)

    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
