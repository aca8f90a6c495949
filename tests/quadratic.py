"""The quadratic problem of 16 nodes on which the algorithms' figures are known, as a data set for `simulate`."""

import jax.numpy as jnp
import networkx as nx
import numpy as np

from dcliques_jax import datasets, partitions, simulate, topologies

NODES, SIZE = 16, 5
_RNG = np.random.default_rng(0)
A = _RNG.standard_normal((NODES, SIZE, SIZE)) / np.sqrt(SIZE)
B = _RNG.standard_normal((NODES, SIZE))
HESSIANS = np.einsum("nij,nik->njk", A, A)
LINEAR = np.einsum("nij,ni->nj", A, B)
OPTIMUM = np.linalg.solve(HESSIANS.sum(axis=0), LINEAR.sum(axis=0))
RING = np.eye(NODES) / 3 + (np.roll(np.eye(NODES), 1, axis=0) + np.roll(np.eye(NODES), -1, axis=0)) / 3


def ring():
    return topologies.from_networkx(nx.cycle_graph(NODES))


def digraph():
    """Node j sends to j + 1, and to j + 3 if j is even."""
    arcs = [(j, (j + shift) % NODES) for j in range(NODES) for shift in (1, 3) if shift == 1 or j % 2 == 0]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(NODES))
    graph.add_edges_from(arcs)
    return topologies.from_networkx(graph)


def gradients(x):
    return np.einsum("njk,nk->nj", HESSIANS, x) - LINEAR


def data(dtype):
    """One example per node: its matrix and its target."""
    examples = A.astype(dtype), B.astype(dtype)
    dataset = datasets.from_arrays(*examples, *examples)
    return partitions.from_indices(dataset, [[node] for node in range(NODES)])


def init(key, inputs):
    del key
    return jnp.zeros(SIZE, inputs.dtype)


def products(x, inputs):
    return jnp.einsum("bij,j->bi", inputs, x, precision="highest")


def squares(outputs, targets):
    return jnp.square(outputs - targets).sum(axis=1) / 2


def run(algorithm, topology=None, *, dtype=np.float64, rounds=(10, 100, 1000), **more):
    """Models after some rounds, `[t, nodes, size]`, and the result."""
    found = []
    more = {"eval_every": list(rounds), "progress": False, "on_nonfinite": "warn"} | more
    result = simulate(
        topology or ring(),
        data(dtype),
        model=(init, products),
        loss_fn=squares,
        algorithm=algorithm,
        rounds=rounds[-1],
        batch_size=1,
        on_evaluation=lambda record: found.append(np.asarray(record.params(), np.float64)),
        **more,
    )
    return np.stack(found[1:]), result


def errors(models):
    """The mean squared distance from the optimum."""
    return np.square(models - OPTIMUM).sum(axis=-1).mean(axis=-1)
