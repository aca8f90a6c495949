"""Runs that go on where they were stopped.

A folder holds `run.json`, which tells the run it belongs to, and the last checkpoint, written by orbax: whole or not at
all, whenever the process is killed. Nothing that is read from it can run code.
"""

import functools
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax import _files
from dcliques_jax._checks import checksum
from dcliques_jax._devices import of_first_process
from dcliques_jax._programs import SimulationState
from dcliques_jax.results import Record

_NAME = "run.json"
_SPACING = 20  # times as long as saving took, until the next save: at most a twentieth of the time goes into it


class Checkpoints:
    """The checkpoints of a run in a folder; without a folder nothing is saved or found."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self.directory = None if directory is None else pathlib.Path(directory).absolute()
        self._saved_round, self._next_save = -1, 0.0  # the round last saved, and the time from which to save again

    @functools.cached_property
    def _orbax(self) -> tuple[Any, Any]:
        """Orbax, and its manager of a folder of which only the last whole checkpoint is kept."""
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]

        assert self.directory is not None
        options = ocp.CheckpointManagerOptions(
            max_to_keep=1, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        return ocp, ocp.CheckpointManager(self.directory / "checkpoints", options=options)

    def part(self, number: int) -> "Checkpoints":
        """The checkpoints of a part of the runs, in a folder of their own."""
        return Checkpoints(None if self.directory is None else self.directory / f"from_run_{number}")

    def remembered(self, **value: int) -> int:
        """One number, as it was when the folder was new."""
        ((name, number),) = value.items()
        return number if self.directory is None else int(_remembered(self.directory, value)[name])

    def check(self, identity: dict[str, Any], starts: Sequence[SimulationState]) -> None:
        """Raises a `ValueError` if the folder belongs to a run of another identity; a new folder gets this one.

        The state before the first round is part of it: matrices, initial models and numbers that an optimiser keeps in
        its state are no part of the program.
        """
        if self.directory is None:
            return
        identity = identity | {"start": checksum(*map(_plain, jax.tree.leaves(starts)))}
        identity = json.loads(json.dumps(identity))  # as it is read back
        found = _remembered(self.directory, identity)
        names = [name for name in {**identity, **found} if found.get(name) != identity.get(name)]
        if names:
            differing = "; ".join(f"{name} was {found.get(name)} and is {identity.get(name)}" for name in names)
            raise ValueError(
                f"{self.directory} holds checkpoints of another run: {differing}. Pass the same arguments, or another "
                "checkpoint_dir"
            )

    def due(self) -> bool:
        """Whether the last save is long enough ago, by the clock of the first process: all must save at once."""
        return self.directory is not None and bool(of_first_process(time.monotonic() >= self._next_save))

    def save(self, state: SimulationState, records: list[Record]) -> None:
        """Saves all that is needed to go on, in the place of what was saved before."""
        if self.directory is None or records[-1].round == self._saved_round:
            return
        started = time.monotonic()
        leaves = {str(number): _plain(leaf) for number, leaf in enumerate(jax.tree.leaves(state))}
        history = {name: np.stack([getattr(record, name) for record in records]) for name in Record._fields}
        ocp, manager = self._orbax
        args = {"state": ocp.args.StandardSave(leaves), "history": ocp.args.StandardSave(history)}
        manager.save(records[-1].round, args=ocp.args.Composite(**args))
        self._saved_round, ended = records[-1].round, time.monotonic()
        self._next_save = ended + _SPACING * (ended - started)

    def restore(self, starts: list[SimulationState], last: int) -> tuple[list[SimulationState], list[Record]]:
        """What was saved last; the given states and no records if nothing was. It must not be later than asked for."""
        if self.directory is None:
            return starts, []
        ocp, manager = self._orbax
        step = manager.latest_step()
        if step is None:
            return starts, []
        leaves, structure = jax.tree.flatten(jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts))
        like = {str(number): _plain(leaf) for number, leaf in enumerate(leaves)}
        if step > last:
            raise ValueError(
                f"the run in {self.directory} is at round {step}, further than the {last} that were asked for: pass "
                "extend= as before"
            )
        args = {"state": ocp.args.StandardRestore(like), "history": ocp.args.StandardRestore()}
        try:
            found = manager.restore(step, args=ocp.args.Composite(**args))
        except Exception as error:  # whatever the library raises for files that it cannot read
            raise ValueError(
                f"the checkpoint in {self.directory} cannot be read ({error}): remove the folder to start afresh"
            ) from error
        self._saved_round = step
        restored = [_like(found["state"][str(number)], leaf) for number, leaf in enumerate(leaves)]
        columns = [np.asarray(found["history"][name]) for name in Record._fields]
        records = [Record(*row) for row in zip(*columns, strict=True)]
        runs = [jax.tree.unflatten(structure, [leaf[run] for leaf in restored]) for run in range(len(starts))]
        return runs, records


def _remembered(directory: pathlib.Path, new: dict[str, Any]) -> dict[str, Any]:
    """What a folder says of its run; a new folder is told it first."""
    path = directory / _NAME
    if of_first_process(path.exists()):
        try:
            found = json.loads(path.read_text())
        except ValueError:
            found = None
        if isinstance(found, dict) and found.keys() & new.keys():
            return found
        raise ValueError(f"{path} is corrupt: remove the folder {directory} to start afresh")
    if jax.process_index() > 0:  # the first process writes
        return new
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"checkpoint_dir={str(directory)!r} is a file: pass a folder")
    directory.mkdir(parents=True, exist_ok=True)
    if others := [entry.name for entry in directory.iterdir() if not entry.name.startswith(f".{_NAME}")]:
        raise ValueError(
            f"checkpoint_dir={str(directory)!r} holds {others[0]} but no {_NAME}: pass a new or empty folder"
        )
    with _files.replacing(path) as file:
        file.write(json.dumps(new, indent=1).encode())
    return new


def _plain(leaf: jax.Array) -> jax.Array:
    """Keys of random generators as the integers they hold."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _like(found: jax.Array, leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(found, impl=jax.random.key_impl(leaf))
    return jnp.asarray(found)
