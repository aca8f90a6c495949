"""Runs experiments by name and reports their outcome."""

import csv
import io
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dcliques_jax import _checks
from dcliques_jax._store import files
from dcliques_jax.datasets import Dataset
from dcliques_jax.paper import figures
from dcliques_jax.paper.claims import Curve, Verdict, judged
from dcliques_jax.paper.experiments import EXPERIMENTS, Experiment
from dcliques_jax.paper.found import all_found, runs_of
from dcliques_jax.paper.runs import SCALES, Runs, Scale
from dcliques_jax.results import Result

_CONFIG = "config.json"
_MARKS = {"holds": "yes", "DOES NOT HOLD": "**no**", "open": "open", "cannot be told": "?"}
_SO_FAR = _MARKS | {"holds": "so far", "DOES NOT HOLD": "**not so far**"}


class Outcome(NamedTuple):
    """The outcome of an experiment. It prints as a list of claims."""

    name: str
    measured: dict[str, Any]  # results by label, or skews [experiments, steps]
    verdicts: dict[str, Verdict]  # by the text of the claim
    folder: pathlib.Path  # with the figure and a summary

    def __str__(self) -> str:
        experiment = EXPERIMENTS[self.name]
        lines = [f"{self.name} ({experiment.figure}): {experiment.title}", *self._extent()]
        return "\n".join([*lines, *(f"  {claim}\n      {verdict}" for claim, verdict in self.verdicts.items())])

    @property
    def _curves(self) -> dict[str, Result]:
        return {label: result for label, result in self.measured.items() if isinstance(result, Result)}

    def markdown(self) -> str:
        """Formats the outcome in Markdown, with the figure."""
        experiment = EXPERIMENTS[self.name]
        lines = [f"## {self.name}", "", f"{experiment.title} ({experiment.figure}).", ""]
        if self.measured:
            lines += [f"![{experiment.title}]({self.name}/figure.png)", "", *self._extent(), ""]
        if any(result.provenance["final"] for result in self._curves.values()):
            lines += ["| on all test examples, % | seed | epoch | mean over nodes | lowest node | mean model |"]
            lines += ["|---" * 6 + "|"]
            lines += [row for label, result in self._curves.items() for row in _ends(label, result)] + [""]
        lines += ["| claim | holds | margin | measured |", "|---|---|---|---|"]
        run = [result.history.epoch[-1] for result in self._curves.values()]
        planned = [result.provenance["epochs"] for result in self._curves.values()]
        marks = _SO_FAR if min(run, default=0) < max(planned, default=0) else _MARKS
        rows = [
            f"| {text} | {marks[found.words]} | {found.told_margin} | {found.numbers} |"
            for text, found in self.verdicts.items()
        ]
        return "\n".join([*lines, *rows, ""])

    def _extent(self) -> list[str]:
        """Tells how much was run."""
        results = list(self._curves.values())
        if not results:
            return sorted({f"Experiments: {len(skews)}." for skews in self.measured.values()})

        def parts(counts: Iterable[tuple[float, int]]) -> str:
            return ", ".join(f"{part:,g} of {whole:,}" for part, whole in sorted(set(counts)))

        epochs = parts((result.history.epoch[-1], result.provenance["epochs"]) for result in results)
        nodes = parts((result.history.eval_nodes.shape[-1], result.provenance["num_nodes"]) for result in results)
        examples = ", ".join(f"{count:,}" for count in sorted({r.history.eval_examples.shape[-1] for r in results}))
        seeds = ", ".join(str(count) for count in sorted({len(set(result.provenance["seeds"])) for result in results}))
        inits = sorted({init for result in results for _, init in runs_of(result)} - {"shared"})
        seconds = sum(result.provenance["seconds"] for result in results)
        left_out = sum(result.provenance.get("left_out", 0) for result in results)
        told = [f"Epochs run: {epochs}", f"seeds: {seeds}", f"nodes evaluated: {nodes}"]
        told += [f"test examples: {examples}", f"{seconds / 60:.1f} minutes in all"]
        told += [f"some initial models: {', '.join(inits)}"] if inits else []
        told += [f"runs left out, which were shorter or evaluated otherwise: {left_out}"] if left_out else []
        return ["; ".join(told) + "."]


def run(
    name: str,
    *,
    scale: str | Scale = "quick",
    seeds: int = 1,
    first_seed: int = 0,
    init: str = "shared",
    out: str | os.PathLike[str] = "paper-results",
    resume: bool = False,
    until: int | None = None,
    datasets: Mapping[str, Dataset] | None = None,
    progress: bool = True,
) -> Outcome:
    """Runs an experiment of the paper and checks its claims.

    Experiments share runs of the same setting. Finished runs in `out` are reused.

    Args:
      name: one of `EXPERIMENTS`.
      scale: `"full"` is the paper's scale, `"quick"` trains for fewer epochs and evaluates on fewer examples.
      seeds: number of seeds, which run at once if memory allows. A seed determines partition, topology, initial models
        and order of examples.
      first_seed: the first seed. The others follow it.
      init: the initial models, as in `simulate`.
      out: the output folder.
      resume: whether to continue interrupted runs.
      until: epoch after which every run stops. A later call with `resume=True` continues.
      datasets: data sets to use instead of `"mnist"` and `"cifar10"`.
      progress: whether to show progress bars.
    """
    _checks.choice("name", name, tuple(EXPERIMENTS))
    if isinstance(scale, str):
        _checks.choice("scale", scale, tuple(SCALES))
        scale = SCALES[scale]
    if until is not None:
        until = _checks.integer("until", until, 1)
    options = {"first_seed": first_seed, "init": init, "until": until, "resume": resume}
    runs = Runs(pathlib.Path(out), scale, seeds, datasets=datasets, progress=progress, **options)  # type: ignore[arg-type]
    folder, parts = runs.out / name, EXPERIMENTS[name].parts
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {label: {"folder": runs.folder(part).name} | runs.wanted(part) for label, part in parts.items()}
    config = {"experiment": name, **runs.described(), "parts": wanted}
    if not (folder / _CONFIG).exists():  # an interrupted run leaves one, but does not replace that of a finished one
        files.write_json(folder / _CONFIG, config)
    measured = {label: runs.measure(part) for label, part in parts.items()}
    files.write_json(folder / _CONFIG, config)
    return _outcome(name, runs.out, measured)


def report(out: str | os.PathLike[str]) -> list[Outcome]:
    """Reports all experiments of a folder, as far as they were run, and writes them to `report.md`.

    An experiment is reported if it was run, or if runs of others tell something about its claims. Runs of a setting
    with different seeds or initial models are judged together, if they were run for as long and evaluated alike;
    otherwise the longest ones count, and the report says how many were left out.

    Args:
      out: the output folder of `run`.
    """
    folder = pathlib.Path(out)
    found, outcomes = all_found(folder), []
    for name, experiment in EXPERIMENTS.items():
        measured = {label: found[part.name] for label, part in experiment.parts.items() if part.name in found}
        told = any(verdict.words != "cannot be told" for verdict in _verdicts(name, measured).values())
        needs_no_run = bool(found) and not experiment.parts
        if (measured and told) or needs_no_run or (folder / name / _CONFIG).exists():
            outcomes.append(_outcome(name, folder, measured))
    if not outcomes:
        raise ValueError(f"{folder} holds no results: run an experiment with --out {folder}")
    with files.replacing(folder / "report.md") as file:
        file.write("\n".join(outcome.markdown() for outcome in outcomes).encode())
    return outcomes


def _outcome(name: str, out: pathlib.Path, measured: dict[str, Any]) -> Outcome:
    """Judges and draws what was measured."""
    experiment, folder = EXPERIMENTS[name], out / name
    folder.mkdir(exist_ok=True)
    figure = figures.draw(experiment, measured)
    if figure is not None:
        import matplotlib.pyplot as plt

        for kind in ("png", "svg"):
            with files.replacing(folder / f"figure.{kind}") as file:
                figure.savefig(file, format=kind, dpi=90)
        plt.close(figure)
    if isinstance(experiment, Experiment):
        _write_summary(folder / "summary.csv", measured)
    return Outcome(name, measured, _verdicts(name, measured), folder)


def _verdicts(name: str, measured: Mapping[str, Any]) -> dict[str, Verdict]:
    curves = {label: _curve(value) if isinstance(value, Result) else value for label, value in measured.items()}
    return {claim.text: judged(claim, curves) for claim in EXPERIMENTS[name].claims}


def _curve(result: Result) -> Curve:
    history = result.history
    accuracy, mean_model = (
        100 * values.astype(np.float64) for values in (history.accuracy, history.mean_model_accuracy)
    )
    right = 100 * history.nodes_right.astype(np.float64) / history.accuracy.shape[-1]
    return Curve(history.epoch, accuracy, right, history.eval_examples, mean_model, runs_of(result))


def _ends(label: str, result: Result) -> list[str]:
    """Returns one row per run with its last accuracies on all test examples; none if they are not known."""
    about, history = result.provenance, result.history
    ends = about["final"]
    if ends is None and about["eval_examples"] is None:
        last = history.accuracy[:, -1].astype(np.float64)
        ends = {"mean": last.mean(axis=1), "lowest": last.min(axis=1), "of mean": history.mean_model_accuracy[:, -1]}
    rows: list[str] = []
    for (seed, init), *values in zip(runs_of(result), *ends.values(), strict=True) if ends else ():
        if None not in values:
            cells = [label, f"{seed}" if init == "shared" else f"{seed}, {init}", f"{history.epoch[-1]:g}"]
            rows.append("| " + " | ".join([*cells, *(f"{100 * value:.1f}" for value in values)]) + " |")
    return rows


def _write_summary(path: pathlib.Path, results: Mapping[str, Result]) -> None:
    """Writes one row per curve, seed and evaluation."""
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["curve", "seed", "init", "epoch", "mean", "min", "max", "consensus_distance"])
    for label, result in results.items():
        for number, (seed, init) in enumerate(runs_of(result)):
            accuracy = result.history.accuracy[number].astype(np.float64)
            for epoch, nodes, distance in zip(
                result.history.epoch, accuracy, result.history.consensus_distance[number], strict=True
            ):
                numbers = [f"{value:.5f}" for value in (nodes.mean(), nodes.min(), nodes.max(), distance)]
                rows.writerow([label, seed, init, f"{epoch:g}", *numbers])
    with files.replacing(path) as file:
        file.write(text.getvalue().encode())
