"""The problems that benchmarks are run on."""

import numpy as np

import dcliques_jax as dc

SILENT = {"progress": False}


def images(num_nodes, size, shape, num_test=10, seed=0):
    """Random images of bytes, `size` of them on each node, and D-Cliques over the nodes."""
    rng = np.random.default_rng(seed)

    def split(count):
        pixels = rng.integers(0, 256, size=(count, *shape), dtype=np.uint8)
        return pixels / np.float32(255), np.arange(count) % 10

    splits = (*split(num_nodes * size), *split(num_test))
    dataset = dc.datasets.from_arrays(*splits, byte_scale=(1 / 255, 0.0), copy=False)
    return dc.partitions.shards(dataset, num_nodes)


def d_cliques(data, inter="fully_connected"):
    return dc.topologies.d_cliques(data.label_distribution, inter=inter, max_steps=100)


def rounds(
    topology, data, batch_size, optimizer, *, model=None, init="shared", clique_averaging=True, faults=None, mesh=None
):
    """Rounds of the library and nothing else: what `dcliques_jax.simulate` runs between two evaluations."""
    algorithm = dc.algorithms.dsgd(optimizer, clique_averaging=clique_averaging)
    options = {"model": model, "algorithm": algorithm, "batch_size": batch_size, "init": init}
    options |= {"faults": faults, "mesh": mesh}
    return dc.prepare(topology, data, **options)
