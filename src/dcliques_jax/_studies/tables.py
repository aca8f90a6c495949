"""What a study found: one table of all evaluations, and a report in Markdown with figures."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcliques_jax import clocks
from dcliques_jax._studies import kept, runner
from dcliques_jax._studies.runner import Outcome
from dcliques_jax.results import MEASURED, Result, by_entry

_MOST_CURVES = 8  # in a figure


def load(folder: pathlib.Path) -> Any:
    """Makes one pandas table with a row per case, combination of a sweep, seed and evaluation."""
    import pandas as pd

    outcomes = [outcome for outcome in runner.kept_outcomes(folder) if outcome.result is not None]
    frames = [_frame(outcome) for outcome in outcomes]
    if not frames:
        raise ValueError(f"{folder} has no run yet")
    return pd.concat(frames, ignore_index=True)


def _frame(outcome: Outcome) -> Any:
    import pandas as pd

    result = outcome.result
    assert result is not None
    combinations = result.combinations() or [{}]
    frames = []
    for values in combinations:
        of_values = result.at(**values) if values else result
        history, seeds = of_values.history, of_values.provenance["seeds"]
        columns: dict[str, Any] = {**outcome.case.labels, **outcome.values, **values}
        columns |= {"seed": np.repeat(seeds, len(history.round)), "round": np.tile(history.round, len(seeds))}
        columns["epoch"] = np.tile(history.epoch, len(seeds))
        columns |= _columns(of_values)
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _columns(result: Result) -> dict[str, np.ndarray]:
    """Returns the measurements of each seed and evaluation, of nodes the mean and extremes."""
    history, columns = result.history, {}
    for name, axes in MEASURED.items():
        if axes == ():
            columns[name] = getattr(history, name).ravel()
        elif axes != ("eval_examples",):
            columns |= _of_nodes(name, getattr(history, name))
    for name, values in history.extra.items():
        of_nodes = result.provenance["metrics"][name] == "nodes"
        shape = (*values.shape[:3], -1) if of_nodes else (*values.shape[:2], 1, -1)
        for entry, found in by_entry(name, values.reshape(shape)).items():
            columns |= _of_nodes(entry, found) if of_nodes else {entry: found.ravel()}
    if result.traffic:
        columns["seconds_lan"] = result.seconds(clocks.LAN).ravel()
        columns["seconds_wan"] = result.seconds(clocks.WAN).ravel()
    return columns


def _of_nodes(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the mean, the least and the largest of values `[seeds, t, nodes]`."""
    found = {name: values.mean(axis=-1), f"{name}_min": values.min(axis=-1), f"{name}_max": values.max(axis=-1)}
    return {column: each.ravel() for column, each in found.items()}


def write_report(folder: pathlib.Path) -> str:
    """Writes `report.md` and figures into the folder; returns the text."""
    study, outcomes = runner.read_study(folder), runner.kept_outcomes(folder)
    measured = [outcome for outcome in outcomes if outcome.result is not None]
    stopped = sum(not kept.is_finished(outcome.result) for outcome in measured if outcome.result)
    refused = [outcome for outcome in outcomes if outcome.refused is not None]
    missing = len(outcomes) - len(measured) - len(refused)
    hours = sum(outcome.result.provenance["seconds"] for outcome in measured if outcome.result) / 3600
    lines = [
        f"# {study.title}",
        "",
        f"{len(measured) - stopped} cases are finished, {stopped} stopped early, {missing} not run, {len(refused)} "
        f"impossible; {hours:.1f} hours in all.",
        "Accuracies are means over seeds after the last round, in percent: the mean over nodes, the lowest node, and",
        "the mean model. Messages, bytes and seconds are per node until the mean over nodes first reaches a target.",
    ]
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in measured:
        labels = outcome.case.labels
        groups.setdefault((labels["partitions"], labels["faults"]), []).append(outcome)
    for number, ((partition, faults), group) in enumerate(groups.items()):
        ranked = sorted(group, key=lambda outcome: -_last(outcome)["accuracy"])
        title = partition if faults == "none" else f"{partition}, {faults}"
        lines += ["", f"## {title}", "", *_table(ranked, study.targets)]
        figure = f"accuracy-{number}.png"
        _draw(ranked[:_MOST_CURVES], folder / figure)
        lines += ["", f"![Accuracy over epochs and bytes]({figure})"]
    if refused:
        lines += ["", "## Not possible", ""]
        lines += [f"- {outcome.case.name()}: {outcome.refused}" for outcome in refused]
    text = "\n".join(lines) + "\n"
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def _best(outcome: Outcome) -> tuple[str, Result]:
    """Returns the chosen values and the result of an outcome, of a sweep those of the best combination."""
    result = outcome.result
    assert result is not None
    best = kept.best(result) if result.combinations() else result
    if combinations := best.combinations():
        return "all diverged", best.at(**combinations[0])
    values = {**outcome.values, **(best.provenance.get("sweep") or {})}
    return ", ".join(f"{name} {value:g}" for name, value in values.items()), best


def _last(outcome: Outcome) -> dict[str, Any]:
    """Returns the accuracies at the end, on all nodes and test examples if they were used then."""
    told, result = _best(outcome)
    history = result.history
    of_nodes, mean_model = history.accuracy[..., -1, :], history.mean_model_accuracy[..., -1]
    in_history = {"accuracy": of_nodes.mean(axis=-1), "accuracy_min": of_nodes.min(axis=-1)}
    final = result.provenance.get("final") or in_history | {"mean_model_accuracy": mean_model}
    accuracy = np.asarray(final["accuracy"])
    return {
        "values": told,
        "stopped": None if kept.is_finished(result) else f"epoch {history.epoch[-1]:g}",
        "accuracy": float(accuracy.mean()),
        "lowest": float(np.mean(final["accuracy_min"])),
        "mean model": float(np.mean(final["mean_model_accuracy"])),
        "deviation": float(accuracy.std(ddof=1)) if len(accuracy) > 1 else float("nan"),
    }


def _table(outcomes: Sequence[Outcome], targets: Sequence[float]) -> list[str]:
    heads = ["topology", "algorithm", "values", "accuracy", "lowest", "mean model"]
    heads += [f"{what} to {target:.0%}" for target in targets for what in ("messages", "MB", "s (WAN)")]
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for outcome in outcomes:
        last, labels = _last(outcome), outcome.case.labels
        spread = "" if np.isnan(last["deviation"]) else f" ± {100 * last['deviation']:.1f}"
        stopped = "" if last["stopped"] is None else f" ({last['stopped']})"
        reached = f"{100 * last['accuracy']:.1f}{spread}{stopped}"
        cells = [labels["topologies"], labels["algorithms"], last["values"], reached]
        cells += [f"{100 * last[name]:.1f}" for name in ("lowest", "mean model")]
        for target in targets:
            cells += _until(_best(outcome)[1], target)
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _until(result: Result, target: float) -> list[str]:
    """Returns what a node sends until the mean over nodes and seeds reaches a target, or "never"."""
    history = result.history
    reached = np.flatnonzero(history.accuracy.mean(axis=(0, -1)) >= target)
    if len(reached) == 0:
        return ["never"] * 3
    at = int(reached[0])
    seconds = result.seconds(clocks.WAN)[:, at].mean() if result.traffic else np.nan
    return [f"{history.messages[:, at].mean():,.0f}", f"{history.bytes[:, at].mean() / 1e6:.1f}", f"{seconds:,.1f}"]


def _draw(outcomes: Sequence[Outcome], path: pathlib.Path) -> None:
    import matplotlib.pyplot as plt

    from dcliques_jax import plotting

    curves = {}
    for outcome in outcomes:
        labels = outcome.case.labels
        curves[f"{labels['topologies']}, {labels['algorithms']}"] = _best(outcome)[1]
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for panel, x in zip(axes, ("epoch", "bytes"), strict=True):
        plotting.plot_accuracy(curves, ax=panel, x=x)
    axes[1].set_xscale("log")
    axes[1].get_legend().remove()
    figure.savefig(path, dpi=110)
    plt.close(figure)
