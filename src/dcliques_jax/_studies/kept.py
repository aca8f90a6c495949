"""Measurements of a run in a folder: simulated once, resumed after an interruption, kept without models."""

import dataclasses
import pathlib
import shutil
import time
from typing import Any

from dcliques_jax._simulate import simulate
from dcliques_jax.results import Result

_CHECKPOINT, _MEASURED = "checkpoint", "measured.npz"


def found(folder: pathlib.Path) -> Result | None:
    """Loads what was measured; None if nothing was kept."""
    path = folder / _MEASURED
    return Result.load(path) if path.exists() else None


def is_unfinished(folder: pathlib.Path) -> bool:
    """Whether a run in this folder was interrupted."""
    return (folder / _CHECKPOINT).exists()


def trained(folder: pathlib.Path, topology: Any, dataset: Any, **arguments: Any) -> tuple[Result, float]:
    """Simulates with a checkpoint in the folder; returns the result and how many seconds it took.

    Ctrl-C raises `KeyboardInterrupt`, so that it ends the following runs, too. The checkpoint stays.
    """
    started = time.monotonic()
    result = simulate(topology, dataset, checkpoint_dir=folder / _CHECKPOINT, **arguments)
    if result.interrupted:
        raise KeyboardInterrupt
    return result, time.monotonic() - started


def keep(folder: pathlib.Path, result: Result, *, finished: bool = True, **about: Any) -> Result:
    """Keeps the measurements of a result, and of an unfinished run the checkpoint with its models."""
    kept = dataclasses.replace(result, params={}, state=None, provenance=result.provenance | about)
    folder.mkdir(parents=True, exist_ok=True)
    kept.save(folder / _MEASURED)
    if finished:
        shutil.rmtree(folder / _CHECKPOINT, ignore_errors=True)
    return kept


def without_examples(result: Result) -> Result:
    """Drops what was measured per example, the largest part of a history."""
    history = result.history
    none: Any = {name: getattr(history, name)[..., :0] for name in ("nodes_right", "eval_examples")}
    return dataclasses.replace(result, history=dataclasses.replace(history, **none))
