"""Draws the picture of the README: `python docs/picture.py`."""

import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

import dcliques_jax as dc

data = dc.partitions.shards(dc.datasets.mnist_5k(), 100, seed=1)
cliques = dc.topologies.d_cliques(data.label_distribution, clique_size=10, seed=1)
graphs = [dc.topologies.ring(100, seed=1), dc.topologies.random_regular(100, 10, seed=1), cliques]
results = {graph.name: dc.simulate(graph, data, epochs=50) for graph in [*graphs, dc.topologies.fully_connected(100)]}

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
cliques.plot(data.label_distribution, ax=left).set_title("D-Cliques: every group of ten has all labels")
dc.plotting.plot_accuracy(results, ax=right).set_title("100 nodes, each with two labels of MNIST")
figure.savefig(pathlib.Path(__file__).parent / "_static/d-cliques.png", dpi=110)
