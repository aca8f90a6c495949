"""The contract of algorithms: what a round tells them, what they may keep, and what the network is."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import catalogue
import monitoring
import reference
from dcliques_jax import algorithms, mixing, models, partitions, prepare, schedules, simulate, topologies
from dcliques_jax.algorithms import Algorithm, Traits, over_topology
from test_parity import reference_batches, start

NODES, ROUNDS, BATCH = catalogue.NODES, 7, 6
DATA = partitions.shards(catalogue.dataset(), NODES, seed=1)
RING = topologies.ring(NODES)
# The same graph, whose nodes are stored clique by clique: 0, 5, 10, 15, 1, 6, ..
STORED_OTHERWISE = topologies.from_edges(NODES, RING.edges, clique_ids=np.arange(NODES) % 5)
CHAIN = topologies.from_edges(NODES, [(i, (i + 1) % NODES) for i in range(NODES)])
CLIQUES = topologies.d_cliques(DATA.label_distribution, clique_size=5, seed=1)
W = reference.metropolis_hastings(NODES, RING.edges)


def run(algorithm, topology=RING, rounds=ROUNDS, **arguments):
    """Rounds without any evaluation."""
    simulation = prepare(topology, DATA, algorithm=algorithm, batch_size=BATCH, **arguments)
    simulation.run(rounds)
    return simulation


def simulated(algorithm, topology=RING, **arguments):
    arguments = {"rounds": ROUNDS, "eval_every": ROUNDS, "batch_size": BATCH, "progress": False} | arguments
    return simulate(topology, DATA, algorithm=algorithm, **arguments)


@functools.cache
def batches():
    return reference_batches(DATA, 0, ROUNDS, BATCH)


def assert_same_bits(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


# What a round tells


class Notes(NamedTuple):
    draws: Any  # [nodes, rounds] drawn by node
    by_slot: Any  # [nodes, rounds] drawn by slot, which is wrong
    number: Any  # [nodes, rounds]
    nodes: Any  # [nodes]
    slots: Any  # [nodes]


def note_taking():
    """Noise on gradients, and notes of all that rounds tell."""
    plain = algorithms.dsgd(optax.sgd(0.1), clique_averaging=False)

    def init(params, network):
        del network
        blank = jnp.zeros((len(jax.tree.leaves(params)[0]), ROUNDS))
        return Notes(blank, blank, blank.astype(jnp.int32), blank[:, 0].astype(jnp.int32), blank[:, 0])

    def step(params, gradients, state, network, round):
        noise = jax.vmap(jax.random.normal)(round.node_keys())
        by_slot = jax.random.normal(round.key, noise.shape)
        gradients = jax.tree.map(lambda g: g + noise.reshape(-1, *[1] * (g.ndim - 1)), gradients)
        params, _ = plain.step(params, gradients, plain.init(params, network), network, round)
        now = (slice(None), round.number)
        return params, Notes(
            state.draws.at[now].set(noise),
            state.by_slot.at[now].set(by_slot),
            state.number.at[now].set(round.number),
            round.nodes,
            jnp.arange(len(noise), dtype=state.slots.dtype),
        )

    return Algorithm(over_topology(clique_averaging=False), init, step)


@pytest.fixture(scope="module")
def notes():
    """A run of one seed."""
    return run(note_taking()).state


@pytest.fixture(scope="module")
def stored_otherwise():
    """The same run with another order of storage."""
    return run(note_taking(), STORED_OTHERWISE).state


def test_draws_do_not_depend_on_the_order_of_storage(notes, stored_otherwise):
    np.testing.assert_array_equal(stored_otherwise.algorithm.draws, notes.algorithm.draws)
    assert_same_bits(stored_otherwise.params, notes.params)


def test_the_order_of_storage_is_another_and_draws_by_slot_show_it(notes, stored_otherwise):
    assert notes.algorithm.slots.tolist() == list(range(NODES))
    assert stored_otherwise.algorithm.slots.tolist() != list(range(NODES))
    assert (stored_otherwise.algorithm.by_slot != notes.algorithm.by_slot).any()


def test_rounds_tell_which_node_is_in_which_slot(notes, stored_otherwise):
    for state in (notes, stored_otherwise):
        np.testing.assert_array_equal(state.algorithm.nodes, np.arange(NODES))
    assert sorted(stored_otherwise.algorithm.slots) == list(range(NODES))


def test_draws_differ_between_rounds_and_nodes(notes):
    assert len(np.unique(notes.algorithm.draws)) == NODES * ROUNDS


def test_draws_differ_between_seeds_and_are_those_of_each_seed_alone(notes):
    together = run(note_taking(), seeds=[0, 1]).state.algorithm.draws
    np.testing.assert_array_equal(together[0], notes.algorithm.draws)
    np.testing.assert_array_equal(together[1], run(note_taking(), seed=1).state.algorithm.draws)
    assert len(np.unique(together)) == 2 * NODES * ROUNDS


def test_rounds_are_numbered_from_zero(notes):
    np.testing.assert_array_equal(notes.algorithm.number, np.tile(np.arange(ROUNDS), (NODES, 1)))


def test_rounds_are_numbered_on_over_chunks(notes):
    simulation = run(note_taking(), rounds=3)
    simulation.run(ROUNDS - 3)
    assert_same_bits(simulation.state, notes)


def test_rounds_are_numbered_on_after_a_checkpoint(notes, tmp_path):
    simulated(note_taking(), rounds=3, checkpoint_dir=tmp_path)
    resumed = simulated(note_taking(), rounds=3, extend=ROUNDS - 3, checkpoint_dir=tmp_path)
    assert_same_bits(resumed.state, notes)


def test_keys_of_nodes_are_those_of_their_numbers():
    key = jax.random.key(3)
    keys = algorithms.Round(jnp.zeros(()), key, jnp.array([4, 1]), lambda params: params).node_keys()
    for found, node in zip(keys, (4, 1), strict=True):
        assert found == jax.random.fold_in(key, node)


# What an algorithm may keep


def keeping(init_state, step_state=lambda state: state):
    """D-SGD with another state, which its rounds do not use."""
    plain = algorithms.dsgd(optax.sgd(0.1), clique_averaging=False)

    def step(params, gradients, state, network, round):
        params, _ = plain.step(params, gradients, plain.init(params, network), network, round)
        return params, step_state(state)

    return Algorithm(plain.network, lambda params, network: init_state, step)


def test_a_state_may_hold_scalars():
    state = {"count": 0, "half": np.float32(1)}
    counting = keeping(state, lambda state: {"count": state["count"] + 1, "half": state["half"] / 2})
    found = run(counting, STORED_OTHERWISE, rounds=2, seeds=[0, 1]).state.algorithm
    np.testing.assert_array_equal(found["count"], [2, 2])
    np.testing.assert_array_equal(found["half"], [0.25, 0.25])


def test_a_state_of_another_first_axis_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"state\['memory'\]\['last'\] of shape \[3, 2\]: it must have the 20 nodes"):
        prepare(RING, DATA, algorithm=keeping({"memory": {"last": np.zeros((3, 2))}}))


def test_weights_in_a_state_are_refused():
    plain = algorithms.dsgd()
    keeps = Algorithm(plain.network, lambda params, network: network, plain.step)
    with pytest.raises(ValueError, match=r"algorithm\.init returns Weights: step gets them as its argument network"):
        run(keeps)


def test_a_step_must_return_the_state_as_it_takes_it():
    with pytest.raises(ValueError, match=r"returns state\['a'\] as float32\[20\], but takes int32\[20\]"):
        prepare(RING, DATA, algorithm=keeping({"a": np.zeros(20, int)}, lambda s: {"a": s["a"] / 2}))


# Gradients at other points


def sharpness_aware(rate, radius):
    """SAM (Foret et al., 2021): the gradient at the worst point nearby."""

    def init(params, network):
        return ()

    def step(params, gradients, state, network, round):
        squares = [jnp.square(g).reshape(len(g), -1).sum(axis=1) for g in jax.tree.leaves(gradients)]
        norm = jnp.sqrt(sum(squares))
        worst = jax.tree.map(lambda x, g: x + radius * g / norm.reshape(-1, *[1] * (g.ndim - 1)), params, gradients)
        moved = jax.tree.map(lambda x, g: x - rate * g, params, round.gradient(worst))
        return mixing.mix(network.gossip, moved), state

    return Algorithm(over_topology(), init, step)


@pytest.mark.usefixtures("x64")
def test_sharpness_aware_minimisation_equals_a_loop():
    rate, radius = 0.1, 0.3
    algorithm = sharpness_aware(rate, radius)
    found = run(algorithm, init={"Dense_0": start(np.float64)}, model=models.logistic_regression(5)).params["Dense_0"]
    params = {name: np.tile(value, (NODES, *[1] * value.ndim)) for name, value in start(np.float64).items()}
    for batch in batches():
        for i, (inputs, labels) in enumerate(batch):
            kernel, bias = params["kernel"][i], params["bias"][i]
            _, k, b = reference.logistic_loss_and_gradient(kernel, bias, inputs, labels)
            norm = np.sqrt((k**2).sum() + (b**2).sum())
            worst = kernel + radius * k / norm, bias + radius * b / norm
            _, k, b = reference.logistic_loss_and_gradient(*worst, inputs, labels)
            params["kernel"][i], params["bias"][i] = kernel - rate * k, bias - rate * b
        params = reference.mix(W, params)
    for name, expected in params.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-10)


def test_the_gradient_at_the_parameters_is_the_one_that_is_given():
    class Seen(NamedTuple):
        same: Any  # [nodes]

    def step(params, gradients, state, network, round):
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(round.gradient(params)), strict=True)
        same = jnp.stack([(a == b).reshape(len(a), -1).all(axis=1) for a, b in pairs]).all(axis=0)
        return params, Seen(same)

    algorithm = Algorithm(over_topology(), lambda params, network: Seen(jnp.zeros(NODES, bool)), step)
    assert run(algorithm, CLIQUES, rounds=1).state.algorithm.same.all()


# Gradient tracking


class Tracking(NamedTuple):
    estimate: Any  # of the mean gradient
    gradients: Any  # those of the round before


def gradient_tracking(rate):
    def init(params, network):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Tracking(zeros, zeros)

    def step(params, gradients, state, network, round):
        mixed = mixing.mix(network.gossip, state.estimate)
        estimate = jax.tree.map(lambda y, new, old: y + new - old, mixed, gradients, state.gradients)
        params = mixing.mix(network.gossip, jax.tree.map(lambda x, y: x - rate * y, params, estimate))
        return params, Tracking(estimate, gradients)

    return Algorithm(over_topology(clique_averaging=False), init, step)


def test_gradient_tracking_tracks_the_mean_gradient():
    tracking = run(gradient_tracking(0.1)).state.algorithm
    for estimate, gradient in zip(jax.tree.leaves(tracking.estimate), jax.tree.leaves(tracking.gradients), strict=True):
        assert np.abs(gradient.mean(axis=0)).max() > 1e-3
        np.testing.assert_allclose(estimate.mean(axis=0), gradient.mean(axis=0), atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_gradient_tracking_equals_a_loop():
    arguments = {"init": {"Dense_0": start(np.float64)}, "model": models.logistic_regression(5)}
    found = run(gradient_tracking(0.1), **arguments).params["Dense_0"]
    params = {name: np.tile(value, (NODES, *[1] * value.ndim)) for name, value in start(np.float64).items()}
    estimate = before = {name: np.zeros_like(value) for name, value in params.items()}
    for batch in batches():
        now = {name: np.zeros_like(value) for name, value in params.items()}
        for i, (inputs, labels) in enumerate(batch):
            here = params["kernel"][i], params["bias"][i]
            _, now["kernel"][i], now["bias"][i] = reference.logistic_loss_and_gradient(*here, inputs, labels)
        mixed = reference.mix(W, estimate)
        estimate, before = {name: mixed[name] + now[name] - before[name] for name in now}, now
        params = reference.mix(W, {name: params[name] - 0.1 * estimate[name] for name in params})
    for name, expected in params.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-10)


@pytest.mark.parametrize("seeds", [None, [0, 3]])
def test_gradient_tracking_resumes_to_the_same_bits(seeds, tmp_path):
    tracking = gradient_tracking(0.1)
    simulated(tracking, rounds=3, seeds=seeds, checkpoint_dir=tmp_path)
    resumed = simulated(tracking, rounds=3, extend=ROUNDS - 3, seeds=seeds, checkpoint_dir=tmp_path)
    assert_same_bits(resumed.state, run(tracking, seeds=seeds).state)


def test_gradient_tracking_of_several_seeds_is_that_of_each():
    together = run(gradient_tracking(0.1), seeds=[0, 3]).state
    for number, seed in enumerate((0, 3)):
        alone = run(gradient_tracking(0.1), seed=seed).state
        jax.tree.map(lambda a, b, k=number: np.testing.assert_allclose(a[k], b, atol=1e-6), together, alone)


# Weights of a round


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Alternating(mixing.Weights):
    """One matrix in even rounds, another in odd ones."""

    pair: Any  # [nodes, nodes, 2]

    @property
    def num_nodes(self):
        return np.shape(self.pair)[0]

    def at(self, round, alive=None):
        assert alive is None
        return mixing.Dense(jnp.asarray(self.pair)[:, :, round.number % 2])

    def apply(self, x):
        raise AssertionError("the engine asks for the matrix of a round")

    def reordered(self, order):
        return type(self)(np.asarray(self.pair)[np.ix_(order, order)])

    def to_sparse(self):
        return mixing.from_matrix(np.mean(self.pair, axis=2)).to_sparse()


def alternating(even, odd):
    return algorithms.dsgd(optax.sgd(0.1), clique_averaging=False, weights=Alternating(np.stack([even, odd], axis=2)))


@pytest.mark.usefixtures("x64")
def test_weights_may_change_from_round_to_round():
    arguments = {"init": {"Dense_0": start(np.float64)}, "model": models.logistic_regression(5)}
    found = run(alternating(W, np.eye(NODES)), STORED_OTHERWISE, **arguments).params["Dense_0"]
    params = {name: np.tile(value, (NODES, *[1] * value.ndim)) for name, value in start(np.float64).items()}
    for number, batch in enumerate(batches()):
        params, _ = reference.dsgd(params, [batch], np.eye(NODES) if number % 2 else W, np.eye(NODES), 0.1)
    for name, expected in params.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-10)


def test_weights_that_change_do_not_compile_again():
    simulation = run(alternating(W, np.eye(NODES)), rounds=1)
    with monitoring.compilations() as compiled:
        simulation.run(3)
        run(alternating(np.eye(NODES), W), rounds=2)
    assert compiled == []


def test_weights_that_change_stay_what_they_are_with_several_seeds():
    def network(topology):
        extra = 0 if topology is RING else 1  # a longer sequence for another seed
        pair = np.stack([np.eye(NODES)] * (2 + extra), axis=2)
        return algorithms.Network(Alternating(pair), mixing.Identity(NODES))

    algorithm = algorithms.dsgd()._replace(network=network)
    prepare([RING, RING], DATA, algorithm=algorithm, seeds=[0, 1])
    with pytest.raises(ValueError, match="Alternating weights, which change from round to round, have other shapes"):
        prepare([RING, CHAIN], DATA, algorithm=algorithm, seeds=[0, 1])


@jax.tree_util.register_pytree_node_class
class Plain(mixing.Weights):
    """A matrix of one's own, of the least that is needed: neither a dataclass nor with `reordered`."""

    def __init__(self, matrix):
        self.matrix = matrix

    def tree_flatten(self):
        return (self.matrix,), None

    @classmethod
    def tree_unflatten(cls, _, arrays):
        return cls(*arrays)

    @property
    def num_nodes(self):
        return np.shape(self.matrix)[0]

    def apply(self, x):
        return jnp.tensordot(jnp.asarray(self.matrix, x.dtype), x, 1)

    def to_sparse(self):
        return mixing.from_matrix(self.matrix).to_sparse()


def test_weights_of_ones_own_need_no_order_unless_nodes_are_reordered():
    own = algorithms.dsgd(weights=Plain(W), clique_averaging=False)
    expected = run(algorithms.dsgd(weights=W, clique_averaging=False), rounds=2).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), run(own, rounds=2).params, expected)
    with pytest.raises(ValueError, match=r"Plain does not define reordered\(order\), which nodes in cliques"):
        run(own, STORED_OTHERWISE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Moving(mixing.Neighbours):
    """Lists of neighbours with another matrix in every round."""

    def __post_init__(self):
        """Programs make it of tracers."""

    def at(self, round, alive=None):
        return mixing.Neighbours(self.neighbours, jnp.asarray(self.values) * (round.number % 2))


def test_a_mesh_refuses_weights_whose_rounds_it_would_drop():
    lists = mixing.metropolis_hastings(RING)
    algorithm = algorithms.dsgd(weights=Moving(lists.neighbours, lists.values))
    with pytest.raises(ValueError, match="Moving weights are known on one device only: pass a form of mixing, or omit"):
        prepare(RING, DATA, algorithm=algorithm, mesh=jax.make_mesh((1,), ("nodes",)))


# Types


@pytest.mark.parametrize("kind", [algorithms.gossip_momentum, algorithms.quasi_global_momentum])
def test_schedules_and_values_of_a_sweep_keep_the_type_of_the_parameters(kind):
    def step(params, number, momentum):
        algorithm = kind(schedules.in_epochs(0.1, 4, epochs=9, warm_up=2), momentum)
        network, round = algorithm.network(RING), algorithms.Round(number, None, jnp.arange(NODES), None)
        return algorithm.step(params, params, algorithm.init(params, network), network.at(round), round)

    half = {"w": jax.ShapeDtypeStruct((NODES, 3), jnp.bfloat16)}
    after = jax.eval_shape(step, half, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))
    assert [leaf.dtype for leaf in jax.tree.leaves(after)] == [jnp.bfloat16] * 2


# What is refused


def old_form():
    def init(topology, params):
        return mixing.metropolis_hastings(topology)

    def step(params, gradients, state):
        return mixing.mix(state, params), state

    def reorder(state, order):
        return state.reordered(order)

    return Algorithm(init, step, reorder)


def test_algorithms_of_the_old_form_are_refused_with_the_new_contract():
    contract = (
        r"pass Algorithm\(network\(topology\), init\(params, network\), step\(params, gradients, state, network, r"
    )
    with pytest.raises(ValueError, match=contract):
        simulate(RING, DATA, algorithm=old_form())


def test_a_step_of_the_old_form_is_refused_by_name():
    wrong = algorithms.dsgd()._replace(step=lambda params, gradients, state: (params, state))
    with pytest.raises(ValueError, match=r"algorithm.step does not take 5 arguments .*pass Algorithm\(network"):
        simulate(RING, DATA, algorithm=wrong)


def test_a_network_must_be_one():
    for wrong in (mixing.Identity(NODES), (mixing.Identity(NODES), None)):
        with pytest.raises(ValueError, match=r"it must return algorithms.Network\(gossip, gradients\)"):
            simulate(RING, DATA, algorithm=algorithms.dsgd()._replace(network=lambda topology, wrong=wrong: wrong))


# Traits


SHIFT = np.roll(np.eye(NODES), 1, axis=1)
MATRICES = {
    "symmetric": W,
    "columns": (np.eye(NODES) + SHIFT) / 2,  # everybody hears one neighbour, and is heard by one
    "rows": np.where(np.arange(NODES)[:, None] == 0, SHIFT, np.eye(NODES)),  # the first node copies another
}


@pytest.mark.parametrize("requires", MATRICES)
@pytest.mark.parametrize("holds", MATRICES)
def test_traits_decide_which_matrices_are_taken(requires, holds):
    strictness = ["rows", "columns", "symmetric"]
    matrix = reference.metropolis_hastings(NODES, CHAIN.edges) if holds == "symmetric" else MATRICES[holds]
    network = algorithms.over_topology(weights=matrix)
    algorithm = algorithms.dsgd()._replace(network=network, traits=Traits(requires=requires))
    if strictness.index(holds) >= strictness.index(requires):
        prepare(CHAIN, DATA, algorithm=algorithm)
        return
    told = "weights are asymmetric" if requires == "symmetric" else "column . of the weights sums to"
    with pytest.raises(ValueError, match=told):
        prepare(CHAIN, DATA, algorithm=algorithm)


def test_an_unknown_requirement_is_refused():
    with pytest.raises(ValueError, match="requires='doubly' is unknown: choose one of rows, columns, symmetric"):
        prepare(RING, DATA, algorithm=algorithms.dsgd()._replace(traits=Traits(requires="doubly")))


@pytest.mark.parametrize("averaging", [True, False])
def test_messages_are_those_of_the_report(averaging):
    result = simulated(algorithms.dsgd(clique_averaging=averaging), CLIQUES, rounds=1)
    report = CLIQUES.report(num_parameters=6 * 5 + 5)
    told = [report.messages, report.bytes, report.messages_averaging, report.bytes_averaging][2 * averaging :][:2]
    found = [result.provenance["messages_per_round"], result.provenance["bytes_per_round"]]
    np.testing.assert_allclose(found, told)


def test_messages_are_unknown_of_algorithms_that_do_not_tell():
    told = simulated(keeping(()), rounds=1).provenance
    assert "messages_per_round" not in told
    assert "bytes_per_round" not in told


# The network is an argument


def shapes(tree):
    return sorted(np.shape(leaf) for leaf in jax.tree.leaves(tree))


def test_the_network_is_not_part_of_the_state():
    state = run(algorithms.dsgd(optax.sgd(0.1, momentum=0.9)), CLIQUES, rounds=1).state
    assert shapes(state.algorithm) == shapes(state.params) == [(NODES, 5), (NODES, 6, 5)]
    assert shapes(state) == sorted([*2 * shapes(state.params), (), (2,)])


def test_the_network_is_not_in_checkpoints(tmp_path):
    result = simulated(algorithms.dsgd(optax.sgd(0.1, momentum=0.9)), CLIQUES, rounds=1, checkpoint_dir=tmp_path)
    (path,) = tmp_path.glob("*/round_1.npz")
    with np.load(path) as arrays:
        saved = {name: arrays[name].shape for name in arrays.files if name.startswith("state/")}
        parts = {name.partition("/")[0] for name in arrays.files}
    assert sorted(saved.values()) == sorted((1, *shape) for shape in shapes(result.state))
    assert parts == {"state", "history", "tally", "identity", "checksums"}
