"""Nodes on eight devices give what they give on one. Run by `test_devices.py` in a process that has eight."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcliques_jax import (
    _devices,
    _layouts,
    _plans,
    algorithms,
    datasets,
    metrics,
    models,
    partitions,
    simulate,
    topologies,
)

DATA = datasets.synthetic(num_train=2000, num_test=30, input_shape=(7,), seed=1)
SHARDS = partitions.shards(DATA, 100, seed=1)
P = SHARDS.label_distribution
MOMENTUM = algorithms.dsgd(optax.sgd(0.1, momentum=0.9))
UNEVEN = partitions.dirichlet(DATA, 37, alpha=0.5, seed=1)
TOPOLOGIES = {
    "fully connected cliques": (topologies.d_cliques(P), SHARDS),
    "small world": (topologies.d_cliques(P, inter="small_world"), SHARDS),
    "ring of cliques": (topologies.d_cliques(P, inter="ring"), SHARDS),
    "edges removed": (topologies.remove_intra_clique_edges(topologies.d_cliques(P), 3), SHARDS),
    "three cliques": (topologies.d_cliques(P, clique_size=40), SHARDS),
    "ring": (topologies.ring(37), UNEVEN),
    "random graph": (topologies.random_regular(100, 10), SHARDS),
    "fully connected": (topologies.fully_connected(37), UNEVEN),
}


def mesh(count=8):
    return jax.make_mesh((count,), (_devices.AXIS,), devices=jax.devices()[:count])


def run(topology, data, **arguments):
    arguments = {"epochs": 2, "init": "independent", "algorithm": MOMENTUM} | arguments
    return simulate(topology, data, progress=False, **arguments)


def assert_close(one, two, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), one.state, two.state)
    for name in ("loss", "train_loss", "consensus_distance"):
        a, b = getattr(one.history, name), getattr(two.history, name)
        np.testing.assert_allclose(a, b, atol=5 * atol, err_msg=name)
    # A logit or two may be rounded to the other side.
    for name in ("mean_model_accuracy", "nodes_right"):
        a, b = getattr(one.history, name), getattr(two.history, name)
        assert np.mean(a != b) < 0.02, name
    np.testing.assert_array_equal(one.history.round, two.history.round)
    np.testing.assert_array_equal(one.history.eval_nodes, two.history.eval_nodes)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_eight_devices_compute_what_one_does(name):
    alone = run(*TOPOLOGIES[name])
    assert_close(run(*TOPOLOGIES[name], mesh=mesh()), alone)
    if name == "small world":
        assert_close(run(*TOPOLOGIES[name], mesh=mesh(3)), alone)
        assert_close(run(*TOPOLOGIES[name], mesh=mesh(1)), alone)


@pytest.mark.usefixtures("x64")
def test_they_differ_by_rounding_only():
    arguments = TOPOLOGIES["small world"]
    start = {"Dense_0": {"kernel": np.zeros((7, 10)), "bias": np.zeros(10)}}
    assert_close(run(*arguments, mesh=mesh(), init=start), run(*arguments, init=start), atol=1e-14)


@pytest.mark.parametrize("more", [{"eval_nodes": 13, "eval_examples": 11}, {"seeds": [4, 1]}, {"init": "shared"}])
def test_subsets_and_seeds_are_the_same(more):
    arguments = TOPOLOGIES["small world"]
    assert_close(run(*arguments, mesh=mesh(), **more), run(*arguments, **more))


def test_seeds_may_have_topologies_of_their_own():
    data = [partitions.shards(DATA, 100, seed=seed) for seed in (1, 2)]
    graphs = [
        topologies.d_cliques(d.label_distribution, inter="small_world", seed=s)
        for d, s in zip(data, (1, 2), strict=True)
    ]
    assert_close(run(graphs, data, seeds=[1, 2], mesh=mesh()), run(graphs, data, seeds=[1, 2]))


def test_gradients_may_be_averaged_across_devices():
    data = partitions.one_class(DATA, 100, seed=1)
    diverse = topologies.diverse_random(data.label_distribution)
    averaging = algorithms.dsgd(optax.sgd(0.1), clique_averaging=True)
    assert_close(run(diverse, data, algorithm=averaging, mesh=mesh()), run(diverse, data, algorithm=averaging))


def test_networks_are_shared_out_too():
    images = datasets.synthetic(num_train=200, num_test=4, input_shape=(16, 16, 3))
    data = partitions.shards(images, 20)
    topology = topologies.d_cliques(data.label_distribution, clique_size=5)
    arguments = {"model": models.gn_lenet(), "epochs": None, "rounds": 1, "batch_size": 2, "init": "shared"}
    assert_close(run(topology, data, mesh=mesh(), **arguments), run(topology, data, **arguments), atol=1e-5)


# What devices tell each other


def collectives(topology, data, count=8, **arguments):
    """Operations of the compiled rounds that move something between devices: (kind, bytes of all devices)."""
    runs = _plans.make_runs(topology, data, 0, None)
    plan = _plans.make_plan(runs, rounds=3)
    parts = _plans.Parts(
        models.as_model(models.logistic_regression()),
        "",
        arguments.get("algorithm", MOMENTUM),
        metrics.cross_entropy,
        "shared",
    )
    layout = _layouts.make_layout(runs, parts, _devices.check_mesh(mesh(count)))
    text = _layouts.prepare(layout, plan).program.as_text()
    kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter|collective-broadcast"
    found = []
    for shape, kind in re.findall(rf"= (\([^)]*\)|\S+) ({kinds})(?:-start)?\(", text):
        sizes = [
            np.prod([int(n) for n in dims.split(",") if n] or [1]) for dims in re.findall(r"\w+\[([\d,]*)\]", shape)
        ]
        found.append((kind, 4 * count * int(sum(sizes))))
    return found


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_only_boundary_rows_move_and_as_many_as_the_report_says(name, monkeypatch):
    monkeypatch.setattr(_layouts, "_MOST_ROUNDS", 3)
    topology, data = TOPOLOGIES[name]
    found = collectives(topology, data)
    parameters = 10 * 7 + 10
    report = topology.report(num_parameters=parameters, num_devices=8)
    kind = "all-reduce" if name == "fully connected" else "collective-permute"
    assert sum(size for k, size in found if k == kind) == report.bytes_between_devices
    everything = 4 * parameters * data.num_nodes
    others = [size for k, size in found if k != kind]
    # Losses and batch sizes of three rounds, for every process to read: no models.
    assert sum(others) <= 2 * 4 * 3 * 8 * 8 * (data.num_nodes + 8)
    assert all(size < everything for k, size in found if k == "all-gather") or everything < 4 * 3 * 8 * 100
    if name in ("ring of cliques", "ring"):
        assert 8 <= report.cut_edges <= 16


def test_clique_averaging_needs_no_message():
    topology, data = TOPOLOGIES["fully connected cliques"]
    plain = algorithms.dsgd(optax.sgd(0.1), clique_averaging=False)
    averaging = algorithms.dsgd(optax.sgd(0.1), clique_averaging=True)
    assert collectives(topology, data, algorithm=averaging) == collectives(topology, data, algorithm=plain)


def test_two_nodes_are_enough_for_two_devices():
    data = partitions.iid(DATA, 2)
    assert_close(run(topologies.ring(2), data, mesh=mesh(2)), run(topologies.ring(2), data))


# Checkpoints


class StopError(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("counts", [(8, 3), (8, None), (None, 8)])
def test_a_run_goes_on_with_another_number_of_devices(counts, tmp_path):
    first, then = (None if count is None else mesh(count) for count in counts)
    arguments = {"epochs": None, "rounds": 7, "eval_every": 3, "checkpoint_dir": tmp_path}  # epochs have four rounds
    topology, data = TOPOLOGIES["small world"]

    def stop(record):
        if record.round == 3:
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcliques_jax._store.checkpoints._SPACING", 0)
        with pytest.raises(StopError):
            run(topology, data, mesh=first, on_evaluation=stop, **arguments)
    resumed = run(topology, data, mesh=then, **arguments)
    assert resumed.history.round.tolist() == [0, 3, 6, 7]
    assert_close(resumed, run(topology, data, **arguments | {"checkpoint_dir": None}))


# Errors


@pytest.mark.filterwarnings("ignore:on a mesh an algorithm sees")
def test_what_devices_cannot_share_is_refused():
    star = topologies.from_edges(100, [(0, i) for i in range(1, 100)])
    with pytest.raises(ValueError, match="Dense weights multiply all models"):
        run(star, SHARDS, mesh=mesh())
    with pytest.raises(ValueError, match="a mesh needs an algorithm that can reorder its state"):
        run(*TOPOLOGIES["small world"], mesh=mesh(), algorithm=MOMENTUM._replace(reorder=None))

    def changes(params, gradients, state):
        halved = jax.tree.map(lambda leaf: leaf // 2, state.weights)
        return MOMENTUM.step(params, gradients, state._replace(weights=halved))

    with pytest.raises(ValueError, match="changes the weights in its state"):
        run(*TOPOLOGIES["small world"], mesh=mesh(), algorithm=MOMENTUM._replace(step=changes))

    class Watched(NamedTuple):
        own: Any
        largest: jax.Array  # of all nodes
        rounds: jax.Array

    def init(topology, params):
        return Watched(MOMENTUM.init(topology, params), jnp.zeros(()), jnp.zeros((), jnp.int32))

    def reorder(state, order):
        return state._replace(own=MOMENTUM.reorder(state.own, order))

    def watching(see):
        def step(params, gradients, state):
            params, own = MOMENTUM.step(params, gradients, state.own)
            return see(params, Watched(own, state.largest, state.rounds + 1))

        return algorithms.Algorithm(init, step, reorder)

    def largest(params, state):
        return params, state._replace(largest=jax.tree.leaves(params)[0].max())

    def centred(params, state):
        return jax.tree.map(lambda leaf: leaf - leaf.mean(axis=0, keepdims=True), params), state

    for see in (largest, centred):
        with pytest.raises(ValueError, match="lets nodes see each other by other ways than Weights"):
            run(*TOPOLOGIES["small world"], mesh=mesh(), algorithm=watching(see))
    counting = watching(lambda *both: both)
    with pytest.warns(UserWarning, match="row k is not node k"):
        run(*TOPOLOGIES["small world"], mesh=mesh(), algorithm=counting)
    assert_close(
        run(*TOPOLOGIES["small world"], mesh=mesh(), algorithm=counting),
        run(*TOPOLOGIES["small world"], algorithm=counting),
    )
    for wrong in (jax.make_mesh((8,), ("x",)), jax.make_mesh((4, 2), ("nodes", "x")), 8):
        with pytest.raises(ValueError, match="must have one axis named 'nodes'"):
            run(*TOPOLOGIES["small world"], mesh=wrong)
