"""Files that are there as a whole, or not at all."""

import contextlib
import pathlib
import uuid
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when all is written; if that fails, nothing has changed."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
