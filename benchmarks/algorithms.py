"""What do rounds of other algorithms cost, and do sweeps gain over runs one after the other?

M1000 as in rounds.py: 1000 nodes of logistic regression with batches of 13 on D-Cliques, without Clique Averaging.
"""

import numpy as np
import optax
import workloads
from harness import Line, interleaved, per_round

import dcliques_jax as dc

SGD = optax.sgd(0.1)
MOST = {"gradient tracking": 1.9, "D2": 1.4, "quasi-global momentum": 1.4}  # times a round of D-SGD


def measure(quick):
    yield from _rounds(quick)
    yield from _sweep(quick)


def _rounds(quick):
    num_nodes, size, batch_size, rounds, repeats = (20, 40, 10, 4, 1) if quick else (1000, 50, 13, 12, 7)
    data = workloads.images(num_nodes, size, (28, 28, 1))
    topology = workloads.d_cliques(data)
    kinds = {
        "D-SGD": dc.algorithms.dsgd(SGD, clique_averaging=False),
        "gradient tracking": dc.algorithms.gradient_tracking(SGD),
        "D2": dc.algorithms.d2(SGD),
        "quasi-global momentum": dc.algorithms.quasi_global_momentum(0.1),
        "gossiped momentum": dc.algorithms.gossip_momentum(0.01),
        "push-sum": dc.algorithms.push_sum(SGD),
        "CHOCO top 1 %": dc.algorithms.choco(SGD, dc.compressors.top_k(0.01), 0.3),
        "5 local steps": dc.algorithms.local_steps(dc.algorithms.dsgd(SGD, clique_averaging=False), 5),
    }
    prepared = {
        kind: dc.prepare(topology, data, algorithm=algorithm, batch_size=batch_size).run
        for kind, algorithm in kinds.items()
    }
    times = per_round(prepared, repeats, rounds)
    workload = "quick" if quick else "M1000"
    yield Line("a round", workload, "D-SGD", *times["D-SGD"])
    for kind in list(kinds)[1:]:
        target = f">= {1 / MOST[kind]:.2f}" if kind in MOST else ""
        yield Line("a round", workload, kind, *times[kind], "D-SGD", times["D-SGD"][0], target)


def _sweep(quick):
    num_nodes, size, batch_size, epochs = (10, 40, 10, 1) if quick else (100, 500, 128, 10)
    data = workloads.images(num_nodes, size, (28, 28, 1))
    topology = dc.topologies.ring(num_nodes)
    rates, seeds = [0.01, 0.03, 0.1, 0.3], [0, 1, 2]

    def factory(rate):
        return dc.algorithms.dsgd(optax.sgd(rate))

    arguments = {"epochs": epochs, "eval_every": epochs, "batch_size": batch_size, "progress": False}

    def together():
        return dc.simulate(topology, data, algorithm=factory, sweep={"rate": rates}, seeds=seeds, **arguments)

    def one_by_one():
        return [
            dc.simulate(topology, data, algorithm=factory(rate), seed=seed, **arguments)
            for rate in rates
            for seed in seeds
        ]

    swept, alone = together(), one_by_one()  # both compile here
    losses = np.array([each.history.loss[-1].mean() for each in alone]).reshape(4, 3)
    np.testing.assert_allclose(swept.history.loss[:, :, -1].mean(axis=-1), losses, rtol=1e-3)
    seconds = interleaved({"sweep": together, "one by one": one_by_one}, 1 if quick else 3, warm_up=0)
    times = {kind: (min(found), float(np.median(found))) for kind, found in seconds.items()}
    workload = f"4 rates x 3 seeds, {num_nodes} nodes, {epochs} epochs"
    yield Line("runs", workload, "sweep", *times["sweep"], "one by one", times["one by one"][0], ">= 1")
