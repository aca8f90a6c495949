"""Checkpoints, from which interrupted runs continue.

A folder holds `run.json`, which says how runs are grouped, and the last two checkpoints of each group in
`from_run_<number>`. A checkpoint is one file, `round_<number>.npz`, with state, history, identity of the run and
checksums of all. It is written completely or not at all, even if the process is killed. Reading it cannot run code.
"""

import contextlib
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax import _checks
from dcliques_jax._engine.plan import Schedule
from dcliques_jax._engine.tally import Tally
from dcliques_jax._mesh.transfer import of_first_process
from dcliques_jax._store import files
from dcliques_jax._store.provenance import differences
from dcliques_jax.results import MEASURED, Record, State

_NAME, _LOCK, _PREFIX = "run.json", "lock", "round_"
_KEPT = 2  # checkpoints: the last, and one to continue from if the last is corrupt
_SPACING = 20  # times the duration of a save until the next: saving takes at most a twentieth of the time

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run in a folder. Without a folder, saves and restores nothing."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        if not isinstance(directory, (str, os.PathLike, type(None))):
            raise ValueError(f"checkpoint_dir={directory!r} must be the path of a folder")
        self.directory = None if directory is None else pathlib.Path(directory).expanduser().absolute()
        self._identity: dict[str, Any] = {}  # values that identify the run
        self._kept: list[int] = []  # the rounds of the valid checkpoints
        self._next_save = 0.0  # earliest time of the next save

    @contextlib.contextmanager
    def opened(self, *, runs_at_once: int) -> Iterator[int]:
        """Locks the folder against other processes. Yields the `runs_at_once` that the folder was created with."""
        if self.directory is None:
            yield runs_at_once
            return
        directory = self.directory
        with contextlib.ExitStack() as stack:

            def take() -> int:
                try:
                    _check_folder(directory)
                    directory.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(_locked(directory))
                    return int(_remembered(directory, {"runs_at_once": runs_at_once})["runs_at_once"])
                except OSError as error:  # before anything has run
                    told = f"checkpoint_dir={str(directory)!r} cannot be used ({error}): pass another folder"
                    raise ValueError(told) from error

            yield of_first_process(_by_first_process(take) or 0)

    def part(self, number: int) -> "Checkpoints":
        """Returns the checkpoints of the group of runs from `number` on, in their own folder."""
        return Checkpoints(None if self.directory is None else self.directory / f"from_run_{number}")

    def due(self) -> bool:
        """Returns whether it is time to save, by the clock of the first process: all processes must save together."""
        return self.directory is not None and bool(of_first_process(time.monotonic() >= self._next_save))

    def save(self, state: State, records: list[Record], tally: Tally) -> None:
        """Saves a checkpoint. If saving fails, warns and keeps the last checkpoint."""
        number = tally.round
        if self.directory is None or number in self._kept or jax.process_index() > 0:  # the first process writes
            return
        started = time.monotonic()
        try:
            self._write(number, state, records, tally)
        except OSError as error:
            last = f"the last checkpoint is of round {self._kept[-1]}" if self._kept else "there is no checkpoint"
            _checks.warn(
                f"could not save a checkpoint of round {number} in {self.directory} ({error}): the run continues, and "
                f"{last}",
                RuntimeWarning,
            )
        ended = time.monotonic()
        self._next_save = ended + _SPACING * (ended - started)

    def _write(self, number: int, state: State, records: list[Record], tally: Tally) -> None:
        assert self.directory is not None
        arrays = {f"state/{index}": _plain(leaf) for index, leaf in enumerate(jax.tree.leaves(state))}
        for name in ("round", "epoch", *MEASURED):
            arrays[f"history/{name}"] = np.stack([getattr(record, name) for record in records])
        for name in records[0].extra if records else ():
            arrays[f"extra/{name}"] = np.stack([record.extra[name] for record in records])
        arrays |= {f"tally/{name}": np.asarray(value) for name, value in tally._asdict().items()}
        arrays["identity"] = np.array(json.dumps(self._identity))
        self.directory.mkdir(exist_ok=True)
        files.write_arrays(self._path(number), arrays, compressed=False)
        self._kept = [*self._kept, number][-_KEPT:]
        kept = [self._path(number) for number in self._kept]
        for path in self.directory.iterdir():  # remove older checkpoints and incomplete files of killed processes
            if path.name.lstrip(".").startswith(_PREFIX) and path not in kept:
                path.unlink(missing_ok=True)

    def restore(
        self, identity: Callable[[], dict[str, Any]], starts: list[State], schedule: Schedule, rounds_per_epoch: int
    ) -> tuple[list[State], list[Record], Tally] | None:
        """Returns the last checkpoint; None if there is none. `starts` are the initial states.

        Raises a `ValueError` if it belongs to another run, or is later than the end of the schedule.
        """
        if self.directory is None:
            return None
        self._identity = json.loads(json.dumps(identity()))  # as JSON returns it
        found = _by_first_process(self._newest)
        number = of_first_process(-1 if found is None else found[0])
        if number < 0:
            return None
        arrays = found[1] if found else files.read_arrays(self._path(number))
        if told := differences(json.loads(str(arrays["identity"])), self._identity):
            raise ValueError(f"{self.directory} holds checkpoints of another run: {told}")
        if number > schedule.evaluated[-1]:
            raise ValueError(
                f"the run in {self.directory} is at round {number}, past the requested {schedule.evaluated[-1]}: pass "
                f"extend={schedule.extension(number, rounds_per_epoch)}"
            )
        self._kept = [number]
        leaves, structure = jax.tree.flatten(starts[0])
        saved = [arrays.pop(f"state/{index}") for index in range(len(leaves))]
        runs = [
            jax.tree.unflatten(structure, [_like(array[run], leaf) for array, leaf in zip(saved, leaves, strict=True)])
            for run in range(len(starts))
        ]
        columns = {name: arrays[f"history/{name}"] for name in MEASURED}
        extra = {name.removeprefix("extra/"): values for name, values in arrays.items() if name.startswith("extra/")}
        records = [
            Record(
                round=int(at),
                epoch=float(arrays["history/epoch"][t]),
                extra={name: values[t] for name, values in extra.items()},
                **{name: values[t] for name, values in columns.items()},
            )
            for t, at in enumerate(arrays["history/round"])
        ]
        kept: dict[str, Any] = {name: arrays[f"tally/{name}"] for name in Tally._fields}
        return runs, records, Tally(**kept | {name: int(kept[name]) for name in ("round", "rounds")})

    def _newest(self) -> tuple[int, dict[str, np.ndarray]] | None:
        """Returns round and content of the newest valid checkpoint; None if there is no checkpoint."""
        assert self.directory is not None
        names = [path.stem.removeprefix(_PREFIX) for path in self.directory.glob(f"{_PREFIX}*.npz")]
        bad: list[str] = []
        for number in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
            try:
                found = number, files.read_arrays(self._path(number))
            except Exception as error:  # NumPy, zipfile and the system raise many kinds
                bad.append(f"{self._path(number)} is corrupt or cannot be read ({error})")
                continue
            if bad:
                told = f"{'; '.join(bad)}: the run continues from {self._path(number)}, with the same bits"
                _checks.warn(told, RuntimeWarning)
            return found
        if bad:
            raise ValueError(f"{'; '.join(bad)}: remove the folder {self.directory} to start over")
        return None

    def _path(self, number: int) -> pathlib.Path:
        assert self.directory is not None
        return self.directory / f"{_PREFIX}{number}.npz"


def _by_first_process(act: Callable[[], T]) -> T | None:
    """Calls a function in the first process; returns None in others. If it raises an error, all processes do."""
    result: T | None = None
    problem: Exception | None = None
    if jax.process_index() == 0:
        try:
            result = act()
        except Exception as error:
            problem = error
    if of_first_process(problem is not None):
        raise problem or ValueError("the first process refused checkpoint_dir: see its error")
    return result


def _check_folder(directory: pathlib.Path) -> None:
    """Raises a `ValueError` unless the path is new, an empty folder or a folder of checkpoints."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"checkpoint_dir={str(directory)!r} is a file: pass a folder")
    if not directory.exists() or (directory / _NAME).exists():
        return
    others = [entry.name for entry in directory.iterdir()]
    if others := [name for name in others if name != _LOCK and not name.startswith(f".{_NAME}")]:
        raise ValueError(
            f"checkpoint_dir={str(directory)!r} holds {others[0]} but no {_NAME}: pass a new or empty folder"
        )


@contextlib.contextmanager
def _locked(directory: pathlib.Path) -> Iterator[None]:
    """Locks a folder; raises a `ValueError` if another process has locked it. The lock ends with the process."""
    with contextlib.ExitStack() as stack:
        taken = None
        try:
            (directory / _LOCK).touch()
            # Without a buffer, so that closing has nothing to write and cannot fail.
            file = stack.enter_context((directory / _LOCK).open("r+b", buffering=0))
            taken = files.try_lock(file)
        except OSError as error:  # a read-only folder, or a file system without locks
            told = f"{directory} cannot be locked ({error}): make sure that no other process uses it"
            _checks.warn(told, RuntimeWarning)
        if taken is False:
            holder = file.read(1000).decode(errors="replace") or "another process"
            raise ValueError(
                f"checkpoint_dir={str(directory)!r} is in use by {holder}: wait until it ends, or pass another folder"
            )
        if taken:
            with contextlib.suppress(OSError):  # the lock works without the name
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def _remembered(directory: pathlib.Path, new: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `run.json`, which a new folder gets from `new`."""
    path = directory / _NAME
    if not path.exists():
        files.write_json(path, new)
        return new
    try:
        found = files.read_json(path)
        if found.keys() >= new.keys():
            return found
    except ValueError:
        pass
    raise ValueError(f"{path} is corrupt: remove the folder {directory} to start over")


def _plain(leaf: Any) -> np.ndarray:
    """Converts an array to a type that NumPy can save: random keys and types like bfloat16 become integers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _like(found: np.ndarray, leaf: Any) -> jax.Array:
    """Inverts `_plain`. Returns a copy, whose memory the program may donate."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(found), impl=jax.random.key_impl(leaf))
    return jnp.array(found.view(leaf.dtype) if leaf.dtype.kind == "V" else found)
