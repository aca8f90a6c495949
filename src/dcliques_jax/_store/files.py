"""Writes files completely or not at all, and checks on reading that they have not changed."""

import contextlib
import glob
import json
import os
import pathlib
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, BinaryIO

import numpy as np

from dcliques_jax._arrays import checksum

_TABLE = "checksums"  # array with type, shape and checksum of all others, as JSON
_TABLE_BYTES = 2**26  # its maximum size
_DEFLATE = 1040  # maximum compression ratio


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a file that replaces `path` when it is complete. If writing fails, `path` does not change.

    Keeps a symbolic link and replaces its target. Removes incomplete files of killed processes.
    """
    path = pathlib.Path(os.path.realpath(pathlib.Path(path).expanduser()))
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        for other in path.parent.glob(f".{glob.escape(path.name)}.{32 * '[0-9a-f]'}"):
            _remove_abandoned(other)
        with _create(unfinished) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # the content must reach the disk before the new name
            unfinished.replace(path)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # a failed write does not name its file
        raise
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def try_lock(file: IO[Any]) -> bool:
    """Locks an open file until it is closed or the process ends; returns False if another process holds the lock.

    Raises an `OSError` on file systems without locks.
    """
    import fcntl  # missing on Windows

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _create(path: pathlib.Path) -> BinaryIO:
    """Creates a file that is locked while it is open, to show other processes that it is being written."""
    file = path.open("xb")
    with contextlib.suppress(OSError):  # without locks, no file counts as abandoned
        while not try_lock(file):
            pass
    if path.exists():
        return file
    file.close()  # another process removed it as abandoned before it was locked
    return _create(path)


def _remove_abandoned(path: pathlib.Path) -> None:
    # Ignore a file that is gone, belongs to someone else or is on a file system without locks.
    with contextlib.suppress(OSError), path.open("r+b") as file:
        if try_lock(file):
            path.unlink()


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes plain values and their checksum."""
    with replacing(path) as file:
        file.write(json.dumps({**value, "checksum": _checksum(value)}, indent=1).encode())


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file of `write_json`; raises a `ValueError` for other files."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict) or value.pop("checksum", None) != _checksum(value):
        raise ValueError("its checksum does not match its content")
    return value


def _checksum(value: Mapping[str, Any]) -> str:
    return checksum(json.dumps(value, sort_keys=True).encode())


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], *, compressed: bool = True) -> None:
    """Writes arrays by name, with a checksum of each, to an `.npz` file that `numpy.load` reads."""
    table = {name: [*_described(array.dtype, array.shape), checksum(array)] for name, array in arrays.items()}
    save = np.savez_compressed if compressed else np.savez
    with replacing(path) as file:
        save(file, **arrays, **{_TABLE: np.array(json.dumps(table))})  # type: ignore[arg-type]


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a file of `write_arrays`; raises an exception of any kind for other files.

    Reading cannot run code. It allocates memory only after checking that the arrays match the table of checksums, and
    fit into the file and the machine.
    """
    with pathlib.Path(path).expanduser().open("rb") as file, zipfile.ZipFile(file) as archive:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        _check_total(sum(entry.file_size for entry in archive.infolist()), os.fstat(file.fileno()).st_size)
        told = entries.pop(_TABLE, None)
        if told is None or told.file_size > _TABLE_BYTES:
            raise ValueError("it has no table of checksums")
        _declared(archive, told)
        table = json.loads(str(_read(archive, told)))
        if table.keys() != entries.keys():
            raise ValueError(f"it holds {sorted(entries)}, but its table of checksums lists {sorted(table)}")
        for name, entry in entries.items():
            if _declared(archive, entry) != table[name][:2]:
                raise ValueError(f"{name} does not have the type and shape of the table of checksums")
        arrays = {name: _read(archive, entry) for name, entry in entries.items()}
    for name, array in arrays.items():
        if checksum(array) != table[name][2]:
            raise ValueError(f"{name} has changed since it was written")
    return arrays


def _check_total(declared: int, size: int) -> None:
    if declared > _DEFLATE * size:
        raise ValueError(f"it declares {declared:,} bytes, more than {size:,} bytes can hold compressed")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if declared > machine:
        raise ValueError(f"it holds {declared / 1e9:.1f} GB, more than the {machine / 1e9:.1f} GB of this machine")


def _declared(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> list[Any]:
    """Returns type and shape of an array before it is read, after checking the size of its entry."""
    with archive.open(entry) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{entry.filename} has an unsupported format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        size = file.tell() + dtype.itemsize * int(np.prod(shape, dtype=object))
    if size != entry.file_size:
        raise ValueError(f"{entry.filename} should take {size:,} bytes, but takes {entry.file_size:,}")
    return _described(dtype, shape)


def _described(dtype: np.dtype[Any], shape: tuple[int, ...]) -> list[Any]:
    return [dtype.str, list(shape)]


def _read(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(entry) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
