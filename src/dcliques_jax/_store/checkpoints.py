"""Runs that go on where they were stopped.

A folder holds `run.json`, which tells how it is divided, and in `from_run_<number>` the last two checkpoints of some
runs. A checkpoint is one file, `round_<number>.npz`: the state, the history and what the run is recognised by, with
checksums of them all. It is written whole or not at all, whenever the process is killed; nothing in it can run code.
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
from dcliques_jax._engine.losses import Losses
from dcliques_jax._engine.plan import Schedule
from dcliques_jax._mesh.transfer import of_first_process
from dcliques_jax._store import files
from dcliques_jax._store.provenance import differences
from dcliques_jax.results import MEASURED, Record, State

_NAME, _LOCK, _PREFIX = "run.json", "lock", "round_"
_KEPT = 2  # checkpoints: the last, and one to go on from if the disk has spoilt it
_SPACING = 20  # times as long as saving took, until the next save: at most a twentieth of the time goes into it

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run in a folder; without a folder nothing is saved or found."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        if not isinstance(directory, (str, os.PathLike, type(None))):
            raise ValueError(f"checkpoint_dir={directory!r} must be the path of a folder")
        self.directory = None if directory is None else pathlib.Path(directory).expanduser().absolute()
        self._identity: dict[str, Any] = {}  # what the run is recognised by
        self._kept: list[int] = []  # the rounds of checkpoints that are known to be good
        self._next_save = 0.0  # the time from which to save again

    @contextlib.contextmanager
    def opened(self, *, runs_at_once: int) -> Iterator[int]:
        """Keeps other processes out of the folder. Yields `runs_at_once` as it was when the folder was new."""
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
                except OSError as error:  # nothing is lost yet
                    told = f"checkpoint_dir={str(directory)!r} cannot be used ({error}): pass another folder"
                    raise ValueError(told) from error

            yield of_first_process(_by_first_process(take) or 0)

    def part(self, number: int) -> "Checkpoints":
        """The checkpoints of a part of the runs, in a folder of their own."""
        return Checkpoints(None if self.directory is None else self.directory / f"from_run_{number}")

    def due(self) -> bool:
        """Whether the last save is long enough ago, by the clock of the first process: all must save at once."""
        return self.directory is not None and bool(of_first_process(time.monotonic() >= self._next_save))

    def save(self, state: State, records: list[Record], losses: Losses) -> None:
        """Saves all that is needed to go on. If that fails, warns and keeps the last checkpoint."""
        number = losses.round
        if self.directory is None or number in self._kept or jax.process_index() > 0:  # the first process writes
            return
        started = time.monotonic()
        try:
            self._write(number, state, records, losses)
        except OSError as error:
            last = f"the checkpoint of round {self._kept[-1]} stays" if self._kept else "there is none before"
            _checks.warn(
                f"no checkpoint of round {number} could be saved in {self.directory} ({error}): {last}, and the run "
                "goes on",
                RuntimeWarning,
            )
        ended = time.monotonic()
        self._next_save = ended + _SPACING * (ended - started)

    def _write(self, number: int, state: State, records: list[Record], losses: Losses) -> None:
        assert self.directory is not None
        arrays = {f"state/{index}": _plain(leaf) for index, leaf in enumerate(jax.tree.leaves(state))}
        for name in ("round", "epoch", *MEASURED):
            arrays[f"history/{name}"] = np.stack([getattr(record, name) for record in records])
        for name in records[0].extra if records else ():
            arrays[f"extra/{name}"] = np.stack([record.extra[name] for record in records])
        arrays |= {f"losses/{name}": np.asarray(value) for name, value in losses._asdict().items()}
        arrays["identity"] = np.array(json.dumps(self._identity))
        self.directory.mkdir(exist_ok=True)
        files.write_arrays(self._path(number), arrays, compressed=False)
        self._kept = [*self._kept, number][-_KEPT:]
        kept = [self._path(number) for number in self._kept]
        for path in self.directory.iterdir():  # older ones, and what a killed process left of one
            if path.name.lstrip(".").startswith(_PREFIX) and path not in kept:
                path.unlink(missing_ok=True)

    def restore(
        self, identity: Callable[[], dict[str, Any]], starts: list[State], schedule: Schedule, rounds_per_epoch: int
    ) -> tuple[list[State], list[Record], Losses] | None:
        """What was saved last; None if nothing was. `starts` are the states before the first round.

        Raises a `ValueError` if it is of a run of another identity, or later than the end of the schedule.
        """
        if self.directory is None:
            return None
        self._identity = json.loads(json.dumps(identity()))  # as it is read back
        found = _by_first_process(self._newest)
        number = of_first_process(-1 if found is None else found[0])
        if number < 0:
            return None
        arrays = found[1] if found else files.read_arrays(self._path(number))
        if told := differences(json.loads(str(arrays["identity"])), self._identity):
            raise ValueError(f"{self.directory} holds checkpoints of another run: {told}")
        if number > schedule.evaluated[-1]:
            raise ValueError(
                f"the run in {self.directory} is at round {number}, further than the {schedule.evaluated[-1]} that "
                f"were requested: pass extend={schedule.extension(number, rounds_per_epoch)}"
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
        losses = Losses(number, arrays["losses/sums"], arrays["losses/counts"])
        return runs, records, losses

    def _newest(self) -> tuple[int, dict[str, np.ndarray]] | None:
        """Round and content of the newest checkpoint that is as it was written; None if there is none at all."""
        assert self.directory is not None
        names = [path.stem.removeprefix(_PREFIX) for path in self.directory.glob(f"{_PREFIX}*.npz")]
        bad: list[str] = []
        for number in sorted((int(name) for name in names if name.isdecimal()), reverse=True):
            try:
                found = number, files.read_arrays(self._path(number))
            except Exception as error:  # whatever NumPy, zipfile and the system raise for files that they cannot read
                bad.append(f"{self._path(number)} is corrupt or cannot be read ({error})")
                continue
            if bad:
                told = f"{'; '.join(bad)}: the run goes on from the one before, {self._path(number)}, to the same bits"
                _checks.warn(told, RuntimeWarning)
            return found
        if bad:
            raise ValueError(f"{'; '.join(bad)}: remove the folder {self.directory} to start afresh")
        return None

    def _path(self, number: int) -> pathlib.Path:
        assert self.directory is not None
        return self.directory / f"{_PREFIX}{number}.npz"


def _by_first_process(act: Callable[[], T]) -> T | None:
    """What a function returns to the first process, None on others. If it raises an error, all do."""
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
    """Raises a `ValueError` for what is not a folder, or holds something else."""
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
    """Refuses a folder that another process has locked. A process that ends, however it does, keeps no lock."""
    with contextlib.ExitStack() as stack:
        taken = None
        try:
            (directory / _LOCK).touch()
            # Without a buffer: nothing is left to write, and to fail, when it is closed.
            file = stack.enter_context((directory / _LOCK).open("r+b", buffering=0))
            taken = files.try_lock(file)
        except OSError as error:  # a folder that cannot be written to, or a file system without locks
            told = f"{directory} cannot be locked ({error}): let no other process use it meanwhile"
            _checks.warn(told, RuntimeWarning)
        if taken is False:
            holder = file.read(1000).decode(errors="replace") or "another process"
            raise ValueError(
                f"checkpoint_dir={str(directory)!r} is in use by {holder}: wait for its end, or pass another folder"
            )
        if taken:
            with contextlib.suppress(OSError):  # the lock holds without a name, too
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield


def _remembered(directory: pathlib.Path, new: dict[str, Any]) -> dict[str, Any]:
    """What a folder says of itself; a new folder is told it first."""
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
    raise ValueError(f"{path} is corrupt: remove the folder {directory} to start afresh")


def _plain(leaf: Any) -> np.ndarray:
    """An array as NumPy's files know it: keys of random generators and types like bfloat16 as integers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.view(f"u{array.itemsize}") if array.dtype.kind == "V" else array


def _like(found: np.ndarray, leaf: Any) -> jax.Array:
    """The array that `_plain` was given; a copy, of which the program may take over the memory."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(found), impl=jax.random.key_impl(leaf))
    return jnp.array(found.view(leaf.dtype) if leaf.dtype.kind == "V" else found)
