"""What a folder of runs holds. Runs of one setting with different seeds or initial models are put together."""

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcliques_jax._store import files
from dcliques_jax.results import MEASURED, Result

_OF_RUNS = (*MEASURED, "eval_nodes", "eval_examples")  # the fields of a history with the seeds on their first axis
_OF_SETTING = ("partitions", "topologies", "algorithms")  # the labels that make the name of a setting


def all_found(folder: pathlib.Path) -> dict[str, Any]:
    """Loads what was measured, by name: a `Result` of a setting, or skews `[experiments, steps]` of a study."""
    skews: dict[str, np.ndarray] = {}
    results: dict[str, list[Result]] = collections.defaultdict(list)
    for path in sorted(folder.glob("runs/*/measured.npz")):
        if path.parent.name.startswith("skew-"):
            name, measured = path.parent.name.rpartition("-")[0], skews_of(path)
            skews[name] = max(skews.get(name, measured[:0]), measured, key=len)
            continue
        result = Result.load(path)
        results["-".join(result.provenance["case"][label] for label in _OF_SETTING)].append(result)
    return {name: together(several) for name, several in results.items()} | skews


def skews_of(path: pathlib.Path) -> np.ndarray:
    """Reads the skews of a study."""
    try:
        return files.read_arrays(path)["skew"]
    except Exception as error:  # NumPy and zipfile raise many errors for other files
        raise ValueError(f"{path} is corrupt ({error}): remove it to measure again") from error


def together(results: Sequence[Result]) -> Result:
    """Puts runs with different seeds or initial models together.

    Only runs that were evaluated alike fit together: of all such groups the one that was run longest is returned, and
    of those the one with most seeds. A seed that was run twice counts once.
    """
    groups: dict[Any, dict[tuple[int, str], tuple[Result, int]]] = collections.defaultdict(dict)
    for result in sorted(results, key=lambda result: -len(result.provenance["seeds"])):
        history, runs = result.history, runs_of(result)
        alike = (*history.epoch, history.eval_examples.shape[-1], history.eval_nodes.shape[-1])
        for place, run in enumerate(runs):
            groups[alike].setdefault(run, (result, place))
    chosen = max(groups.values(), key=lambda group: (_last_epoch(group), len(group)))
    return _joined([chosen[run] for run in sorted(chosen)])


def runs_of(result: Result) -> list[tuple[int, str]]:
    """Returns the seed and the kind of initial models of every run."""
    seeds, init = result.provenance["seeds"], result.provenance["init"]
    return list(zip(seeds, init if isinstance(init, list) else [init] * len(seeds), strict=True))


def _last_epoch(group: dict[Any, tuple[Result, int]]) -> float:
    return max(float(result.history.epoch[-1]) for result, _ in group.values())


def _joined(chosen: list[tuple[Result, int]]) -> Result:
    """Returns a result with the chosen runs, one per seed."""
    first, results = chosen[0][0], list({id(result): result for result, _ in chosen}.values())
    fields: dict[str, Any] = {
        name: np.stack([getattr(result.history, name)[k] for result, k in chosen]) for name in _OF_RUNS
    }
    seeds, inits = zip(*(runs_of(result)[k] for result, k in chosen), strict=True)
    about: dict[str, Any] = {"seeds": list(seeds), "init": list(inits)}
    about["seconds"] = sum(result.provenance["seconds"] for result in results)
    about["final"] = None
    if all(result.provenance["final"] is not None for result in results):
        names = first.provenance["final"]
        about["final"] = {name: [result.provenance["final"][name][k] for result, k in chosen] for name in names}
    history = dataclasses.replace(first.history, **fields)
    return dataclasses.replace(first, topology=[], traffic=(), history=history, provenance=first.provenance | about)
