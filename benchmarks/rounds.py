"""How long does a round of D-Cliques take, against what an expert writes with NumPy and SciPy?

    python benchmarks/rounds.py [--quick]

MNIST shape, logistic regression, D-Cliques with fully connected cliques and Clique Averaging; 100 nodes with batches of
128 and 1000 nodes with batches of 13. Both sides are first checked to compute the same models.
"""

import argparse
import time

import numpy as np
import optax

import dcliques_jax as dc

LEARNING_RATE = 0.1


def problem(num_nodes, size):
    """As many random images as `num_nodes` nodes of `size` examples hold, and a topology over the nodes."""
    data = dc.datasets.synthetic(num_train=num_nodes * size, num_test=10, input_shape=(28, 28, 1))
    data = dc.partitions.shards(data, num_nodes)
    return data, dc.topologies.d_cliques(data.label_distribution, max_steps=100)


def ours(data, topology, batch_size, rounds):
    algorithm = dc.algorithms.dsgd(optax.sgd(LEARNING_RATE))
    start = {"Dense_0": {"kernel": np.zeros((784, 10), np.float32), "bias": np.zeros(10, np.float32)}}
    budget = {"eval_every": max(rounds, 1), "eval_nodes": 1, "eval_examples": 1, "progress": False}
    result = dc.simulate(
        topology, data, algorithm=algorithm, init=start, rounds=rounds, batch_size=batch_size, **budget
    )
    return np.asarray(result.params["Dense_0"]["kernel"])


def numpy_and_scipy(data, topology, batch_size, rounds):
    """Batched matrix products over nodes, sparse products for both averages, rows shuffled once an epoch."""
    n, flat = data.num_nodes, data.dataset.train_inputs.reshape(-1, 784)
    w = dc.mixing.metropolis_hastings(topology).to_sparse().astype(np.float32)
    g = dc.mixing.clique_average(topology).to_sparse().astype(np.float32)
    kernel, bias = np.zeros((n, 10, 784), np.float32), np.zeros((n, 10), np.float32)
    rng, size = np.random.default_rng(0), data.sizes[0]
    for number in range(rounds):
        turn = number % -(-size // batch_size)
        if turn == 0:
            order = rng.permuted(data.indices, axis=1)
            inputs, labels = flat[order], data.dataset.train_labels[order]
        x, y = (rows[:, turn * batch_size : (turn + 1) * batch_size] for rows in (inputs, labels))
        error = x @ kernel.transpose(0, 2, 1) + bias[:, None]
        error -= error.max(axis=2, keepdims=True)
        np.exp(error, out=error)
        error /= error.sum(axis=2, keepdims=True)
        error[np.arange(n)[:, None], np.arange(y.shape[1]), y] -= 1
        error *= -LEARNING_RATE / y.shape[1]
        kernel += (g @ (error.transpose(0, 2, 1) @ x).reshape(n, -1)).reshape(kernel.shape)
        kernel = (w @ kernel.reshape(n, -1)).reshape(kernel.shape)
        bias = w @ (bias + g @ error.sum(axis=1))
    return kernel.transpose(0, 2, 1)


def per_round(run, data, topology, batch_size, rounds, repeats):
    """Milliseconds of a round: what more rounds add to a run, at best over some repetitions."""
    short, long = rounds // 4, rounds
    best = {short: np.inf, long: np.inf}
    for _ in range(1 + repeats):  # the first one compiles; the minimum leaves it out
        for count in best:
            start = time.perf_counter()
            run(data, topology, batch_size, count)
            best[count] = min(best[count], time.perf_counter() - start)
    return 1e3 * (best[long] - best[short]) / (long - short)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and small rounds, to see that the script works")
    quick = parser.parse_args().quick
    workloads = [("quick", 20, 40, 10)] if quick else [("M100", 100, 500, 128), ("M1000", 1000, 50, 13)]
    print("| workload | dcliques_jax ms/round | NumPy + SciPy ms/round | ratio |\n|---|---|---|---|")
    for name, num_nodes, size, batch_size in workloads:
        data, topology = problem(num_nodes, size)
        # With whole local data sets as batches, both sides see the same examples in every round.
        same = [run(data, topology, size, 3) for run in (ours, numpy_and_scipy)]
        np.testing.assert_allclose(same[0], same[1], atol=1e-4)
        rounds, repeats = (8, 1) if quick else (40, 5)
        times = [per_round(run, data, topology, batch_size, rounds, repeats) for run in (ours, numpy_and_scipy)]
        print(f"| {name} | {times[0]:.1f} | {times[1]:.1f} | {times[1] / times[0]:.2f} |")


if __name__ == "__main__":
    main()
