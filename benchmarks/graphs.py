"""How long do Greedy Swap, the builders of topologies and what comes with them take?

Greedy Swap with cliques of 10: on 100 nodes for 1,000 steps, which took the paper 6 s, on 1000 nodes for 20,000, and on
10,000 and 100,000 nodes for 100 steps a clique, the default. Then for as many nodes every partition, every builder that
is not quadratic, reports and weights.
"""

from functools import partial

import networkx as nx
import numpy as np
from harness import Line, interleaved

import dcliques_jax as dc
from dcliques_jax import mixing, partitions, topologies


def label_distribution(num_nodes):
    """Two classes of ten on every node, half and half."""
    rng = np.random.default_rng(0)
    return np.stack([np.eye(10)[rng.choice(10, 2, replace=False)].mean(axis=0) for _ in range(num_nodes)])


def swaps(labels, steps):
    ids = dc.cliques.greedy_swap(labels, 10, max_steps=steps, seed=0)
    before = dc.cliques.skew(dc.cliques.random_cliques(len(labels), 10, seed=0), labels).mean()
    assert dc.cliques.skew(ids, labels).mean() < before


def builders(n):
    """Builders of topologies of n nodes, by name."""
    side = int(n**0.5)
    joined = partial(topologies.d_cliques, label_distribution(n), cliques=dc.cliques.random_cliques(n, 10))
    found = {
        "ring": partial(topologies.ring, n),
        "grid": partial(topologies.grid, side, side),
        "random_regular": partial(topologies.random_regular, n, 10),
        "diverse_random": partial(topologies.diverse_random, np.eye(10)[np.arange(n) % 10]),
        "from_edges": partial(topologies.from_edges, n, topologies.ring(n).edges),
        "from_networkx": partial(topologies.from_networkx, nx.cycle_graph(n)),
        "d_cliques, ring": partial(joined, inter="ring"),
        "d_cliques, fractal": partial(joined, inter="fractal"),
        "d_cliques, small_world": partial(joined, inter="small_world"),
    }
    if n <= 10_000:  # these are quadratic
        found["d_cliques, fully_connected"] = partial(joined, inter="fully_connected")
        found["fully_connected"] = partial(topologies.fully_connected, n)
    return found


def on_topologies(n):
    """What is computed of topologies of n nodes, by question and name."""
    build = builders(n)
    names = ("ring", "grid", "random_regular", "d_cliques, ring", "d_cliques, fractal", "d_cliques, small_world")
    found = {("a report", name): build[name]().report for name in names}
    topology = build["d_cliques, small_world"]()
    found["removing edges", "d_cliques, small_world"] = partial(topologies.remove_intra_clique_edges, topology, 5)
    found["Metropolis-Hastings weights", "d_cliques, small_world"] = partial(mixing.metropolis_hastings, topology)
    found["Clique Averaging weights", "d_cliques, small_world"] = partial(mixing.clique_average, topology)
    return found


def measure(quick):
    repeats = 1 if quick else 3

    def line(question, workload, subject, function, against="", against_best=None, goal="", times=repeats):
        seconds = interleaved({subject: function}, times, warm_up=0)[subject]
        return Line(question, workload, subject, min(seconds), float(np.median(seconds)), against, against_best, goal)

    steps = 50 if quick else 1000
    small = partial(swaps, label_distribution(100), steps)
    yield line("Greedy Swap", f"100 nodes, {steps} steps", "dcliques_jax", small, "the paper", 6.0, ">= 60")
    if not quick:
        large = partial(swaps, label_distribution(1000), 20_000)
        yield line("Greedy Swap", "1000 nodes, 20000 steps", "dcliques_jax", large)

    for n in (100,) if quick else (10_000, 100_000):
        once = partial(line, workload=f"{n} nodes", times=1)
        yield once("Greedy Swap", subject="dcliques_jax", function=partial(swaps, label_distribution(n), None))
        data = dc.datasets.synthetic(num_train=20 * n, input_shape=(1,))
        for split in (
            partitions.iid,
            partitions.shards,
            partitions.one_class,
            partial(partitions.dirichlet, alpha=0.3),
        ):
            name = getattr(split, "__name__", "dirichlet")
            yield once("a partition", subject=name, function=partial(split, data, n))
        for name, build in builders(n).items():
            yield once("building a topology", subject=name, function=build)
        for (question, name), compute in on_topologies(n).items():
            yield once(question, subject=name, function=compute)
