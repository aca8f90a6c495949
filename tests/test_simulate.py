import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reference
from dcliques_jax import algorithms, datasets, models, partitions, simulate, topologies
from dcliques_jax._engine import cache_key, evaluation, layout
from dcliques_jax._engine.simulation import Simulation
from dcliques_jax._mesh.placement import Placement
from monitoring import compilations, traces

DATA = datasets.synthetic(num_train=400, num_test=50, num_classes=4, input_shape=(5,), seed=1)
SHARDS = partitions.shards(DATA, 20, seed=1)


def run(topology=None, data=SHARDS, **arguments):
    if "rounds" not in arguments:
        arguments = {"epochs": 2} | arguments
    return simulate(topologies.ring(20) if topology is None else topology, data, progress=False, **arguments)


# Batches


def test_default_batch_size_is_the_paper_s_share():
    for num_nodes, batch_size in [(1, 103), (10, 11), (20, 6)]:
        data = partitions.iid(DATA, num_nodes)
        result = run(topologies.fully_connected(num_nodes), data, epochs=0)
        assert result.provenance["batch_size"] == batch_size
        assert result.provenance["rounds_per_epoch"] == 4


# Equivalences


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fully_connected_equals_one_node_with_the_union_batch(momentum):
    """With equal starts and full averaging, n nodes with batch b are one node with batch n b."""
    n, per_node = 5, 80
    data = partitions.iid(DATA, n)
    start = {"Dense_0": {"kernel": np.zeros((5, 4)), "bias": np.zeros(4)}}
    arguments = {"init": start, "rounds": 6, "eval_every": 6}
    algorithm = algorithms.dsgd(optax.sgd(0.2, momentum=momentum))
    many = run(topologies.fully_connected(n), data, batch_size=per_node, algorithm=algorithm, **arguments)
    one = run(topologies.fully_connected(1), DATA, batch_size=n * per_node, algorithm=algorithm, **arguments)
    for leaf, single in zip(jax.tree.leaves(many.params), jax.tree.leaves(one.params), strict=True):
        assert np.ptp(leaf, axis=0).max() < 1e-12
        np.testing.assert_allclose(leaf[0], single[0], atol=1e-10)
    assert many.history.consensus_distance[-1] < 1e-12


def test_one_clique_equals_fully_connected():
    one = run(topologies.d_cliques(SHARDS.label_distribution, clique_size=20))
    full = run(topologies.fully_connected(20))
    np.testing.assert_allclose(one.params["Dense_0"]["kernel"], full.params["Dense_0"]["kernel"], atol=1e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("clique_averaging", [False, True])
def test_permuting_the_nodes_permutes_the_results(clique_averaging):
    """With whole local data sets as batches the order of sampling plays no part."""
    order = np.random.default_rng(0).permutation(20)
    place = np.argsort(order)  # node i moves to place[i]
    topology = topologies.d_cliques(SHARDS.label_distribution, clique_size=5)
    moved = topologies.from_edges(20, place[topology.edges], clique_ids=topology.clique_ids[order])
    moved_data = partitions.from_indices(DATA, list(SHARDS.indices[order]))
    algorithm = algorithms.dsgd(optax.sgd(0.2, momentum=0.5), clique_averaging=clique_averaging)
    start = {"Dense_0": {"kernel": np.zeros((5, 4)), "bias": np.zeros(4)}}
    arguments = {"batch_size": 20, "algorithm": algorithm, "init": start}
    one, two = run(topology, SHARDS, **arguments), run(moved, moved_data, **arguments)
    np.testing.assert_allclose(two.params["Dense_0"]["kernel"], one.params["Dense_0"]["kernel"][order], atol=1e-12)
    np.testing.assert_allclose(two.history.loss, one.history.loss[:, order], atol=1e-12)


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("gradient_weights", "eval_nodes"),
    [(None, 7), (np.full((20, 20), 1 / 20), None), (np.roll(np.eye(20), 1, axis=1), 7)],
)
def test_nobody_sees_in_which_order_nodes_are_stored(gradient_weights, eval_nodes):
    """Clique by clique; all that comes back is in the topology's order."""
    data = partitions.dirichlet(DATA, 20, alpha=0.5, seed=1)
    topology = topologies.d_cliques(data.label_distribution, clique_size=6, max_steps=50)
    assert (np.diff(topology.clique_ids) < 0).any()
    adam = algorithms.dsgd(optax.adam(0.01), gradient_weights=gradient_weights)
    arguments = {"init": "independent", "eval_nodes": eval_nodes, "seed": 3}
    stored_by_clique = run(topology, data, algorithm=adam, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_on_one_device", lambda topology: Placement(np.arange(topology.num_nodes), 1))
        as_they_are = run(topology, data, algorithm=adam, **arguments)
    jax.tree.map(np.testing.assert_array_equal, stored_by_clique.state, as_they_are.state)
    for field in ("accuracy", "loss", "train_loss"):
        np.testing.assert_array_equal(
            getattr(stored_by_clique.history, field), getattr(as_they_are.history, field), err_msg=field
        )


def test_a_single_node_is_centralised_sgd():
    result = run(topologies.fully_connected(1), DATA, epochs=10)
    assert result.history.accuracy.shape == (11, 1)
    assert result.history.accuracy[-1, 0] > result.history.accuracy[0, 0] + 0.3
    assert result.history.consensus_distance.max() == 0


def test_clique_averaging_is_on_where_there_are_cliques():
    topology = topologies.d_cliques(SHARDS.label_distribution, clique_size=5)
    default, on, off = (
        run(topology, algorithm=algorithms.dsgd(clique_averaging=choice)).params["Dense_0"]["kernel"]
        for choice in (None, True, False)
    )
    np.testing.assert_array_equal(default, on)
    assert (default != off).any()
    assert run(topologies.ring(20), algorithm=algorithms.dsgd()) is not None


# Reproducibility and compilation


def test_same_arguments_same_bits():
    one, two, other = run(seed=3), run(seed=3), run(seed=4)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.history.loss, two.history.loss)
    assert (one.params["Dense_0"]["kernel"] != other.params["Dense_0"]["kernel"]).any()


def test_bits_do_not_depend_on_the_default_generator():
    with jax.default_prng_impl("rbg"):
        other = run()
    np.testing.assert_array_equal(run().params["Dense_0"]["kernel"], other.params["Dense_0"]["kernel"])


@pytest.mark.parametrize("eval_every", [1, 3, 8])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.01)], ids=["sgd", "adam"])
def test_evaluating_does_not_change_the_run(eval_every, optimizer):
    arguments = {"rounds": 8, "algorithm": algorithms.dsgd(optimizer)}
    result, whole = run(eval_every=eval_every, **arguments), run(eval_every=20, **arguments)
    jax.tree.map(np.testing.assert_array_equal, result.state, whole.state)
    assert result.history.round.tolist() == [*range(0, 8, eval_every), 8]


def test_a_shorter_last_interval_compiles_nothing():
    arguments = {"eval_every": 3, "algorithm": algorithms.dsgd(optax.sgd(0.123))}
    run(rounds=6, **arguments)
    with compilations() as compiled:
        run(rounds=7, **arguments)
    assert compiled == []


def test_a_second_run_of_the_same_shapes_compiles_nothing():
    def again(seed):
        data = partitions.shards(DATA, 20, seed=seed)
        topology = topologies.d_cliques(data.label_distribution, clique_size=5, seed=seed)
        algorithm = algorithms.dsgd(optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)))
        return run(topology, data, algorithm=algorithm, model=models.logistic_regression(4), seed=seed, epochs=3)

    jax.clear_caches()
    with compilations() as compiled:
        first = again(0)
    assert compiled
    with compilations() as compiled:
        second = again(0)
        other = again(1)
    assert compiled == []
    np.testing.assert_array_equal(first.history.accuracy, second.history.accuracy)
    assert (second.history.accuracy != other.history.accuracy).any()


def test_evaluation_is_compiled_once_for_all_algorithms():
    run()
    with traces() as names:
        run(algorithm=algorithms.dsgd(optax.adam(0.0123)), batch_size=7)
    assert "run" in names
    assert "evaluate" not in names


def test_another_learning_rate_is_another_program():
    """Programs are recognised by what functions close over: a changed number must not find the old program."""
    slow, fast = (run(algorithm=algorithms.dsgd(optax.sgd(rate))).params for rate in (0.001, 0.5))
    assert np.abs(slow["Dense_0"]["kernel"] - fast["Dense_0"]["kernel"]).max() > 0.05


def test_an_algorithm_may_look_at_the_initial_parameters():
    inner = algorithms.dsgd()

    def init(params, network):
        assert np.isfinite(params["Dense_0"]["kernel"]).all()
        return inner.init(params, network)

    result = run(algorithm=inner._replace(init=init))
    np.testing.assert_array_equal(result.history.accuracy, run().history.accuracy)


def test_the_program_reuses_the_state_s_memory(monkeypatch):
    seen, original = [], Simulation._run

    def watched(simulation, count):
        params = simulation._carry.params
        found = original(simulation, count)
        seen.append(all(leaf.is_deleted() for leaf in jax.tree.leaves(params)))
        return found

    monkeypatch.setattr(Simulation, "_run", watched)
    run()
    assert seen
    assert all(seen)


def test_the_caller_s_arrays_survive():
    """The program takes over the buffers it is given; those of the caller must not be among them."""
    start = {"Dense_0": {"kernel": jnp.ones((5, 4)), "bias": jnp.ones(4)}}
    for _ in range(2):
        run(topologies.fully_connected(1), DATA, init=start)
    np.testing.assert_array_equal(start["Dense_0"]["kernel"], 1)


# Initial models


def test_shared_averaged_and_independent_starts():
    kernels = {
        init: np.asarray(run(init=init, epochs=0).params["Dense_0"]["kernel"])
        for init in ("shared", "averaged", "independent")
    }
    for init in ("shared", "averaged"):
        assert np.ptp(kernels[init], axis=0).max() == 0
    assert np.ptp(kernels["independent"], axis=0).min() > 0
    np.testing.assert_allclose(kernels["averaged"][0], kernels["independent"].mean(axis=0), atol=1e-6)
    assert np.abs(kernels["averaged"]).max() < np.abs(kernels["shared"]).max()


def test_a_start_may_be_given():
    start = {"Dense_0": {"kernel": np.arange(20.0).reshape(5, 4), "bias": np.zeros(4)}}
    result = run(init=start, epochs=0)
    np.testing.assert_array_equal(result.params["Dense_0"]["kernel"], np.tile(start["Dense_0"]["kernel"], (20, 1, 1)))


# History


def test_history_has_the_promised_shapes():
    result = run(epochs=4, eval_every=2)
    history = result.history
    assert history.round.tolist() == [0, 8, 16]
    assert history.epoch.tolist() == [0, 2, 4]
    assert history.accuracy.shape == history.loss.shape == history.train_loss.shape == (3, 20)
    assert history.consensus_distance.shape == (3,)
    assert history.consensus_distance[0] == 0  # a shared start
    assert history.consensus_distance[1] > 0
    assert ((history.accuracy >= 0) & (history.accuracy <= 1)).all()
    assert np.isnan(history.train_loss[0]).all()
    assert np.isfinite(history.train_loss[1:]).all()
    assert history.eval_nodes.tolist() == list(range(20))
    assert history.eval_examples.tolist() == list(range(50))
    assert int(result.state.round) == 16


def test_ten_epochs_by_default_and_the_end_is_always_evaluated():
    assert simulate(topologies.ring(20), SHARDS, progress=False).history.epoch.tolist() == list(range(11))
    assert run(epochs=5, eval_every=2).history.epoch.tolist() == [0, 2, 4, 5]
    assert run(rounds=5, eval_every=2).history.round.tolist() == [0, 2, 4, 5]


def test_evaluating_some_nodes_on_some_examples():
    whole = run()
    part, again, other = (run(eval_nodes=6, eval_examples=30, seed=seed) for seed in (0, 0, 1))
    nodes, examples = part.history.eval_nodes, part.history.eval_examples
    assert part.history.accuracy.shape == (3, 6)
    assert len(np.unique(nodes)) == 6
    assert len(np.unique(examples)) == 30
    np.testing.assert_array_equal(nodes, again.history.eval_nodes)
    assert (examples != other.history.eval_examples).any()
    params = {name: np.asarray(leaf)[nodes] for name, leaf in whole.params["Dense_0"].items()}
    accuracy, loss = reference.evaluate(params, DATA.test_inputs[examples], DATA.test_labels[examples])
    np.testing.assert_allclose(part.history.accuracy[-1], accuracy, atol=1e-6)
    np.testing.assert_allclose(part.history.loss[-1], loss, rtol=1e-5)
    np.testing.assert_array_equal(part.history.consensus_distance, whole.history.consensus_distance)
    np.testing.assert_array_equal(part.params["Dense_0"]["kernel"], whole.params["Dense_0"]["kernel"])


def test_evaluation_in_small_chunks_is_the_same(monkeypatch):
    whole = run()
    monkeypatch.setattr(evaluation, "_MOST_EXAMPLES", 7)  # of fifty: the last chunk is shorter
    parts = run()
    np.testing.assert_allclose(parts.history.accuracy, whole.history.accuracy, atol=1e-6)
    np.testing.assert_allclose(parts.history.loss, whole.history.loss, rtol=1e-5)


def test_a_plain_dataset_is_split_iid():
    one, two = run(data=DATA, topology=topologies.ring(10)), run(topologies.ring(10), partitions.iid(DATA, 10))
    np.testing.assert_array_equal(one.history.accuracy, two.history.accuracy)


def test_nodes_may_differ_in_size():
    data = partitions.dirichlet(DATA, 20, alpha=0.3, seed=2)
    assert np.ptp(data.sizes) > 10
    result = run(topologies.d_cliques(data.label_distribution, clique_size=5), data, epochs=10, batch_size=8)
    assert result.provenance["rounds_per_epoch"] == -(-data.sizes.max() // 8)
    assert result.history.accuracy[-1].mean() > 0.7


# Non-finite numbers


def test_divergence_stops_the_run_and_names_round_and_node():
    algorithm = algorithms.dsgd(optax.sgd(1e38))
    with pytest.raises(FloatingPointError, match=r"non-finite \w+( loss)? in round \d+ at node \d+.*learning rate"):
        run(algorithm=algorithm)


def poison(after, node):
    """An optimiser that makes the parameters of one node NaN in one round."""

    def update(updates, state, params=None):
        bad = (state["round"] == after - 1) & (state["node"] == node)
        return jax.tree.map(lambda u: jnp.where(bad, jnp.nan, u), updates), state | {"round": state["round"] + 1}

    return optax.GradientTransformation(lambda _: {"round": 0, "node": 0}, update)


@pytest.mark.parametrize("when", [3, 8])
def test_the_round_and_the_node_are_the_right_ones(when):
    """Parameters turn NaN in round `when`; that shows in the loss of the next, or at the end."""
    inner = algorithms.dsgd(poison(when, 13), weights=np.eye(20))

    def init(params, network):
        return {"round": jnp.zeros(20, int), "node": jnp.arange(20)}

    algorithm = inner._replace(init=init)
    seen = "training loss in round 4" if when == 3 else "parameters in round 8"
    with pytest.raises(FloatingPointError, match=f"non-finite {seen} at node 13"):
        run(algorithm=algorithm)
    with pytest.warns(RuntimeWarning, match=f"non-finite {seen} at node 13") as caught:
        result = run(algorithm=algorithm, on_nonfinite="warn")
    assert len(caught) == 1
    assert result.history.round[-1] == 8
    assert np.isfinite(np.delete(result.history.loss[-1], 13)).all()


def test_a_healthy_run_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(on_nonfinite="warn")


# Bad arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topology": topologies.ring(10)}, "topology has 10 nodes but the data is split over 20"),
        ({"batch_size": 21}, r"batch_size=21 must be an integer in 1\.\.20"),
        ({"batch_size": 0}, r"batch_size=0 must be an integer in 1\.\.20"),
        ({"epochs": 1, "rounds": 1}, "epochs=1 and rounds=1: pass either, not both"),
        ({"epochs": -1}, "epochs=-1 must be an integer of at least 0"),
        ({"rounds": -1}, "rounds=-1 must be an integer of at least 0"),
        ({"eval_every": 0}, "eval_every=0 must be an integer of at least 1"),
        ({"eval_nodes": 21}, r"eval_nodes=21 must be an integer in 1\.\.20"),
        ({"eval_examples": 0}, r"eval_examples=0 must be an integer in 1\.\.50"),
        ({"init": "zeros"}, "init='zeros' is unknown: choose one of shared, averaged, independent"),
        ({"init": {"Dense_0": {"kernel": np.zeros((5, 4))}}}, "init has leaves"),
        ({"init": {"Dense_0": {"kernel": np.zeros((4, 5)), "bias": np.zeros(4)}}}, "init has leaves"),
        ({"loss_fn": "mse"}, r"loss_fn='mse' is not a function"),
        ({"on_evaluation": 3}, r"on_evaluation=3 is not a function"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' is unknown: choose one of raise, warn"),
        ({"algorithm": algorithms.dsgd(weights=np.ones((20, 20)))}, "row 0 of the weights sums to 20"),
        ({"algorithm": algorithms.dsgd(weights=np.eye(19))}, "weights are for 19 nodes"),
        ({"algorithm": algorithms.dsgd(gradient_weights=np.eye(19))}, "gradient_weights are for 19 nodes"),
        (
            {"algorithm": algorithms.dsgd(gradient_weights=5 * np.eye(20))},
            "weights sums to 5",
        ),
        ({"algorithm": algorithms.dsgd(clique_averaging=True)}, "neither cliques nor gradient edges"),
        ({"model": "lenet"}, "model='lenet' is not a model"),
        ({"init": {"Dense_0": {"kernel": np.full((5, 4), np.nan), "bias": np.zeros(4)}}}, "init holds NaN"),
        ({"init": {"Dense_0": {"kernel": np.zeros((5, 4), int), "bias": np.zeros(4)}}}, "init has leaves"),
        ({"epochs": 2.5}, r"epochs=2\.5 must be an integer"),
        ({"seed": -1}, "seed=-1 must be an integer"),
        ({"topology": "ring"}, "topology='ring' is not a Topology"),
        ({"topology": topologies.ring(20), "data": topologies.ring(20)}, "is not a data set"),
        ({"algorithm": optax.sgd(0.1)}, r"is not an algorithm: pass Algorithm\(network"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_compiled(arguments, message):
    # Nothing that was compiled before is found.
    with cache_key.fresh_traces(), compilations() as compiled, pytest.raises(ValueError, match=message):
        run(**arguments)
    assert compiled == []


def test_bad_algorithms_are_refused():
    with pytest.raises(ValueError, match="clique_averaging='yes' must be True, False or None"):
        algorithms.dsgd(clique_averaging="yes")
    with pytest.raises(ValueError, match=r"optimizer=0\.1 is not an optax transformation"):
        algorithms.dsgd(0.1)
    with pytest.raises(ValueError, match="pass either, not both"):
        algorithms.dsgd(clique_averaging=True, gradient_weights=np.eye(3))


@pytest.mark.optimised
def test_inputs_held_as_bytes_train_the_same_models():
    pixels = np.random.default_rng(0).integers(0, 256, size=(200, 3, 3, 1), dtype=np.uint8)
    inputs, labels = pixels / np.float32(255), np.arange(200) % 4

    def trained(byte_scale):
        data = datasets.from_arrays(inputs, labels, inputs, labels, byte_scale=byte_scale)
        return run(data=partitions.iid(data, 20))

    held_as_bytes, held_as_floats = trained((1 / 255, 0.0)), trained(None)
    np.testing.assert_allclose(
        held_as_bytes.params["Dense_0"]["kernel"], held_as_floats.params["Dense_0"]["kernel"], atol=1e-6
    )
    # Three bytes less for each of 1800 pixels; everything else is the same, but for what it is aligned to.
    saved = held_as_floats.provenance["memory_bytes"] - held_as_bytes.provenance["memory_bytes"]
    assert 4000 < saved < 6000


def test_memory_is_known_even_if_there_is_nothing_to_run():
    assert run(epochs=0).provenance["memory_bytes"] == 0
    result = run(epochs=1)
    assert result.provenance["memory_bytes"] > sum(leaf.nbytes for leaf in jax.tree.leaves(result.params))


def test_an_algorithm_s_own_arrays_keys_and_numbers_survive(tmp_path):
    """Its state may hold anything that JAX knows, and none of it is taken away."""
    table, key = jnp.linspace(0.1, 0.2, 20), jax.random.key(3)

    def init(params, network):
        return {"table": table, "key": key, "rate": 0.5}

    def step(params, gradients, state, network, round):
        noise = 1e-3 * jax.random.normal(state["key"])
        rates = state["rate"] * state["table"]

        def after(p, g):
            return p - rates.reshape(-1, *[1] * (p.ndim - 1)) * g + noise

        return jax.tree.map(after, params, gradients), state

    algorithm = algorithms.Algorithm(algorithms.over_topology(), init, step)
    results = [run(topologies.ring(20), algorithm=algorithm, checkpoint_dir=folder) for folder in (None, tmp_path)]
    assert not table.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, results[0].params, results[1].params)
    assert results[0].history.loss[-1].mean() < results[0].history.loss[0].mean()


# Beside accuracies


def test_the_mean_model_and_the_nodes_that_are_right_are_measured():
    dataset = datasets.synthetic(num_train=200, num_test=30, seed=2)
    data = partitions.shards(dataset, 10, seed=2)
    result = simulate(topologies.ring(10), data, epochs=2, eval_nodes=4, eval_examples=20, progress=False)
    chosen = result.history.eval_examples
    inputs, labels = dataset.test_inputs[chosen], dataset.test_labels[chosen]
    predict = models.predictor(models.logistic_regression())

    def right(params):
        return np.asarray(predict(params, inputs)).argmax(axis=1) == labels

    nodes = [jax.tree.map(lambda leaf, node=node: leaf[node], result.params) for node in result.history.eval_nodes]
    mean_model = jax.tree.map(lambda leaf: np.mean(leaf, axis=0), result.params)
    np.testing.assert_array_equal(result.history.nodes_right[-1], np.sum([right(node) for node in nodes], axis=0))
    np.testing.assert_allclose(result.history.mean_model_accuracy[-1], right(mean_model).mean(), rtol=1e-6)


@pytest.mark.optimised
def test_all_right_is_an_accuracy_of_one():
    """97 divided by 97 in float32, as XLA does it, is 0.99999994."""
    labels = np.arange(97) % 4
    inputs = np.eye(4, dtype=np.float32)[labels]
    dataset = datasets.from_arrays(inputs, labels, inputs, labels)
    start = {"Dense_0": {"kernel": 10 * np.eye(4, dtype=np.float32), "bias": np.zeros(4, np.float32)}}
    history = run(topologies.fully_connected(1), dataset, init=start, epochs=1).history
    assert (history.accuracy == 1).all()
    assert (history.mean_model_accuracy == 1).all()


def test_nodes_and_evaluations_may_be_listed():
    result = run(rounds=7, eval_every=[6, 2], eval_nodes=[3, 1, 19])
    assert result.history.round.tolist() == [0, 2, 6, 7]
    assert result.history.eval_nodes.tolist() == [3, 1, 19]
    np.testing.assert_array_equal(
        result.history.accuracy, run(rounds=7, eval_every=[2, 6]).history.accuracy[:, [3, 1, 19]]
    )
    assert run(epochs=3, eval_every=[2]).history.epoch.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eval_nodes": [0, 20]}, r"eval_nodes=20 must be an integer in 0..19"),
        ({"eval_nodes": [1, 1]}, r"eval_nodes=\[1, 1\] must hold different numbers"),
        ({"eval_nodes": []}, r"eval_nodes=\[\] must hold"),
        ({"eval_every": [3]}, r"eval_every=3 must be an integer in 0..2, the length of the run"),
        ({"eval_every": []}, r"eval_every=\[\] must hold"),
        ({"loss_fn": lambda logits, labels: labels}, r"loss_fn returns int32 losses: they must be real numbers"),
        ({"algorithm": algorithms.Algorithm(None, None, None)}, r"algorithm.network=None is not a function: pass"),
        ({"checkpoint_dir": 3}, r"checkpoint_dir=3 must be the path of a folder"),
        ({"loss_fn": 3}, r"loss_fn=3 is not a function: omit it for the usual loss"),
    ],
)
def test_wrong_lists_and_functions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(**arguments)


@pytest.mark.parametrize(
    ("answer", "stops"), [(jnp.array(True), True), (np.array(True), True), (np.bool_(True), True), ({"a": 1}, False)]
)
def test_any_truth_value_stops_a_run(answer, stops):
    assert len(run(on_evaluation=lambda _: answer).history.round) == (1 if stops else 3)


def test_callbacks_cannot_change_history():
    def spoil(record):
        for array in (record.accuracy, record.loss, record.train_loss, record.nodes_right):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0

    np.testing.assert_array_equal(run(on_evaluation=spoil).history.accuracy, run().history.accuracy)


DSGD = algorithms.dsgd()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda p, g, s, *_: p, r"algorithm.step returns dict: it must return \(params, state\)"),
        (lambda p, g, s, *_: (p, s, s), r"algorithm.step returns tuple: it must return \(params, state\)"),
        (lambda p, g, s, *_: (p["Dense_0"], s), r"algorithm.step returns params of structure"),
        (lambda p, g, s, *_: (p, (s, 1)), r"algorithm.step returns state of structure"),
        (
            lambda p, g, s, *_: (jax.tree.map(lambda leaf: leaf[:3], p), s),
            r"returns params\['Dense_0'\]\['bias'\] as float32\[3, 4\], but takes float32\[20, 4\]",
        ),
        (
            lambda p, g, s, *_: (jax.tree.map(lambda leaf: leaf.astype(jnp.float16), p), s),
            r"as float16\[20, 4\], but takes float32\[20, 4\]",
        ),
    ],
)
def test_a_step_must_return_what_it_takes(step, message):
    with pytest.raises(ValueError, match=message):
        run(algorithm=DSGD._replace(step=step))


def test_a_step_tells_nodes_by_their_numbers():
    topology = topologies.d_cliques(SHARDS.label_distribution, clique_size=5)
    assert (np.argsort(topology.clique_ids, kind="stable") != np.arange(20)).any()

    def step(params, gradients, state, network, round):
        frozen = round.nodes < 5
        after, state = DSGD.step(params, gradients, state, network, round)
        kept = jax.tree.map(lambda a, b: jnp.where(frozen.reshape(-1, *[1] * (a.ndim - 1)), a, b), params, after)
        return kept, state

    start = {"Dense_0": {"kernel": np.zeros((5, 4), np.float32), "bias": np.zeros(4, np.float32)}}
    trained = run(topology, algorithm=DSGD._replace(step=step), init=start).params["Dense_0"]["kernel"]
    assert (np.abs(trained).max(axis=(1, 2)) > 0).tolist() == 5 * [False] + 15 * [True]


def test_the_result_tells_the_algorithm_in_words():
    told = str(run(algorithm=algorithms.dsgd(optax.sgd(0.05, momentum=0.9))))
    assert "algorithm: dsgd(optimizer=trace(decay=0.9, nesterov=False), learning_rate(0.05))" in told
    assert "loss: cross_entropy" in told


def test_so_many_rounds_take_no_more_memory():
    """Losses are added up on the way: the program is that of a run that is evaluated often."""
    few, many = (run(rounds=n, eval_every=n, on_evaluation=lambda _: True) for n in (10, 1_500_000_000))
    assert few.provenance["memory_bytes"] == many.provenance["memory_bytes"]
    assert few.provenance["program"] == many.provenance["program"]
