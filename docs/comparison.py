"""Puts the results of a study into the documentation: python docs/comparison.py FOLDER [FOLDER].

Writes the tables and figures that `docs/comparison.md` shows, and one line per case into `results.csv`. Cases that the
folder does not hold keep their lines, and their curves. The second folder, if any, holds the study of more nodes, whose
lines are in `more_nodes.csv`.
"""

import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import dcliques_jax as dc
from dcliques_jax import plotting

LABELS = ["partitions", "topologies", "algorithms", "faults"]
TARGETS = (0.88, 0.90)
COSTS = {"messages": "messages", "bytes": "MB", "seconds_lan": "s (LAN)", "seconds_wan": "s (WAN)"}


def summary(folder):
    """One row per finished case: accuracies at its end, and costs until the mean over nodes reaches a target."""
    rows, study, frame = [], dc.studies.read_study(folder), dc.studies.load(folder)
    length = {name: study.simulate[name] for name in ("epochs", "rounds") if name in study.simulate}
    for labels, case in frame.groupby(LABELS, sort=False):
        last = case[case["epoch"] == case["epoch"].max()]
        if any(last[name.rstrip("s")].iloc[0] < end for name, end in length.items()):
            continue  # stopped early
        row = {"num_nodes": study.num_nodes, **dict(zip(LABELS, labels, strict=True))}
        row |= {name: last[name].iloc[0] for name in ("learning_rate", "step_size") if name in last}
        for name in ("accuracy", "accuracy_min", "mean_model_accuracy"):
            row[name] = last[name].mean()
        row["deviation"] = last["accuracy"].std(ddof=1)
        mean = case.groupby("epoch")[["accuracy", *COSTS]].mean()
        for target in TARGETS:
            reached = mean[mean["accuracy"] >= target]
            row |= {f"{cost} to {target:.0%}": reached[cost].iloc[0] if len(reached) else np.nan for cost in COSTS}
        rows.append(row)
    return pd.DataFrame(rows)


def with_earlier(cases, path):
    """Adds the cases that were written before and are not among these; writes all."""
    if path.exists():
        earlier = read_cases(path)
        known = earlier.merge(cases[LABELS], on=LABELS, how="left", indicator=True)["_merge"] == "both"
        cases = pd.concat([earlier[~known.to_numpy()], cases], ignore_index=True)
    cases.to_csv(path, index=False, float_format="%.5g")
    return read_cases(path)  # as rounded, so that tables do not depend on what was written before


def read_cases(path):
    return pd.read_csv(path, keep_default_na=False, na_values=[""])


def matrix(cases, study, value="accuracy"):
    """Values by topology and algorithm; NaN where a case is impossible or was not run."""
    found = cases.pivot(index="topologies", columns="algorithms", values=value)
    return found.reindex(index=list(study.axes["topologies"]), columns=list(study.axes["algorithms"]))


def of(cases, partition, faults="none"):
    """Cases of one kind of data under one kind of fault."""
    return cases[(cases["partitions"] == partition) & (cases["faults"] == faults)]


def shown(cases, study):
    """Partitions of which every topology was run."""
    topologies = set(study.axes["topologies"])
    return [name for name in study.axes["partitions"] if set(of(cases, name)["topologies"]) == topologies]


def table_of(found):
    """Accuracies in percent as Markdown, the best of each topology bold."""
    lines = ["| topology | " + " | ".join(found.columns) + " |", "|---|" + "---|" * len(found.columns)]
    for topology, row in found.iterrows():
        told = ["-" if np.isnan(value) else f"{100 * value:.1f}" for value in row]
        if row.notna().any():
            best = int(np.nanargmax(row))
            told[best] = f"**{told[best]}**"
        lines.append(f"| {topology} | " + " | ".join(told) + " |")
    return lines


def best_of_each_topology(cases, partition):
    """The algorithm with the highest accuracy without faults on every topology, best topology first."""
    alone = of(cases, partition)
    best = alone.loc[alone.groupby("topologies")["accuracy"].idxmax()]
    return best.sort_values("accuracy", ascending=False)


def table_of_costs(cases, partition, faults):
    """What the best algorithm of every topology reaches, what it costs, and what faults leave of it."""
    heads = [
        "topology",
        "algorithm",
        "accuracy",
        "lowest node",
        "mean model",
        *(name for name in faults if name != "none"),
    ]
    heads += [f"{unit} to {target:.0%}" for target in TARGETS for unit in COSTS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for _, case in best_of_each_topology(cases, partition).iterrows():
        same = cases[(cases[LABELS[:3]] == case[LABELS[:3]]).all(axis=1)].set_index("faults")["accuracy"]
        cells = [
            case["topologies"],
            case["algorithms"],
            f"{100 * case['accuracy']:.1f} ± {100 * case['deviation']:.1f}",
        ]
        cells += [f"{100 * case[name]:.1f}" for name in ("accuracy_min", "mean_model_accuracy")]
        cells += [f"{100 * same[name]:.1f}" if name in same else "-" for name in faults if name != "none"]
        for target in TARGETS:
            for cost in COSTS:
                value = case[f"{cost} to {target:.0%}"] / (1e6 if cost == "bytes" else 1)
                cells.append("never" if np.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.2g}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw_matrices(cases, study, path):
    """Heat maps: accuracy of every topology with every algorithm, one panel per partition."""
    partitions = shown(cases, study)
    figure, axes = plt.subplots(
        1, len(partitions), figsize=(1.5 + 3.6 * len(partitions), 4.6), layout="constrained", sharey=True, squeeze=False
    )
    for ax, partition in zip(axes[0], partitions, strict=True):
        found = 100 * matrix(of(cases, partition), study)
        draw_heat(ax, found, vmin=70, vmax=93, digits=1)
        ax.set_title(partition)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_faults(cases, study, path):
    """Heat maps: points of accuracy that faults cost, one row of panels per partition and one panel per fault."""
    partitions = shown(cases, study)
    faults = [name for name in study.axes["faults"] if name != "none"]
    shape = (len(partitions), len(faults))
    size = (1.5 + 4.2 * shape[1], 0.9 + 3.7 * shape[0])
    figure, axes = plt.subplots(*shape, figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False)
    for row, partition in zip(axes, partitions, strict=True):
        for ax, name in zip(row, faults, strict=True):
            lost = 100 * (matrix(of(cases, partition), study) - matrix(of(cases, partition, name), study))
            draw_heat(ax, lost, vmin=0, vmax=5, digits=1, cmap="OrRd")
            ax.set_title(f"{partition}, points lost: {name}")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_heat(ax, found, *, vmin, vmax, digits, cmap="viridis"):
    """Draws a matrix of numbers as colours, with the numbers in it."""
    ax.imshow(found, vmin=vmin, vmax=vmax, cmap=cmap, aspect="auto")
    ax.set_xticks(range(len(found.columns)), found.columns, rotation=40, ha="right")
    ax.set_yticks(range(len(found.index)), found.index)
    for (y, x), value in np.ndenumerate(found.to_numpy()):
        if not np.isnan(value):
            share = (value - vmin) / (vmax - vmin)
            dark = share < 0.6 if cmap == "viridis" else share > 0.6
            ax.text(x, y, f"{value:.{digits}f}", ha="center", va="center", fontsize=7, color="w" if dark else "k")


def draw_curves(frame, cases, partition, panels, path, *, logarithmic):
    """Curves of the best algorithm of every topology, one panel per quantity on an axis."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1 + 3.6 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    chosen = best_of_each_topology(cases, partition)
    styles = [(colour, line) for line in ("-", "--") for colour in plotting.COLOURS]
    for ax, (x, y, titles) in zip(axes[0], panels, strict=True):
        for (colour, line), (_, case) in zip(styles, chosen.iterrows(), strict=False):
            rows = frame[(frame[LABELS] == case[LABELS]).all(axis=1) & (frame["epoch"] > 0)]
            mean = rows.groupby("epoch")[["epoch", x, y] if x != "epoch" else ["epoch", y]].mean()
            label = f"{case['topologies']}, {case['algorithms']}"
            ax.plot(mean[x] / (1e6 if x == "bytes" else 1), 100 * mean[y], color=colour, linestyle=line, label=label)
        ax.set(xlabel=titles[0], ylabel=titles[1], ylim=(70, 93.5), xscale="log" if logarithmic else "linear")
    axes[0][-1].legend(fontsize=6.5, loc="lower right")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(results, page, more=None):
    study, frame, new = dc.studies.read_study(results), dc.studies.load(results), summary(results)
    cases = with_earlier(new, page / "results.csv")
    faults = list(study.axes["faults"])
    lines = []
    for partition in shown(cases, study):
        lines += [f"### {partition}", "", *table_of(matrix(of(cases, partition), study)), ""]
        lines += [*table_of_costs(cases, partition, faults), ""]
    path = page / "more_nodes.csv"
    if more is not None or path.exists():
        larger = with_earlier(pd.DataFrame(columns=LABELS) if more is None else summary(more), path)
        lines += [f"### {larger['num_nodes'].iloc[0]:g} nodes", ""]
        for partition in larger["partitions"].unique():
            lines += [f"{partition}:", "", *table_of_costs(larger, partition, faults), ""]
    (page / "tables.md").write_text("\n".join(lines))
    with plotting.style("page"):
        draw_matrices(cases, study, page / "accuracy.png")
        draw_faults(cases, study, page / "faults.png")
        names = {"accuracy": "mean over nodes", "accuracy_min": "lowest node", "mean_model_accuracy": "mean model"}
        over_epochs = [("epoch", y, ("epoch", f"test accuracy, {told} [%]")) for y, told in names.items()]
        units = {x: unit if x.startswith("seconds") else f"{unit} per node" for x, unit in COSTS.items()}
        over_costs = [(x, "accuracy", (unit, "test accuracy [%]")) for x, unit in units.items()]
        for partition in shown(new, study):
            name = partition.replace(" ", "-").lower()
            draw_curves(frame, new, partition, over_epochs, page / f"epochs-{name}.png", logarithmic=False)
            draw_curves(frame, new, partition, over_costs, page / f"costs-{name}.png", logarithmic=True)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(__file__).parent / "comparison", *sys.argv[2:])
