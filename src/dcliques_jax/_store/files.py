"""Files that are written whole or not at all, and that are refused if a bit of them has changed since."""

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

_TABLE = "checksums"  # the array that tells type, shape and checksum of all others, as JSON
_TABLE_BYTES = 2**26  # most that it may take
_DEFLATE = 1040  # times its size is the most that compressed data can hold


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when all is written; if that fails, nothing has changed.

    A symbolic link stays, and the file it points to is replaced. What killed processes left of earlier attempts is
    removed.
    """
    path = pathlib.Path(os.path.realpath(pathlib.Path(path).expanduser()))
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        for other in path.parent.glob(f".{glob.escape(path.name)}.{32 * '[0-9a-f]'}"):
            _remove_abandoned(other)
        with _create(unfinished) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # the new name must not be on the disk before the content is
            unfinished.replace(path)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # a failed write does not name its file
        raise
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def try_lock(file: IO[Any]) -> bool:
    """Locks an open file until it is closed or the process ends; False if another holds it.

    Raises an `OSError` on file systems without locks.
    """
    import fcntl  # not on Windows, where all else can be imported

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _create(path: pathlib.Path) -> BinaryIO:
    """A new file, locked as long as it is open: so others know that it is being written."""
    file = path.open("xb")
    with contextlib.suppress(OSError):  # without locks, nothing is taken for abandoned
        while not try_lock(file):
            pass
    if path.exists():
        return file
    file.close()  # before it was locked, another process took it for abandoned and removed it
    return _create(path)


def _remove_abandoned(path: pathlib.Path) -> None:
    # It may be gone by now, belong to someone else or lie on a file system without locks: then it stays.
    with contextlib.suppress(OSError), path.open("r+b") as file:
        if try_lock(file):
            path.unlink()


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes plain values, with a checksum."""
    with replacing(path) as file:
        file.write(json.dumps({**value, "checksum": _checksum(value)}, indent=1).encode())


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads what `write_json` wrote; raises a `ValueError` for anything else."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict) or value.pop("checksum", None) != _checksum(value):
        raise ValueError("its checksum does not match its content")
    return value


def _checksum(value: Mapping[str, Any]) -> str:
    return checksum(json.dumps(value, sort_keys=True).encode())


def write_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], *, compressed: bool = True) -> None:
    """Writes arrays by their names to an `.npz` file that `numpy.load` reads, with a checksum of each."""
    table = {name: [*_described(array.dtype, array.shape), checksum(array)] for name, array in arrays.items()}
    save = np.savez_compressed if compressed else np.savez
    with replacing(path) as file:
        save(file, **arrays, **{_TABLE: np.array(json.dumps(table))})  # type: ignore[arg-type]


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads what `write_arrays` wrote; raises an exception of whatever kind for anything else.

    Nothing in the file can run code. No memory is taken before it is known that the arrays are those of the table, and
    that they fit into the file and the machine.
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
            raise ValueError(f"it holds {sorted(entries)}, its table of checksums is of {sorted(table)}")
        for name, entry in entries.items():
            if _declared(archive, entry) != table[name][:2]:
                raise ValueError(f"{name} has not the type and shape of the table of checksums")
        arrays = {name: _read(archive, entry) for name, entry in entries.items()}
    for name, array in arrays.items():
        if checksum(array) != table[name][2]:
            raise ValueError(f"{name} has changed since it was written")
    return arrays


def _check_total(declared: int, size: int) -> None:
    if declared > _DEFLATE * size:
        raise ValueError(f"it claims to hold {declared:,} bytes, more than can be compressed into its {size:,}")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if declared > machine:
        raise ValueError(f"it holds {declared / 1e9:.1f} GB, more than the {machine / 1e9:.1f} GB of this machine")


def _declared(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> list[Any]:
    """Type and shape of an array that is not read yet, if its entry is as large as they say."""
    with archive.open(entry) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{entry.filename} has a format that is not used here")
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
