"""Measurements of a run in a folder: simulated once, resumed after an interruption, kept without models."""

import dataclasses
import pathlib
import shutil
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dcliques_jax._simulate import simulate
from dcliques_jax._store import files
from dcliques_jax.results import Result

_CHECKPOINT, _MEASURED, _FINAL = "checkpoint", "measured.npz", "final.npz"
_MEASURED_AT_THE_END = ("accuracy", "mean_model_accuracy", "nodes_right")


class Trained(NamedTuple):
    """A run that has ended or was stopped."""

    result: Result
    seconds: float  # of all calls that were not killed
    # all last models on all test examples; None: stopped, a sweep, or in the history
    final: Mapping[str, np.ndarray] | None


def found(folder: pathlib.Path) -> Result | None:
    """Loads what was measured; None if nothing was kept."""
    path = folder / _MEASURED
    return Result.load(path) if path.exists() else None


def is_finished(result: Result) -> bool:
    """Whether a run has its whole length."""
    about, history = result.provenance, result.history
    if about.get("rounds") is not None:
        return bool(history.round[-1] >= about["rounds"])
    return bool(history.epoch[-1] >= about["epochs"])


def has_checkpoint(folder: pathlib.Path) -> bool:
    """Whether a run in this folder was interrupted or stopped."""
    return (folder / _CHECKPOINT).exists()


def trained(folder: pathlib.Path, topology: Any, dataset: Any, *, until: float | None, **arguments: Any) -> Trained:
    """Simulates with a checkpoint in the folder.

    A run that is evaluated on some nodes or examples, and is not a sweep, is evaluated on all of them once more at its
    end: tables tell that accuracy. Ctrl-C raises `KeyboardInterrupt`, so that it ends the following runs, too. The
    checkpoint stays.
    """
    started, before = time.monotonic(), found(folder)
    result = simulate(
        topology,
        dataset,
        checkpoint_dir=folder / _CHECKPOINT,
        on_nonfinite="warn",  # divergence is a result, too
        on_evaluation=None if until is None else lambda record: record.epoch >= until,
        **arguments,
    )
    if result.interrupted:
        raise KeyboardInterrupt
    last = None
    partly = any(arguments.get(name) is not None for name in ("eval_nodes", "eval_examples"))
    if partly and arguments.get("sweep") is None and is_finished(result):
        last = _on_everything(topology, dataset, result, arguments)
    seconds = time.monotonic() - started + (0.0 if before is None else before.provenance["seconds"])
    return Trained(result, seconds, last)


def keep(folder: pathlib.Path, trained: Trained, result: Result, **about: Any) -> Result:
    """Keeps measurements of a run, and if it was stopped, the checkpoint with its models.

    Args:
      folder: the folder of the run.
      trained: the run.
      result: what to keep of its result.
      **about: further provenance.
    """
    about |= {"seconds": round(trained.seconds, 1), "final": _told(trained.final)}
    kept = dataclasses.replace(result, params={}, state=None, provenance=result.provenance | about)
    folder.mkdir(parents=True, exist_ok=True)
    if trained.final is not None:
        files.write_arrays(folder / _FINAL, dict(trained.final))
    kept.save(folder / _MEASURED)
    if is_finished(trained.result):
        shutil.rmtree(folder / _CHECKPOINT, ignore_errors=True)
    return kept


def best(result: Result, metric: str | None = None) -> Result:
    """Returns the best combination of a sweep; all of them if every one diverged."""
    return result if result.diverged().all() else result.best(metric)


def without_examples(result: Result) -> Result:
    """Drops what was measured per example, the largest part of a history."""
    history = result.history
    none: Any = {name: getattr(history, name)[..., :0] for name in ("nodes_right", "eval_examples")}
    return dataclasses.replace(result, history=dataclasses.replace(history, **none))


def _on_everything(topology: Any, dataset: Any, result: Result, arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Evaluates the last models of all nodes on all examples."""
    names = ("model", "algorithm", "batch_size", "augment", "faults", "seeds", "evaluate_on")
    same = {name: arguments[name] for name in names if name in arguments}
    again = simulate(
        topology, dataset, **same, init=result.state, rounds=0, on_nonfinite="warn", progress=False
    )  # in groups of seeds that fit into memory
    if again.interrupted:
        raise KeyboardInterrupt
    return {name: getattr(again.history, name)[:, -1] for name in _MEASURED_AT_THE_END}


def _told(final: Mapping[str, np.ndarray] | None) -> dict[str, list[float]] | None:
    """Returns accuracies of each seed as plain values, with the names of a table of evaluations."""
    if final is None:
        return None
    of_nodes = final["accuracy"].astype(np.float64)
    told = {"accuracy": of_nodes.mean(axis=-1), "accuracy_min": of_nodes.min(axis=-1)}
    return {name: value.tolist() for name, value in told.items()} | {
        "mean_model_accuracy": final["mean_model_accuracy"].astype(np.float64).tolist()
    }
