"""Every experiment of the paper: the settings it compares and the claims about them.

To add one, write a function that returns an `Experiment` and give it a name in `EXPERIMENTS`.
"""

import dataclasses
import functools

import numpy as np

from dcliques_jax import topologies
from dcliques_jax.paper.claims import (
    Claim,
    counted,
    faster,
    gains_more,
    harder,
    narrower,
    no_wider,
    reaches,
    settles,
    smaller_skew,
    within,
)
from dcliques_jax.paper.runs import SkewStudy
from dcliques_jax.paper.settings import TASKS, Setting

_WIRINGS = {"fully_connected": "fully connected", "small_world": "small world", "fractal": "fractal", "ring": "ring"}
_MOMENTUM = {"mnist": 0.0, "cifar10": 0.9}  # the default of the paper
_CLOSE = {"mnist": 1, "cifar10": 3}  # points within which curves are close
_LOWEST = {"mnist": 75, "cifar10": 0}  # start of the accuracy axis where many curves end close to each other
_SKEWS = {"shards": "two shards a node", "one_class": "one class a node"}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One figure. Labels identify curves across panels."""

    title: str
    figure: str  # of the paper
    panels: dict[str, dict[str, Setting]]  # curves by panel and label
    claims: list[Claim]
    beside: dict[str, Setting] = dataclasses.field(default_factory=dict)  # not drawn, but used by claims
    lowest: float = 0  # start of the accuracy axis

    @property
    def parts(self) -> dict[str, Setting]:
        """Everything that is run, by label."""
        return {label: setting for curves in self.panels.values() for label, setting in curves.items()} | self.beside


@dataclasses.dataclass(frozen=True)
class SkewExperiment:
    """One figure of the skew of cliques during Greedy Swap."""

    title: str
    figure: str
    over_steps: bool  # False: its distribution before and after
    claims: list[Claim]

    @property
    def parts(self) -> dict[str, SkewStudy]:
        """Everything that is run, by label."""
        return {task.title: SkewStudy(name) for name, task in TASKS.items()}


def _best(task: str, **changes: object) -> Setting:
    """D-Cliques as the paper recommends: with Clique Averaging, and with momentum where it helps."""
    return Setting(task, averaging=True, momentum=_MOMENTUM[task])._replace(**changes)  # type: ignore[arg-type]


def _baseline(task: str, **changes: object) -> Setting:
    """The fully connected network."""
    plain = Setting(task, topology="fully_connected", momentum=_MOMENTUM[task])
    return plain._replace(**changes)  # type: ignore[arg-type]


def _iid_or_not(figure: str, partition: str, iid: str) -> Experiment:
    graphs = {"ring": "ring", "grid": "grid", "fully connected": "fully_connected"}
    panels = {
        label.capitalize(): {
            f"{label}, IID": Setting("mnist", graph, iid),
            f"{label}, {_SKEWS[partition]}": Setting("mnist", graph, partition),
        }
        for label, graph in graphs.items()
    }
    skewed = _SKEWS[partition]
    claims = [
        within("ring, IID", "fully connected, IID", points=2, since=10),
        within("grid, IID", "fully connected, IID", points=2, since=10),
        within(f"fully connected, {skewed}", "fully connected, IID", points=1, since=10),
        faster("ring, IID", f"ring, {skewed}", by=5),
        faster("grid, IID", f"grid, {skewed}", by=2),
        narrower("ring, IID", f"ring, {skewed}", factor=2),
        narrower("grid, IID", f"grid, {skewed}", factor=2),
    ]
    beside = {}
    if partition == "one_class":
        beside = {f"{label}, two shards a node": Setting("mnist", label) for label in ("ring", "grid")}
        for label in ("ring", "grid"):
            claims += [claim(f"{label}, two shards a node", f"{label}, {skewed}") for claim in (faster, narrower)]
    title = f"Topology hardly matters with IID data, and very much with {skewed}"
    return Experiment(title, figure, panels, claims, beside)


def _match_fully_connected(figure: str, task: str, partition: str) -> Experiment:
    curves = {
        "fully connected": _baseline(task, partition=partition),
        "D-Cliques": _best(task, partition=partition),
    }
    claims = [
        within("D-Cliques", "fully connected", points=_CLOSE[task], since=10),
        no_wider("D-Cliques", "fully connected", points={"mnist": 1, "cifar10": 5}[task]),
    ]
    beside = {}
    if task == "mnist":
        beside = {label: Setting(task, label, partition) for label in ("ring", "grid")}
        claims += [claim("D-Cliques", label) for label in beside for claim in (faster, narrower)]
    if partition == "shards":
        beside["1 node"] = _best(task, num_nodes=1)
        claims.append(faster("fully connected", "1 node"))
    else:
        beside["D-Cliques, two shards"] = _best(task)
        claims.append(within("D-Cliques", "D-Cliques, two shards", points=_CLOSE[task], since=10))
    title = f"{TASKS[task].title}: D-Cliques converge like a fully connected network"
    return Experiment(title, figure, {TASKS[task].title: curves}, claims, beside)


def _clique_averaging(figure: str, partition: str) -> Experiment:
    plain = Setting("mnist", partition=partition)
    curves = {"with Clique Averaging": plain._replace(averaging=True), "without": plain}
    pair = ("with Clique Averaging", "without")
    claims, beside = [faster(*pair), narrower(*pair)], {}
    if partition == "one_class":
        beside = {f"{label}, two shards": s._replace(partition="shards") for label, s in curves.items()}
        claims.append(gains_more(pair, ("with Clique Averaging, two shards", "without, two shards")))
        claims.append(within(pair[0], "with Clique Averaging, two shards", points=_CLOSE["mnist"], since=10))
    title = "MNIST: Clique Averaging narrows the band and speeds convergence up a little"
    return Experiment(title, figure, {"MNIST": curves}, claims, beside, lowest=89)


def _clique_averaging_and_momentum(figure: str, partition: str) -> Experiment:
    plain = Setting("cifar10", partition=partition)
    panels = {
        "Without Clique Averaging": {"without momentum": plain, "with momentum": plain._replace(momentum=0.9)},
        "With Clique Averaging": {
            "averaging, without momentum": plain._replace(averaging=True),
            "averaging, with momentum": plain._replace(averaging=True, momentum=0.9),
        },
    }
    best = "averaging, with momentum"
    others = ("without momentum", "with momentum", "averaging, without momentum")
    claims = [
        faster("without momentum", "with momentum"),
        *(faster(best, other) for other in others),
        *(narrower(best, other) for other in others),
    ]
    beside = {}
    if partition == "one_class":
        two = plain._replace(partition="shards", momentum=0.9)
        beside = {"averaging, with momentum, two shards": two._replace(averaging=True), "momentum, two shards": two}
        claims.append(gains_more((best, "with momentum"), tuple(beside)))  # type: ignore[arg-type]
        claims.append(within(best, f"{best}, two shards", points=_CLOSE["cifar10"], since=10))
    title = "CIFAR-10: momentum hurts without Clique Averaging and helps with it"
    return Experiment(title, figure, panels, claims, beside)


def _random_graph(figure: str, task: str, partition: str) -> Experiment:
    plain = Setting(task, partition=partition)
    random = plain._replace(topology="random_regular")
    curves, beside = {"D-Cliques, no averaging": plain, "random graph": random}, {}
    claims = [claim("D-Cliques, no averaging", "random graph") for claim in (faster, narrower)]
    if partition == "shards" and task == "cifar10":
        beside["random graph, momentum"] = random._replace(momentum=0.9)
        claims.append(faster("random graph", "random graph, momentum"))
    if partition == "one_class":
        diverse = plain._replace(topology="diverse_random")
        unbiased = diverse._replace(averaging=True, momentum=_MOMENTUM[task])
        curves |= {
            "D-Cliques": _best(task, partition=partition),
            "diverse neighbours": diverse,
            "diverse neighbours, unbiased gradient": unbiased,
        }
        claims += [
            *(faster("D-Cliques", other) for other in ("random graph", "diverse neighbours")),
            faster("D-Cliques", "diverse neighbours, unbiased gradient", by={"mnist": 0, "cifar10": 2}[task]),
            narrower("D-Cliques", "diverse neighbours, unbiased gradient"),
            narrower("D-Cliques, no averaging", "diverse neighbours"),
        ]
    title = f"{TASKS[task].title}: D-Cliques converge faster than random graphs of as many edges"
    return Experiment(title, figure, {TASKS[task].title: curves}, claims, beside)


def _thousand_nodes(figure: str, task: str, partition: str) -> Experiment:
    ideal = _baseline(task, partition=partition, num_nodes=1000)
    wired = {label: _best(task, partition=partition, num_nodes=1000, inter=inter) for inter, label in _WIRINGS.items()}
    panels = {
        "Linear": {"all nodes connected": ideal, "fractal": wired["fractal"], "ring": wired["ring"]},
        "Super- and quasi-linear": {
            "all nodes connected": ideal,
            "fully connected": wired["fully connected"],
            "small world": wired["small world"],
        },
    }
    claims = [
        within("fully connected", "all nodes connected", points=_CLOSE[task], since=10),
        within("small world", "fully connected", points=_CLOSE[task], since=10),
        faster("fractal", "ring", by=1),
        faster("small world", "fractal"),
    ]
    beside = {}
    if partition == "one_class" and task == "cifar10":
        beside["fully connected, two shards"] = wired["fully connected"]._replace(partition="shards")
        claims.append(faster("fully connected, two shards", "fully connected"))
    title = f"{TASKS[task].title}: 1000 nodes need few edges between cliques"
    return Experiment(title, figure, panels, claims, beside, lowest=_LOWEST[task])


def _edge_removal(figure: str, task: str, partition: str) -> Experiment:
    plain = Setting(task, partition=partition, momentum=_MOMENTUM[task])
    removals = {0: "full cliques", 1: "1 edge removed", 5: "5 edges removed"}
    panels = {
        "Without Clique Averaging": {label: plain._replace(removed_edges=x) for x, label in removals.items()},
        "With Clique Averaging": {
            f"averaging, {label}": plain._replace(removed_edges=x, averaging=True) for x, label in removals.items()
        },
    }
    full, five = "averaging, full cliques", "averaging, 5 edges removed"
    if task == "mnist":
        claims = [
            faster("full cliques", "5 edges removed"),
            narrower("full cliques", "5 edges removed"),
            within(five, full, points=0.5, since=10),
            no_wider(five, full, points=0.5),
        ]
    else:
        claims = [
            faster(full, "full cliques", by=5),
            within("5 edges removed", "full cliques", points=5, since=10),
            no_wider("5 edges removed", "full cliques", points=5),
            faster(full, "averaging, 1 edge removed"),
            faster(full, five, by=2),
            narrower(full, five, factor=1.5),
        ]
    beside = {}
    if partition == "one_class":
        two = panels["With Clique Averaging" if task == "cifar10" else "Without Clique Averaging"]
        label = five if task == "cifar10" else "5 edges removed"
        beside[f"{label}, two shards"] = two[label]._replace(partition="shards")
        claims.append(narrower(f"{label}, two shards", label))
        if task == "cifar10":
            claims.append(faster(f"{label}, two shards", label))
    does = {"mnist": "matters little with Clique Averaging", "cifar10": "costs accuracy and widens the band"}[task]
    title = f"{TASKS[task].title}: removing edges inside cliques {does}"
    return Experiment(title, figure, panels, claims, beside, lowest={"mnist": 89, "cifar10": 0}[task])


def _greedy_swap(figure: str, task: str) -> Experiment:
    best = _best(task)
    curves = {"Greedy Swap": best, "random cliques": best._replace(greedy_swap=False)}
    claims = [faster("Greedy Swap", "random cliques", by=1), narrower("Greedy Swap", "random cliques", factor=2)]
    title = f"{TASKS[task].title}: cliques by Greedy Swap converge faster than random ones"
    return Experiment(title, figure, {TASKS[task].title: curves}, claims)


def _numbers_of_nodes(figure: str, task: str) -> Experiment:
    panels = {
        label.capitalize(): {
            "1 node": _best(task, num_nodes=1),
            "10 nodes": _best(task, num_nodes=10),
            f"100 nodes, {label}": _best(task, inter=inter),
            f"1000 nodes, {label}": _best(task, inter=inter, num_nodes=1000),
        }
        for inter, label in _WIRINGS.items()
    }
    points = _CLOSE[task]
    claims = [
        within("100 nodes, fully connected", "10 nodes", points=points, since=10),
        within("1000 nodes, fully connected", "100 nodes, fully connected", points=2 * points, since=10),
        within("1000 nodes, small world", "1000 nodes, fully connected", points=points, since=10),
        narrower("1000 nodes, fully connected", "1000 nodes, small world"),
        *(narrower(f"100 nodes, {label}", f"1000 nodes, {label}") for label in _WIRINGS.values()),
        *(faster(f"100 nodes, {label}", f"1000 nodes, {label}", by=1) for label in ("fractal", "ring")),
    ]
    if task == "mnist":
        claims[:0] = [
            reaches("1 node", 92.5, points=0.5, at=100),
            within("10 nodes", "1 node", points=1, since=10),
            *(
                within(f"100 nodes, {label}", "10 nodes", points=1, since=10)
                for label in ("small world", "fractal", "ring")
            ),
        ]
    else:
        claims[:0] = [
            faster("10 nodes", "1 node"),
            faster("100 nodes, fully connected", "100 nodes, ring", by=1),
            within("100 nodes, fractal", "100 nodes, fully connected", points=points, since=10),
            faster("1000 nodes, fully connected", "1000 nodes, small world"),
        ]
    title = f"{TASKS[task].title}: from 1 to 1000 nodes with each wiring of cliques"
    return Experiment(title, figure, panels, claims, lowest=_LOWEST[task])


def _stated_numbers() -> Experiment:
    """Numbers of graphs, which do not depend on data."""

    @functools.cache
    def edges(nodes: int, inter: str) -> float:
        p = np.eye(10)[np.arange(nodes) % 10]
        graph = topologies.d_cliques(p, inter=inter, cliques=np.arange(nodes) // 10)
        return float(graph.degrees.mean())

    full, small = "fully_connected", "small_world"
    claims = [
        counted("edges per node, 1000 nodes, fully connected cliques", 18.9, lambda: edges(1000, full), by=0.05),
        counted("edges per node, 1000 nodes, small world of cliques", 14.5, lambda: edges(1000, small), by=0.1),
        counted("messages per node and round, 1000 nodes", 37.8, lambda: 2 * edges(1000, full), by=0.05),
        counted("% fewer edges than fully connected", 98, lambda: 100 * (1 - edges(1000, full) / 999), by=0.5),
        counted("% fewer messages than fully connected", 96, lambda: 100 * (1 - 2 * edges(1000, full) / 999), by=0.5),
        counted(
            "% fewer edges with a small world", 22, lambda: 100 * (1 - edges(1000, small) / edges(1000, full)), by=1
        ),
        counted("% fewer messages, 100 nodes", 80, lambda: 100 * (1 - 2 * edges(100, full) / 99), by=0.5),
    ]
    return Experiment("The numbers that the paper states", "abstract and section 4", {}, claims)


EXPERIMENTS: dict[str, Experiment | SkewExperiment] = {
    "numbers": _stated_numbers(),
    "iid-vs-skew": _iid_or_not("Figure 1", "shards", "iid"),
    "d-cliques-mnist": _match_fully_connected("Figure 5a", "mnist", "shards"),
    "d-cliques-cifar10": _match_fully_connected("Figure 5b", "cifar10", "shards"),
    "clique-averaging-mnist": _clique_averaging("Figure 6", "shards"),
    "clique-averaging-cifar10": _clique_averaging_and_momentum("Figure 7", "shards"),
    "random-graph-mnist": _random_graph("Figure 8a", "mnist", "shards"),
    "random-graph-cifar10": _random_graph("Figure 8b", "cifar10", "shards"),
    "scaling-mnist-1000": _thousand_nodes("Figure 9", "mnist", "shards"),
    "scaling-cifar10-1000": _thousand_nodes("Figure 10", "cifar10", "shards"),
    "edge-removal-mnist": _edge_removal("Figure 11", "mnist", "shards"),
    "edge-removal-cifar10": _edge_removal("Figure 12", "cifar10", "shards"),
    "skew-histogram": SkewExperiment(
        "Greedy Swap finds cliques of far lower skew than chance",
        "Figure 13",
        over_steps=False,
        claims=[smaller_skew("MNIST", most=0.1), smaller_skew("CIFAR-10", most=0.1)],
    ),
    "skew-steps": SkewExperiment(
        "Greedy Swap is done within 400 steps",
        "Figure 14",
        over_steps=True,
        claims=[settles("MNIST", steps=400), settles("CIFAR-10", steps=400), harder("MNIST", "CIFAR-10", since=50)],
    ),
    "greedy-swap-mnist": _greedy_swap("Figure 15a", "mnist"),
    "greedy-swap-cifar10": _greedy_swap("Figure 15b", "cifar10"),
    "nodes-mnist": _numbers_of_nodes("Figure 16", "mnist"),
    "nodes-cifar10": _numbers_of_nodes("Figure 17", "cifar10"),
    "one-class-iid-vs-skew": _iid_or_not("Figure 18", "one_class", "balanced_iid"),
    "one-class-d-cliques-mnist": _match_fully_connected("Figure 19a", "mnist", "one_class"),
    "one-class-d-cliques-cifar10": _match_fully_connected("Figure 19b", "cifar10", "one_class"),
    "one-class-clique-averaging-mnist": _clique_averaging("Figure 20", "one_class"),
    "one-class-clique-averaging-cifar10": _clique_averaging_and_momentum("Figure 21", "one_class"),
    "one-class-random-graph-mnist": _random_graph("Figure 22a", "mnist", "one_class"),
    "one-class-random-graph-cifar10": _random_graph("Figure 22b", "cifar10", "one_class"),
    "one-class-scaling-mnist-1000": _thousand_nodes("Figure 23", "mnist", "one_class"),
    "one-class-scaling-cifar10-1000": _thousand_nodes("Figure 24", "cifar10", "one_class"),
    "one-class-edge-removal-mnist": _edge_removal("Figure 25", "mnist", "one_class"),
    "one-class-edge-removal-cifar10": _edge_removal("Figure 26", "cifar10", "one_class"),
}
