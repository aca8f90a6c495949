"""How long do Greedy Swap and the builders of topologies take?

Greedy Swap with cliques of 10, on 100 nodes for 1,000 steps, which took the paper 6 s, and on 1000 nodes for 20,000.
Then every builder for 10,000 nodes.
"""

import networkx as nx
import numpy as np
from harness import Line, interleaved

import dcliques_jax as dc
from dcliques_jax import topologies


def label_distribution(num_nodes):
    """Two classes of ten on every node, half and half."""
    rng = np.random.default_rng(0)
    return np.stack([np.eye(10)[rng.choice(10, 2, replace=False)].mean(axis=0) for _ in range(num_nodes)])


def measure(quick):
    repeats = 1 if quick else 3

    def line(question, workload, subject, function, against="", against_best=None, goal="", times=repeats):
        seconds = interleaved({subject: function}, times, warm_up=0)[subject]
        return Line(question, workload, subject, min(seconds), float(np.median(seconds)), against, against_best, goal)

    def swaps(labels, steps):
        ids = dc.cliques.greedy_swap(labels, 10, max_steps=steps, seed=0)
        before = dc.cliques.skew(dc.cliques.random_cliques(len(labels), 10, seed=0), labels).mean()
        assert dc.cliques.skew(ids, labels).mean() < before

    small, steps = label_distribution(100), 50 if quick else 1000
    against = ("the paper", 6.0, ">= 60")
    yield line("Greedy Swap", f"100 nodes, {steps} steps", "dcliques_jax", lambda: swaps(small, steps), *against)
    if not quick:
        large = label_distribution(1000)
        yield line("Greedy Swap", "1000 nodes, 20000 steps", "dcliques_jax", lambda: swaps(large, 20_000))

    n = 100 if quick else 10_000
    labels, one_class = label_distribution(n), np.eye(10)[np.arange(n) % 10]
    side = int(n**0.5)
    edges = topologies.ring(n).edges
    builders = {
        "ring": lambda: topologies.ring(n),
        "grid": lambda: topologies.grid(side, side),
        "random_regular": lambda: topologies.random_regular(n, 10),
        "diverse_random": lambda: topologies.diverse_random(one_class),
        "from_edges": lambda: topologies.from_edges(n, edges),
        "from_networkx": lambda graph=nx.cycle_graph(n): topologies.from_networkx(graph),
        "fully_connected": lambda: topologies.fully_connected(n),
    }
    for inter in ("ring", "fractal", "small_world", "fully_connected"):
        builders[f"d_cliques, {inter}"] = lambda inter=inter: topologies.d_cliques(labels, inter=inter)
    for name, build in builders.items():
        yield line("building a topology", f"{n} nodes", name, build, times=1)
