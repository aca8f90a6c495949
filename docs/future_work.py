"""Measures what `docs/future_work.md` tells: python docs/future_work.py [errors] [cliques] [digits] [cifar10].

Prints tables in Markdown. `cifar10` takes ten minutes on two cores, the others a few minutes together.
"""

import sys

import numpy as np
import optax
import scipy.ndimage

import dcliques_jax as dc

SIZES = {100: range(5), 1000: range(3)}  # number of nodes, and the seeds


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    print("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines), end="\n\n")


def shards(dataset, num_nodes, seed):
    return dc.partitions.shards(dataset, num_nodes, seed=seed).label_distribution


def errors():
    """The largest error of an estimate of the global label distribution, as a geometric mean over seeds."""
    dataset, after = dc.datasets.mnist(), [5, 10, 20, 30, 40, 60]
    rows = []
    for num_nodes, seeds in SIZES.items():
        found = [
            dc.cliques.push_sum_trajectory(shards(dataset, num_nodes, seed), 60, seed=seed).error for seed in seeds
        ]
        rows.append([f"{num_nodes:,}", *(f"{error:.2g}" for error in np.exp(np.log(found).mean(axis=0))[after])])
    table(["nodes", *after], rows)


def cliques():
    """Skew, messages and bytes of cliques that nodes build by messages."""
    after, skews, costs = [0, 10, 25, 50, 100, 200], [], []
    for dataset, num_nodes in ((dc.datasets.mnist(), 100), (dc.datasets.cifar10(), 100), (dc.datasets.mnist(), 1000)):
        exact, estimated, central = [], [], []
        for seed in SIZES[num_nodes]:
            p = shards(dataset, num_nodes, seed)
            exact.append(dc.cliques.decentralised_trajectory(p, 10, seed=seed))
            estimates = dc.cliques.push_sum_labels(p, 25, seed=seed)
            estimated.append(dc.cliques.decentralised_trajectory(p, 10, seed=seed, estimates=estimates).skew[-1])
            steps = {"max_steps": 20_000} if num_nodes == 1000 else {}
            central.append(dc.cliques.skew(dc.cliques.greedy_swap(p, 10, seed=seed, **steps), p).mean())
        name = f"{dataset.name}, {num_nodes:,} nodes"
        course = np.mean([each.skew for each in exact], axis=0)[after]
        skews.append([name, *(f"{skew:.3f}" for skew in (*course, np.mean(estimated), np.mean(central)))])
        messages, size = (np.mean([getattr(each, what) for each in exact], axis=0) for what in ("messages", "bytes"))
        costs.append([name, *(f"{messages[at]:.0f}" for at in (100, 200)), f"{size[200] / 1000:.1f} kB"])
    table(["data", *after, "200, estimates", "central"], skews)
    table(["data", "messages, 100 rounds", "200", "bytes, 200 rounds"], costs)


def seen_as(dataset, ways, num_nodes, num_test, seed):
    """Node i sees its images in way i mod K; test images are seen in all ways, in turn."""
    data = dc.partitions.feature_shift(dataset, num_nodes, transforms=ways, seed=seed)
    tests = np.random.default_rng(seed).permutation(len(dataset.test_labels))[:num_test]
    images = np.stack([ways[k % len(ways)](dataset.test_inputs[i : i + 1])[0] for k, i in enumerate(tests)])
    train = data.dataset
    mixed = dc.datasets.from_arrays(train.train_inputs, train.train_labels, images, dataset.test_labels[tests])
    return dc.partitions.from_indices(mixed, data.indices)


def turned(k):
    return lambda images: np.rot90(images, k, axes=(1, 2))


def blurred(k):
    return lambda images: scipy.ndimage.gaussian_filter(np.rot90(images, k, axes=(1, 2)), (0, 2, 2, 0))


def by_kind(data, ways, seed):
    """Cliques of four."""
    domains = np.eye(ways)[np.arange(data.num_nodes) % ways]
    means = {
        "labels": data.label_distribution,
        "random Fourier": dc.features.random_fourier(data),
        "mean images": dc.features.mean_image(data),
        "true domains": domains / 1.0,
    }
    kinds = {name: dc.cliques.greedy_swap(rows, 4, max_steps=3000, seed=seed) for name, rows in means.items()}
    kinds = {"random": dc.cliques.random_cliques(data.num_nodes, 4, seed=seed), **kinds}
    return {name: (ids, dc.cliques.skew(ids, domains).mean()) for name, ids in kinds.items()}


def trained(dataset, ways, num_test, seeds, kinds, **arguments):
    """Prints the skew of domains, the last accuracy, that of the mean model, and the consensus distance."""
    found = {}
    for seed in seeds:
        data = seen_as(dataset, ways, 100, num_test, seed)
        for name, (ids, skew) in by_kind(data, len(ways), seed).items():
            if name not in kinds:
                continue
            topology = dc.topologies.d_cliques(data.label_distribution, cliques=ids, inter="ring", seed=seed)
            history = dc.simulate(topology, data, seed=seed, progress=False, **arguments).history
            last = (history.accuracy[-1].mean(), history.mean_model_accuracy[-1], history.consensus_distance[-1])
            found.setdefault(name, []).append((skew, *last))
    rows = []
    for name, values in found.items():
        skew, accuracy, mean_model, distance = np.mean(values, axis=0)
        spread = f" ± {100 * np.std(values, axis=0, ddof=1)[1]:.1f}" if len(values) > 1 else ""
        rows.append(
            [name, f"{skew:.2f}", f"{100 * accuracy:.1f}{spread}", f"{100 * mean_model:.1f}", f"{distance:.2f}"]
        )
    table(["cliques", "skew of domains", "accuracy", "mean model", "consensus distance"], rows)


def digits():
    """Four rotations, and four rotations with and without blur."""
    given = {"algorithm": dc.algorithms.dsgd(optax.sgd(0.02)), "batch_size": 10, "epochs": 20, "eval_every": 20}
    turns = [turned(k) for k in range(4)]
    kinds = ("random", "labels", "random Fourier", "mean images", "true domains")
    for ways in (turns, turns + [blurred(k) for k in range(4)]):
        trained(dc.datasets.mnist_5k(), ways, 1000, range(3), kinds, **given)


def cifar10():
    """Rotations, with Clique Averaging and momentum."""
    algorithm = dc.algorithms.dsgd(optax.sgd(0.002, momentum=0.9), clique_averaging=True)
    given = {"model": dc.models.gn_lenet(), "algorithm": algorithm, "batch_size": 20, "epochs": 6, "eval_every": 6}
    kinds = ("random", "random Fourier", "mean images")
    trained(dc.datasets.cifar10(), [turned(k) for k in range(4)], 2000, [0], kinds, **given)


if __name__ == "__main__":
    questions = {"errors": errors, "cliques": cliques, "digits": digits, "cifar10": cifar10}
    for name in sys.argv[1:] or questions:
        questions[name]()
