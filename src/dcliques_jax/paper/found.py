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
_FINAL = ("accuracy", "accuracy_min", "mean_model_accuracy")  # what is known of the end of a run
_ALIKE = ("dataset_checksum", "model", "algorithm", "batch_size")  # what runs of one setting have in common


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

    Only runs on the same data, trained and evaluated alike, fit together. Of all such groups the one that was run
    longest is returned, of those the one with most seeds, then that with most test examples, nodes and evaluations. A
    run that was made twice counts once. `provenance["left_out"]` counts the runs that do not fit.
    """
    groups: dict[Any, dict[tuple[int, str], tuple[Result, int]]] = collections.defaultdict(dict)
    for result in sorted(results, key=lambda result: -len(result.provenance["seeds"])):
        history, about = result.history, tuple(str(result.provenance[name]) for name in _ALIKE)
        sizes = (history.eval_examples.shape[-1], history.eval_nodes.shape[-1])
        for place, run in enumerate(runs_of(result)):
            groups[(sizes, tuple(history.epoch), about)].setdefault(run, (result, place))

    def rank(alike: Any) -> Any:
        sizes, epochs, _ = alike
        return (epochs[-1], len({seed for seed, _ in groups[alike]}), *sizes, len(epochs), alike)

    chosen = groups[max(groups, key=rank)]
    left_out = sum(len(group) for group in groups.values()) - len(chosen)
    return _joined([chosen[run] for run in sorted(chosen)], left_out)


def runs_of(result: Result) -> list[tuple[int, str]]:
    """Returns the seed and the kind of initial models of every run."""
    seeds, init = result.provenance["seeds"], result.provenance["init"]
    return list(zip(seeds, init if isinstance(init, list) else [init] * len(seeds), strict=True))


def _joined(chosen: list[tuple[Result, int]], left_out: int) -> Result:
    """Returns a result with the chosen runs, one per seed and kind of initial models."""
    first, results = chosen[0][0], list({id(result): result for result, _ in chosen}.values())
    fields: dict[str, Any] = {
        name: np.stack([getattr(result.history, name)[k] for result, k in chosen]) for name in _OF_RUNS
    }
    seeds, inits = zip(*(runs_of(result)[k] for result, k in chosen), strict=True)
    about: dict[str, Any] = {"seeds": list(seeds), "init": list(inits), "left_out": left_out}
    about["seconds"] = sum(result.provenance["seconds"] for result in results)
    if any(result.provenance["final"] for result in results):  # None for runs that were stopped
        finals = [(result.provenance["final"] or {}, k) for result, k in chosen]
        about["final"] = {name: [final[name][k] if final else None for final, k in finals] for name in _FINAL}
    history = dataclasses.replace(first.history, **fields)
    return dataclasses.replace(first, topology=[], traffic=(), history=history, provenance=first.provenance | about)
