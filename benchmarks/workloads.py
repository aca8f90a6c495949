"""The problems that benchmarks are run on."""

import jax
import numpy as np

import dcliques_jax as dc
from dcliques_jax import _layouts, _plans

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


class Rounds:
    """Rounds of the library and nothing else: what `dcliques_jax.simulate` runs between two evaluations."""

    def __init__(
        self, topology, data, batch_size, optimizer, *, model=None, init="shared", clique_averaging=True, mesh=None
    ):
        model = model or dc.models.logistic_regression()
        self.algorithm = dc.algorithms.dsgd(optimizer, clique_averaging=clique_averaging)
        runs = _plans.make_runs(topology, data, 0, None)
        plan = _plans.make_plan(runs, rounds=1, batch_size=batch_size)
        parts = _plans.Parts(dc.models.as_model(model), "", self.algorithm, dc.metrics.cross_entropy, init)
        self.layout = _layouts.make_layout(runs, parts, mesh)
        self.rounds = _layouts.prepare(self.layout, plan)
        self.state = self.rounds.state

    def run(self, rounds):
        """Goes on for some rounds."""
        self.state, _ = self.rounds.run(self.state, rounds)
        jax.block_until_ready(self.state)

    def models(self):
        """The models of all nodes, in the order of the topology."""
        state = _layouts.in_topology_order(self.layout, self.state, [])
        return jax.tree.map(lambda leaf: leaf[0], state.params)

    def memory(self):
        """Bytes of device memory at the peak."""
        return self.rounds.memory()
