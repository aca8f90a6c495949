"""Contracts that every member of a family keeps. A member that is missing from the catalogue fails here first."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
from dcliques_jax import algorithms, datasets, mixing, models, partitions, simulate, topologies, wirings


def public_functions(module, returns):
    return {
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if (name in module.__all__ if hasattr(module, "__all__") else function.__module__ == module.__name__)
        and not name.startswith("_")
        and inspect.signature(function).return_annotation is returns
    }


@pytest.mark.parametrize(
    ("module", "returns", "listed"),
    [
        (topologies, topologies.Topology, catalogue.TOPOLOGIES),
        (partitions, partitions.PartitionedDataset, catalogue.PARTITIONS),
        (datasets, datasets.Dataset, catalogue.DATASETS),
        (models, models.nn.Module, catalogue.MODELS),
        (algorithms, algorithms.Algorithm, catalogue.ALGORITHMS),
    ],
)
def test_the_catalogue_is_complete(module, returns, listed):
    found = public_functions(module, returns)
    assert found
    assert found == {name.split("[")[0] for name in listed}


def test_every_wiring_is_in_the_catalogue():
    assert {f"d_cliques[{inter}]" for inter in wirings.INTER} <= set(catalogue.TOPOLOGIES)


@pytest.mark.parametrize("name", catalogue.TOPOLOGIES)
def test_topology(name):
    n = catalogue.nodes_of(name)
    p = catalogue.PARTITIONS["shards"](catalogue.dataset(), n).label_distribution
    topology, again = (catalogue.TOPOLOGIES[name](p) for _ in range(2))
    i, j = topology.edges.T
    assert topology.num_nodes == n
    assert (i < j).all()
    assert (i >= 0).all()
    assert (j < topology.num_nodes).all()
    assert len(np.unique(topology.edges, axis=0)) == len(topology.edges)
    np.testing.assert_array_equal(topology.edges, again.edges)
    np.testing.assert_array_equal(topology.degrees, topology.adjacency().sum(axis=1))
    if topology.gradient_edges is not None:
        assert {*map(tuple, topology.gradient_edges)} <= {*map(tuple, topology.edges)}
    if topology.clique_ids is not None:
        assert topology.clique_ids.shape == (n,)
        inside = topology.edges[topology.clique_ids[i] == topology.clique_ids[j]]
        np.testing.assert_array_equal(inside, topology.gradient_edges)
    assert repr(topology).startswith(f"Topology({topology.name!r}")
    assert str(topology.report(p))
    if name in catalogue.STATIC:
        assert topology.arcs is topology.matrices is None
        assert 0 < mixing.spectral_gap(topology.weights()) <= 1 + 1e-12


@pytest.mark.parametrize("name", catalogue.TOPOLOGIES)
def test_gossip_matrices_keep_what_is_promised(name):
    p = catalogue.PARTITIONS["shards"](catalogue.dataset(), catalogue.nodes_of(name)).label_distribution
    topology, again = (catalogue.TOPOLOGIES[name](p) for _ in range(2))
    weights, promise = topology.weights(), catalogue.PROMISES[name]
    mixing.check_gossip(weights, topology, requires=promise)
    kept = {"symmetric": True, "columns": True}
    for matrix, same in zip(weights.matrices(), again.weights().matrices(), strict=True):
        dense = matrix.toarray()
        np.testing.assert_array_equal(dense, same.toarray())
        assert (dense >= 0).all()
        np.testing.assert_allclose(dense.sum(axis=1), 1, atol=1e-12)
        kept["symmetric"] &= np.allclose(dense, dense.T, atol=1e-12)
        kept["columns"] &= np.allclose(dense.sum(axis=0), 1, atol=1e-12)
    assert kept == {"symmetric": promise == "symmetric", "columns": promise != "rows"}


@pytest.mark.parametrize("name", catalogue.PARTITIONS)
def test_partition(name):
    dataset = catalogue.dataset()
    data, again = (catalogue.PARTITIONS[name](dataset, catalogue.NODES, seed=2) for _ in range(2))
    if name != "feature_shift":  # which transforms inputs
        assert data.dataset is dataset
    assert data.num_nodes == len(data.sizes) == len(data.indices) == catalogue.NODES
    assert data.indices.shape[1] == data.sizes.max()
    held = np.arange(data.indices.shape[1]) < data.sizes[:, None]
    np.testing.assert_array_equal(data.indices >= 0, held)
    assert (data.indices < len(dataset.train_labels)).all()
    np.testing.assert_allclose(data.label_distribution.sum(axis=1), 1)
    for node in range(catalogue.NODES):
        labels = dataset.train_labels[data.indices[node, : data.sizes[node]]]
        expected = np.bincount(labels, minlength=dataset.num_classes) / len(labels)
        np.testing.assert_allclose(data.label_distribution[node], expected)
    np.testing.assert_array_equal(data.indices, again.indices)
    if name != "from_indices":  # all others give an example to one node at most, and depend on the seed
        assert len(np.unique(data.indices[held])) == held.sum()
        assert (catalogue.PARTITIONS[name](dataset, catalogue.NODES, seed=3).indices.shape != data.indices.shape) or (
            catalogue.PARTITIONS[name](dataset, catalogue.NODES, seed=3).indices != data.indices
        ).any()


@pytest.mark.parametrize("name", catalogue.DATASETS)
def test_dataset(name, request):
    needs_files = name in ("mnist", "cifar10")
    dataset = catalogue.DATASETS[name](request.getfixturevalue("data_dir") if needs_files else None)
    for split in ("train", "test"):
        inputs, labels = getattr(dataset, f"{split}_inputs"), getattr(dataset, f"{split}_labels")
        assert len(inputs) == len(labels) > 0
        assert labels.dtype == np.int32
        assert set(np.unique(labels)) == set(range(dataset.num_classes))
        assert np.isfinite(inputs).all()
        if name != "from_arrays":
            assert inputs.dtype == np.float32
    assert dataset.name in repr(dataset)


@pytest.mark.parametrize("name", catalogue.MODELS)
def test_model(name):
    build, shape, size = catalogue.MODELS[name]
    model = models.as_model(build(num_classes=10))
    params, state = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, *shape)))
    assert models.num_parameters(build(num_classes=10), jnp.zeros((1, *shape))) == size
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size
    logits, _ = jax.jit(model.apply)(params, state, jax.random.normal(jax.random.key(1), (3, *shape)))
    assert logits.shape == (3, 10)
    assert bool(jnp.isfinite(logits).all())
    assert build(num_classes=10) == build(num_classes=10)  # so that programs are found again
    other, _ = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, *shape)))
    assert bool((params["Dense_0"]["kernel"] != other["Dense_0"]["kernel"]).all())


@pytest.mark.parametrize("name", catalogue.ALGORITHMS)
def test_algorithm(name):
    topology = topologies.ring(catalogue.NODES)
    algorithm = catalogue.ALGORITHMS[name].make(topology)
    params = {"w": jnp.ones((catalogue.NODES, 3)), "b": jnp.ones(catalogue.NODES)}
    network = algorithm.network(topology)
    state = algorithm.init(params, network)
    round = algorithms.Round(jnp.array(0), jax.random.key(0), jnp.arange(catalogue.NODES), lambda params: params)
    stepped, after = jax.jit(lambda *args: algorithm.step(*args, network.at(round), round))(params, params, state)
    assert jax.tree.map(jnp.shape, stepped) == jax.tree.map(jnp.shape, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert float(stepped["w"].max()) < 1  # the gradient is positive: it goes down
    # Equal models with equal gradients stay equal.
    assert float(jnp.ptp(stepped["w"])) < 1e-6


@pytest.mark.parametrize("name", catalogue.TOPOLOGIES)
def test_every_topology_trains(name):
    data = catalogue.PARTITIONS["shards"](catalogue.dataset(), catalogue.nodes_of(name))
    result = simulate(catalogue.TOPOLOGIES[name](data.label_distribution), data, epochs=8, eval_every=8, progress=False)
    assert result.history.accuracy[-1].mean() > result.history.accuracy[0].mean() + 0.1
