"""How long does evaluating all nodes take, against the one matrix product that it cannot do without?

Logistic regression of MNIST shape on 10,000 test examples, 100 nodes (E100) and 1000 (E1000): accuracy and loss of
every node, consensus distance, and the check for infinite values. The product in NumPy is [10000, 784] x [784, 10 n].
"""

import numpy as np
import optax
import workloads
from harness import Line, interleaved

import dcliques_jax as dc

ROUNDS = 4


def measure(quick):
    sizes = [("quick", 20, 50)] if quick else [("E100", 100, 10_000), ("E1000", 1000, 10_000)]
    for name, num_nodes, num_test in sizes:
        data = workloads.images(num_nodes, ROUNDS, (28, 28, 1), num_test)
        topology = dc.topologies.ring(num_nodes)
        inputs = data.dataset.test_inputs.reshape(num_test, -1)
        columns = np.random.default_rng(0).standard_normal((inputs.shape[1], 10 * num_nodes), dtype=np.float32)

        def run(every, data=data, topology=topology):
            algorithm = dc.algorithms.dsgd(optax.sgd(0.1))
            options = {"rounds": ROUNDS, "batch_size": 1, "eval_every": every}
            return dc.simulate(topology, data, algorithm=algorithm, **options, **workloads.SILENT)

        check(run(ROUNDS), data)
        functions = {
            "seldom": lambda run=run: run(ROUNDS),
            "often": lambda run=run: run(1),
            "product": lambda inputs=inputs, columns=columns: inputs @ columns,
        }
        times = interleaved(functions, 1 if quick else 5)
        more = ROUNDS + 1 - 2  # evaluations
        best = (min(times["often"]) - min(times["seldom"])) / more
        median = float(np.median(times["often"]) - np.median(times["seldom"])) / more
        against = ("one NumPy product", min(times["product"]), ">= 0.77")
        yield Line("evaluating all nodes", name, "dcliques_jax", best, median, *against)


def check(result, data):
    """Accuracies are those that NumPy finds for the final models."""
    flat = data.dataset.test_inputs.reshape(len(data.dataset.test_labels), -1)
    params = result.params["Dense_0"]
    for node in (0, data.num_nodes - 1):
        logits = flat @ np.asarray(params["kernel"][node]) + np.asarray(params["bias"][node])
        accuracy = (logits.argmax(axis=1) == data.dataset.test_labels).mean()
        np.testing.assert_allclose(result.history.accuracy[-1, node], accuracy, atol=2e-3)  # ties, by rounding
