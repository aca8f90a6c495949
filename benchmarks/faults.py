"""What does a round cost if messages get lost, nodes leave, or the graph changes from round to round?

M1000 as in rounds.py: 1000 nodes of logistic regression with batches of 13, D-Cliques with Clique Averaging. Faults are
held against the same rounds without faults, sequences against a static graph of their widest round.
"""

import optax
import workloads
from harness import Line, per_round

import dcliques_jax as dc


def measure(quick):
    num_nodes, size, batch_size, rounds, repeats = (20, 40, 10, 4, 1) if quick else (1000, 50, 13, 12, 7)
    data = workloads.images(num_nodes, size, (28, 28, 1))
    name = "quick" if quick else "M1000"
    yield from _against_no_fault(name, data, batch_size, rounds, repeats)
    yield from _against_a_static_graph(name, data, batch_size, rounds, repeats)


def _against_no_fault(name, data, batch_size, rounds, repeats):
    topology = workloads.d_cliques(data)
    kinds = {
        "no fault": None,
        "10 % loss": dc.faults.message_loss(0.1),
        "bursts of 10 % loss": dc.faults.bursts(0.1, 5),
        "churn": dc.faults.churn(0.05, 0.45),
    }
    for averaging in (True, False):
        prepared = {
            kind: workloads.rounds(
                topology, data, batch_size, optax.sgd(0.1), clique_averaging=averaging, faults=given
            ).run
            for kind, given in kinds.items()
        }
        times = per_round(prepared, repeats, rounds)
        workload = f"{name}, {'with' if averaging else 'without'} Clique Averaging"
        yield Line("a round", workload, "no fault", *times["no fault"])
        for kind in list(kinds)[1:]:
            yield Line("a round", workload, kind, *times[kind], "no fault", times["no fault"][0], ">= 0.77")


def _against_a_static_graph(name, data, batch_size, rounds, repeats):
    n = data.num_nodes
    graphs = {
        "static": dc.topologies.random_regular(n, 10),
        "16 graphs in turn": dc.topologies.sequence([dc.topologies.random_regular(n, 10, seed=s) for s in range(16)]),
        "drawn in every round": dc.topologies.epidemic(n, 10),
    }
    prepared = {
        kind: workloads.rounds(graph, data, batch_size, optax.sgd(0.1), clique_averaging=False).run
        for kind, graph in graphs.items()
    }
    times = per_round(prepared, repeats, rounds)
    workload = f"{name}, random 10-regular graphs"
    yield Line("a round", workload, "static", *times["static"])
    for kind in list(graphs)[1:]:
        yield Line("a round", workload, kind, *times[kind], "static", times["static"][0], ">= 0.91")
