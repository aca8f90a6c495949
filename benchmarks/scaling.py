"""Does the time of a round grow with the number of nodes, and no faster?

Logistic regression of MNIST shape, batches of 13, D-Cliques joined as a small world, 1,000 to 10,000 nodes. Times are
those of one node in one round.
"""

import optax
import workloads
from harness import Line, per_round


def measure(quick):
    sizes = [20, 40] if quick else [1000, 2000, 5000, 10_000]
    rounds, repeats = (2, 1) if quick else (6, 5)
    reference = None
    for num_nodes in sizes:
        data = workloads.images(num_nodes, 26, (28, 28, 1))
        topology = workloads.d_cliques(data, "small_world")
        run = workloads.Rounds(topology, data, 13, optax.sgd(0.1)).run
        ((best, median),) = per_round({"run": run}, repeats, rounds).values()
        best, median = best / num_nodes, median / num_nodes
        reference = best if reference is None else reference
        against = (f"{sizes[0]} nodes", reference, ">= 0.77")
        yield Line("a node's share of a round", f"{num_nodes} nodes", "dcliques_jax", best, median, *against)
