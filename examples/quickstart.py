"""100 nodes with skewed labels: D-Cliques learns like a fully connected network, a ring does not.

Runs on 5,000 real MNIST images that come with a package: no download, about a minute on a laptop.
"""

import argparse
import time

import matplotlib

matplotlib.use("Agg")  # writes a file, needs no screen

import dcliques_jax as dc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--picture", default="quickstart.png", help="where to save the comparison")
    arguments = parser.parse_args()

    data = dc.partitions.shards(dc.datasets.mnist_5k(), arguments.nodes, shards_per_node=2, seed=1)
    compared = [
        dc.topologies.ring(arguments.nodes, seed=1),
        dc.topologies.d_cliques(data.label_distribution, clique_size=10, inter="fully_connected", seed=1),
        dc.topologies.fully_connected(arguments.nodes),
    ]
    num_parameters = dc.models.num_parameters(dc.models.logistic_regression(), data.dataset.train_inputs[:1])
    print(f"{data}\n")
    for topology in compared:
        print(topology.report(data.label_distribution, num_parameters=num_parameters), end="\n\n")

    results = {}
    print(f"Logistic regression, {arguments.epochs} epochs; test accuracy over nodes")
    for topology in compared:
        start = time.perf_counter()
        result = results[topology.name] = dc.simulate(topology, data, epochs=arguments.epochs)
        accuracy = 100 * result.history.accuracy[-1]
        rate = result.history.round[-1] / (time.perf_counter() - start)
        print(
            f"  {topology.name:<28} {accuracy.mean():.1f} %  ({accuracy.min():.1f} to {accuracy.max():.1f})  "
            f"{rate:.0f} rounds/s with compilation and evaluation"
        )

    axes = dc.plotting.plot_accuracy(results)
    axes.set_title(f"{arguments.nodes} nodes, two label shards each")
    axes.figure.savefig(arguments.picture, dpi=150)
    print(f"\nSaved {arguments.picture}")


if __name__ == "__main__":
    main()
