"""Faults: parity with the reference by the same coins, invariants, known numbers, and what is refused."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import catalogue
import reference
from dcliques_jax import algorithms, datasets, faults, mixing, models, partitions, prepare, simulate, topologies
from dcliques_jax._engine import outages
from dcliques_jax.algorithms import Network, Round
from test_parity import BATCH, ROUNDS, reference_batches, start

NODES = catalogue.NODES
RECORDED = np.random.default_rng(1).random((3, NODES)) < 0.7
# Each fault with the name and the arguments that its twin takes.
FAULTS = {
    "message loss": (faults.message_loss(0.3), [("message_loss", (0.3,))]),
    "directed": (faults.message_loss(0.3, directed=True), [("directed message_loss", (0.3,))]),
    "bursts": (faults.bursts(0.3, 4), [("bursts", (0.3, 4))]),
    "churn": (faults.churn(0.2, 0.5), [("churn", (0.2, 0.5))]),
    "participation": (faults.participation(0.4), [("participation", (0.4,))]),
    "stragglers": (faults.stragglers(0.3), [("stragglers", (0.3,))]),
    "trace": (faults.trace(RECORDED), [("trace", (RECORDED,))]),
    "composed": (
        [faults.churn(0.1, 0.5), faults.message_loss(0.2), faults.bursts(0.1, 3), faults.stragglers(0.1)],
        [("churn", (0.1, 0.5)), ("message_loss", (0.2,)), ("bursts", (0.1, 3)), ("stragglers", (0.1,))],
    ),
}
METHODS = {"plain": (0.1, 0.0, False), "averaging": (0.1, 0.0, True), "momentum": (0.05, 0.9, True)}


def cliques():
    data = catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES)
    return topologies.d_cliques(data.label_distribution, clique_size=5, seed=1)


def circulant(*offsets):
    """Equal weights on a node and on those that are some offsets ahead: doubly stochastic, not symmetric."""
    own = np.eye(NODES)
    return sum((np.roll(own, offset, axis=1) for offset in offsets), start=own) / (len(offsets) + 1)


TOPOLOGIES = {
    "cliques": cliques,
    "fully connected": lambda: topologies.fully_connected(NODES),
    "sequence": lambda: topologies.sequence([topologies.ring(NODES, seed=seed) for seed in range(3)]),
    "directed": lambda: topologies.from_matrices([circulant(1, 2, 4), circulant(3)]),
    "drawn": lambda: topologies.from_matrices(cliques().weights().to_dense(), drawn=True),
    "hub": lambda: topologies.from_networkx(nx.star_graph(NODES - 1)),
}


def run(topology, method="plain", dtype=np.float64, **more):
    rate, momentum, averaging = METHODS[method]
    algorithm = algorithms.dsgd(
        optax.sgd(rate, momentum=momentum or None), clique_averaging=averaging and topology.clique_ids is not None
    )
    arguments = {"rounds": ROUNDS, "eval_every": ROUNDS, "batch_size": BATCH, "progress": False}
    model = models.logistic_regression(catalogue.CLASSES)
    arguments |= {"model": model, "algorithm": algorithm, "init": {"Dense_0": start(dtype)}}
    return simulate(topology, catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES), **arguments | more)


def twin(topology, method, told, seed=0):
    """The same run in loops: models, and messages sent and lost per node."""
    rate, momentum, averaging = METHODS[method]
    ws = [matrix.toarray() for matrix in topology.matrices or ()]
    ws = ws or [reference.metropolis_hastings(NODES, topology.edges)]
    g = (
        reference.clique_average(topology.clique_ids)
        if averaging and topology.clique_ids is not None
        else np.eye(NODES)
    )
    data = catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES)
    stacked = {name: np.tile(value, (NODES, *[1] * value.ndim)) for name, value in start(np.float64).items()}
    key = jax.random.key_data(jax.random.split(jax.random.key(seed, impl="threefry2x32"))[1])
    fates = reference.Fates(np.asarray(key), NODES, told)
    batches = reference_batches(data, seed, ROUNDS, BATCH)
    params, sent, lost = reference.faulty_dsgd(stacked, batches, ws, g, rate, momentum, fates, topology.drawn)
    return params, sent / NODES, lost / NODES


def pairs():
    """Every fault with every method and with every topology that it allows, each a compiled program."""
    graphs = {
        name: [graph for graph in TOPOLOGIES if (name, graph) not in {("bursts", "drawn"), ("composed", "drawn")}]
        for name in FAULTS
    }
    for number, name in enumerate(FAULTS):
        for turn, graph in enumerate(graphs[name]):
            yield name, graph, list(METHODS)[(number + turn) % len(METHODS)]


@pytest.mark.parametrize(("fault", "topology", "method"), list(pairs()))
@pytest.mark.usefixtures("x64")
def test_equals_the_reference_by_the_same_coins(fault, topology, method):
    given, told = FAULTS[fault]
    graph = TOPOLOGIES[topology]()
    result = run(graph, method, faults=given)
    params, sent, lost = twin(graph, method, told)
    for name, expected in params.items():
        np.testing.assert_allclose(result.params["Dense_0"][name], expected, rtol=1e-10, atol=1e-10)
    assert result.history.messages.tolist() == [0, pytest.approx(sent)]
    assert result.history.messages_lost.tolist() == [0, pytest.approx(lost)]


@pytest.mark.parametrize("name", catalogue.WITH_MATRICES)
@pytest.mark.usefixtures("x64")
def test_topologies_with_matrices_of_their_own_equal_the_reference(name):
    data = catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES)
    graph = catalogue.TOPOLOGIES[name](data.label_distribution)
    result = run(graph, "momentum")
    params, sent, _ = twin(graph, "momentum", [])
    for part, expected in params.items():
        np.testing.assert_allclose(result.params["Dense_0"][part], expected, rtol=1e-10, atol=1e-10)
    assert result.history.messages[-1] == pytest.approx(sent)


# No fault


@pytest.mark.parametrize(
    "none",
    [
        faults.message_loss(0),
        faults.message_loss(0, directed=True),
        faults.bursts(0, 5),
        faults.churn(0, 0.5),
        faults.participation(1),
        faults.stragglers(0),
        faults.trace(np.ones((2, NODES), bool)),
        [],
        [faults.stragglers(0), faults.message_loss(0.0)],
    ],
)
def test_a_fault_of_rate_0_is_no_fault(none):
    """The same program, to which nothing was added."""
    data = catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES)
    assert prepare(cliques(), data, faults=none).checksum == prepare(cliques(), data).checksum


def test_a_fault_of_rate_0_among_others_changes_nothing():
    one, other = (
        run(cliques(), faults=given) for given in (FAULTS["churn"][0], [faults.stragglers(0), FAULTS["churn"][0]])
    )
    jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
    assert one.history.nodes_online[1] < NODES


def test_without_faults_all_nodes_are_online_and_messages_count():
    history = run(cliques(), "averaging").history
    assert np.isnan(history.nodes_online[0])
    assert history.nodes_online[1] == NODES
    degree = cliques().degrees.mean() + 4  # four gradients
    assert history.messages.tolist() == [0, pytest.approx(ROUNDS * degree)]
    assert history.messages_lost.tolist() == [0, 0]


def test_messages_of_a_sequence_are_those_of_its_rounds():
    graph = topologies.sequence([topologies.ring(NODES), topologies.fully_connected(NODES)])
    history = run(graph, rounds=3, eval_every=1).history
    assert history.messages.tolist() == [0, 2, 2 + NODES - 1, 4 + NODES - 1]


def test_messages_are_unknown_if_an_algorithm_does_not_say():
    silent = algorithms.dsgd()._replace(traits=algorithms.Traits(requires="rows"))
    for given in (None, faults.message_loss(0.3), faults.stragglers(0.3)):
        history = run(topologies.ring(NODES), algorithm=silent, faults=given).history
        assert np.isnan(history.messages[1])
        assert np.isnan(history.messages_lost[1]) or given is None


def test_algorithms_say_how_many_messages_an_edge_carries():
    def twice(network, params):
        return algorithms.Traffic(*(2 * part for part in algorithms.sends()(network, params)))

    chatty = algorithms.dsgd()._replace(traits=algorithms.Traits(requires="rows", sends=twice))
    for given in (None, faults.message_loss(1e-9)):
        assert run(topologies.ring(NODES), algorithm=chatty, faults=given).history.messages[1] == 4 * ROUNDS


# Invariants of a round


def taken(topology, given, number=0, seed=0, nodes=None, gradients=None):
    """What takes part in one round: gossip and gradient matrix by slot, and which nodes are online."""
    given = faults.as_faults(given, topology.num_nodes)
    gossip = topology.weights()
    gradients = mixing.Identity(topology.num_nodes) if gradients is None else gradients
    (network,) = outages.with_links([Network(gossip, gradients)], given)
    process = outages.Faults(given, topology.num_nodes)
    key = jax.random.key(seed, impl="threefry2x32")
    order = np.arange(topology.num_nodes) if nodes is None else nodes
    state = outages.start(process, network, key)
    state = state._replace(links=jax.tree.map(lambda leaf: leaf[order], state.links))
    moved = Network(*(weights.reordered(order) for weights in network))
    for at in range(number + 1):
        round = Round(jnp.int32(at), jax.random.fold_in(key, at), jnp.asarray(order), lambda params: params)
        found = outages.take(process, state, moved, round, key)
        state = found.state
    return found


def dense(weights):
    """The matrix that the weights multiply by."""
    return np.asarray(weights.apply(jnp.eye(weights.num_nodes, dtype=jnp.float64)))


SYMMETRIC = [name for name in FAULTS if name != "directed"]


@pytest.mark.usefixtures("x64")
@hypothesis.given(
    fault=st.sampled_from(list(FAULTS)),
    graph=st.sampled_from(list(TOPOLOGIES)),
    number=st.integers(0, 2),
    seed=st.integers(0, 9),
)
@hypothesis.settings(max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_every_round_has_the_matrix_that_is_promised(fault, graph, number, seed):
    hypothesis.assume((fault, graph) not in {("bursts", "drawn"), ("composed", "drawn")})
    topology = TOPOLOGIES[graph]()
    found = taken(topology, FAULTS[fault][0], number, seed)
    w = dense(found.network.gossip)
    online = np.ones(NODES, bool) if found.online is None else np.asarray(found.online)
    w = np.where(online[:, None], w, np.eye(NODES))  # offline rows are frozen
    np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-12)
    assert (w >= -1e-12).all()
    assert (w[:, ~online] * (1 - np.eye(NODES)[:, ~online]) == 0).all()  # nobody hears from an offline node
    if fault in SYMMETRIC and "directed" not in graph:
        np.testing.assert_allclose(w, w.T, atol=1e-12)
        np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-12)


@pytest.mark.usefixtures("x64")
@hypothesis.given(fault=st.sampled_from(["message loss", "directed", "bursts", "composed"]), seed=st.integers(0, 9))
@hypothesis.settings(max_examples=8, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_coins_do_not_depend_on_storage(fault, seed):
    order = np.random.default_rng(seed).permutation(NODES)
    topology = cliques()
    averaging = mixing.clique_average(topology)
    here = taken(topology, FAULTS[fault][0], 2, seed, gradients=averaging)
    there = taken(topology, FAULTS[fault][0], 2, seed, nodes=order, gradients=averaging)
    for one, other in zip(here.network, there.network, strict=True):
        np.testing.assert_array_equal(dense(one)[np.ix_(order, order)], dense(other))
    if here.online is not None:
        np.testing.assert_array_equal(here.online[order], there.online)


@pytest.mark.usefixtures("x64")
def test_models_and_gradients_share_the_fate_of_a_link():
    topology = cliques()
    found = taken(topology, faults.message_loss(0.4), gradients=mixing.clique_average(topology))
    w, g = (dense(weights) for weights in found.network)
    inside = np.equal.outer(topology.clique_ids, topology.clique_ids)
    np.testing.assert_array_equal(w[inside] != 0, g[inside] != 0)
    assert (g[inside] == 0).any()


def test_offline_nodes_keep_model_and_state_to_the_bit():
    online = np.ones((1, NODES), bool)
    online[0, [3, 7, 12]] = False
    data = catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES)
    momentum = algorithms.dsgd(optax.adam(0.01))
    for topology in (cliques(), topologies.fully_connected(NODES)):
        simulation = prepare(topology, data, faults=faults.trace(online), algorithm=momentum, init="independent")
        before = simulation.state
        simulation.run(5)
        after = simulation.state
        for one, other in zip(*(jax.tree.leaves(state[:2]) for state in (before, after)), strict=True):
            np.testing.assert_array_equal(one[~online[0]], other[~online[0]])
            assert (one[online[0]] != other[online[0]]).any()
        record = simulation.evaluate()
        assert np.isnan(record.train_loss[~online[0]]).all()
        assert np.isfinite(record.train_loss[online[0]]).all()
        assert record.nodes_online == NODES - 3


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("fault", SYMMETRIC)
def test_the_mean_of_all_models_stays(fault):
    """With a learning rate of 0, symmetric faults move nothing but differences."""
    data = catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES)
    rng = np.random.default_rng(0)
    own = {"Dense_0": {"kernel": rng.normal(size=(NODES, 6, 5)), "bias": rng.normal(size=(NODES, 5))}}
    still = algorithms.dsgd(optax.sgd(0.0), clique_averaging=False)
    simulation = prepare(cliques(), data, faults=FAULTS[fault][0], algorithm=still, init=own)
    simulation.run(10)
    kernel = simulation.params["Dense_0"]["kernel"]
    np.testing.assert_allclose(kernel.mean(axis=0), own["Dense_0"]["kernel"].mean(axis=0), atol=1e-13)
    assert np.ptp(kernel, axis=0).max() < np.ptp(own["Dense_0"]["kernel"], axis=0).max()


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("fault", [faults.bursts(0.3, 5), faults.message_loss(0.3)])
def test_the_mean_stays_if_cliques_are_large(fault):
    """A dense matrix: the states of links follow rows and columns."""
    data = partitions.iid(datasets.synthetic(num_train=1400, num_test=10, input_shape=(3,)), 140)
    topology = topologies.d_cliques(data.label_distribution, clique_size=70)
    still = algorithms.dsgd(optax.sgd(0.0), clique_averaging=False)
    simulation = prepare(topology, data, faults=fault, algorithm=still, init="independent")
    before = simulation.params["Dense_0"]["kernel"].mean(axis=0)
    simulation.run(5)
    np.testing.assert_allclose(simulation.params["Dense_0"]["kernel"].mean(axis=0), before, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("nodes", "size"), [(10, 5), (140, 70)])  # lists as wide as there are nodes; dense matrices
def test_the_mean_stays_if_nodes_gossip_twice(nodes, size):
    data = partitions.iid(datasets.synthetic(num_train=10 * nodes, num_test=10, input_shape=(3,)), nodes)
    topology = topologies.d_cliques(data.label_distribution, clique_size=size, seed=1)
    still = algorithms.repeated_gossip(algorithms.dsgd(optax.sgd(0.0), clique_averaging=False), 2)
    arguments = {"faults": faults.bursts(0.3, 5), "algorithm": still}
    simulation = prepare(topology, data, init="independent", **arguments)
    before = simulation.params["Dense_0"]["kernel"].mean(axis=0)
    simulation.run(3)
    halfway = simulation.state
    simulation.run(3)
    np.testing.assert_allclose(simulation.params["Dense_0"]["kernel"].mean(axis=0), before, atol=1e-6)
    again = prepare(topology, data, init=halfway, **arguments)
    again.run(3)
    jax.tree.map(np.testing.assert_array_equal, again.params, simulation.params)


# Streams


def test_seeds_draw_their_own_faults_and_each_as_alone():
    both = run(cliques(), faults=FAULTS["composed"][0], seeds=[3, 4])
    assert both.history.messages_lost[0, -1] != both.history.messages_lost[1, -1]
    alone = run(cliques(), faults=FAULTS["composed"][0], seed=4)
    assert both.history.messages_lost[1, -1] == alone.history.messages_lost[-1]
    assert both.history.nodes_online[1, -1] == alone.history.nodes_online[-1]
    np.testing.assert_allclose(both.params["Dense_0"]["kernel"][1], alone.params["Dense_0"]["kernel"], atol=1e-6)


def test_seeds_may_have_graphs_of_other_degrees():
    graphs = [topologies.ring(NODES, seed=1), topologies.random_regular(NODES, 4, seed=1)]
    data = catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES)
    arguments = {"rounds": 4, "faults": faults.bursts(0.3, 3), "progress": False}
    both = simulate(graphs, data, seeds=[1, 2], **arguments)
    for number, seed in enumerate((1, 2)):
        alone = simulate(graphs[number], data, seed=seed, **arguments)
        np.testing.assert_array_equal(both.history.messages_lost[number], alone.history.messages_lost)


@pytest.mark.parametrize("graph", ["cliques", "sequence"])
def test_a_run_resumes_to_the_same_bits(graph, tmp_path, monkeypatch):
    monkeypatch.setattr("dcliques_jax._store.checkpoints._SPACING", 0)
    topology = TOPOLOGIES[graph]()
    arguments = {"faults": FAULTS["composed"][0], "rounds": 9, "eval_every": 2, "method": "momentum"}
    whole = run(topology, **arguments)
    run(topology, **arguments, checkpoint_dir=tmp_path, on_evaluation=lambda record: record.round == 4)
    resumed = run(topology, **arguments, checkpoint_dir=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)
    for name in ("messages", "messages_lost", "nodes_online", "train_loss"):
        np.testing.assert_array_equal(getattr(whole.history, name), getattr(resumed.history, name), err_msg=name)


def test_a_checkpoint_knows_its_faults(tmp_path):
    run(cliques(), faults=faults.message_loss(0.1), checkpoint_dir=tmp_path)
    for other in (None, faults.message_loss(0.2)):
        with pytest.raises(ValueError, match=r"faults was message_loss\(0.1\) and is"):
            run(cliques(), faults=other, checkpoint_dir=tmp_path)


def test_a_state_continues_its_faults(tmp_path):
    arguments = {"faults": FAULTS["composed"][0]}
    whole = run(cliques(), rounds=8, **arguments)
    half = run(cliques(), rounds=4, **arguments)
    half.save(tmp_path / "half.npz", state=True)
    for state in (half.state, type(half).load(tmp_path / "half.npz").state):
        rest = run(cliques(), rounds=4, **arguments | {"init": state})
        jax.tree.map(np.testing.assert_array_equal, rest.params, whole.params)
    # The links of another topology start anew: W stays symmetric, and the mean of all models where it is.
    still = {"algorithm": algorithms.dsgd(optax.sgd(0.0)), "faults": faults.bursts(0.4, 50), "rounds": 5}
    first = run(topologies.ring(NODES), **still)
    mean = first.params["Dense_0"]["kernel"].mean(axis=0)
    own = first.state._replace(
        params=jax.tree.map(lambda leaf: leaf + np.arange(NODES).reshape(-1, *[1] * (leaf.ndim - 1)), first.params)
    )
    other = run(topologies.ring(NODES, seed=5), **still | {"init": own, "rounds": 20})
    np.testing.assert_allclose(other.params["Dense_0"]["kernel"].mean(axis=0), mean + (NODES - 1) / 2, atol=1e-4)
    # Other faults start anew.
    assert run(cliques(), rounds=4, faults=faults.churn(0.5, 0.5), init=half.state).history.round[-1] == 8
    assert run(cliques(), rounds=4, init=half.state).state.faults is None


# Known numbers


def ring_of_16():
    return np.roll(np.eye(16), 1, axis=0) / 3 + np.roll(np.eye(16), -1, axis=0) / 3 + np.eye(16) / 3


def expectations(p):
    """E[W_t] and E[W_t^2] under symmetric loss, by the formula."""
    w = ring_of_16()
    mean = (1 - p) * w + p * np.eye(16)
    noise = np.zeros((16, 16))
    for i in range(16):
        edge = np.eye(16)[i] - np.eye(16)[(i + 1) % 16]
        noise += (1 / 3) ** 2 * np.outer(edge, edge) * 2 * p * (1 - p)
    return mean, mean @ mean + noise


def sampled(fault, count, matrix=None):
    """Many matrices of a ring of 16 under a fault, as rounds draw them."""
    weights = mixing.from_matrix(ring_of_16() if matrix is None else matrix)
    process = outages.Faults((fault,), 16)
    key = jax.random.key(0, impl="threefry2x32")
    (network,) = outages.with_links([Network(weights, mixing.Identity(16))], (fault,))
    everyone = jnp.arange(16, dtype=jnp.int32)

    def one(state, number):
        found = outages.take(process, state, network, Round(number, key, everyone, lambda params: params), key)
        w = found.network.gossip.apply(jnp.eye(16))
        if found.online is not None:
            w = jnp.where(found.online[:, None], w, jnp.eye(16))
        return found.state, w

    return np.asarray(jax.lax.scan(one, outages.start(process, network, key), jnp.arange(count))[1])


@pytest.mark.parametrize(("p", "first", "second"), [(0.1, 0.954328, 0.913786), (0.3, 0.964477, 0.937321)])
def test_the_expected_matrix_under_loss(p, first, second):
    mean, square = expectations(p)
    assert np.sort(np.linalg.eigvalsh(mean))[-2] == pytest.approx(first, abs=1e-6)
    assert np.sort(np.linalg.eigvalsh(square))[-2] == pytest.approx(second, abs=1e-6)
    drawn = sampled(faults.message_loss(p), 4000)
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=0.01)
    np.testing.assert_allclose((drawn @ drawn).mean(axis=0), square, atol=0.01)
    assert np.sort(np.linalg.eigvalsh((drawn @ drawn).mean(axis=0)))[-2] == pytest.approx(second, abs=2e-3)


def test_directed_loss_lets_the_mean_drift_as_much_as_the_formula_says():
    p, w = 0.3, ring_of_16()
    x = np.random.default_rng(0).normal(size=(16, 3))
    drawn = sampled(faults.message_loss(p, directed=True), 4000)
    np.testing.assert_allclose(drawn.mean(axis=0), expectations(p)[0], atol=0.01)
    assert np.abs(drawn.sum(axis=1) - 1).max() > 0.1  # columns
    drift = ((drawn @ x).mean(axis=1) - x.mean(axis=0)) ** 2
    outside = w * (1 - np.eye(16))
    squares = ((x[:, None] - x[None]) ** 2).sum(axis=-1)
    assert drift.sum(axis=1).mean() == pytest.approx(p * (1 - p) / 16**2 * (outside**2 * squares).sum(), rel=0.05)


@pytest.mark.parametrize(("online", "first"), [(0.9, 0.958895), (0.5, 0.987313)])
def test_the_expected_matrix_under_independent_availability(online, first):
    mean = sampled(faults.stragglers(1 - online), 4000).mean(axis=0)
    expected = np.eye(16) - online**2 * (np.eye(16) - ring_of_16())
    assert np.sort(np.linalg.eigvalsh(expected))[-2] == pytest.approx(first, abs=1e-6)
    np.testing.assert_allclose(mean, expected, atol=0.015)


@pytest.mark.parametrize(("p", "length", "correlation"), [(0.1, 5, 0.7778), (0.1, 20, 0.9444), (0.3, 10, 0.8571)])
def test_bursts_have_their_rate_length_and_correlation(p, length, correlation):
    ids = (jnp.arange(2000), jnp.arange(2000) + 1)
    fault, key = faults.bursts(p, length), jax.random.key(1, impl="threefry2x32")

    def one(state, number):
        return fault.draw(state, number, jax.random.fold_in(key, number), ids)

    first = fault.init(faults.first_key(key), ids)
    bad = ~np.asarray(jax.lax.scan(one, first, jnp.arange(300))[1])  # [rounds, links]
    assert bad[0].mean() == pytest.approx(p, abs=0.03)  # stationary from the start
    assert bad.mean() == pytest.approx(p, abs=0.01)
    lag = np.corrcoef(bad[:-1].ravel(), bad[1:].ravel())[0, 1]
    assert lag == pytest.approx(correlation, abs=0.01)
    lengths = [len(list(run)) for link in bad.T for value, run in itertools.groupby(link) if value]
    ends = bad[:-1] & ~bad[1:]
    assert bad[:-1].sum() / ends.sum() == pytest.approx(length, rel=0.06)
    assert max(lengths) > length


def test_churn_has_its_rate_and_participation_its_number():
    ids, key = (jnp.arange(5000), jnp.zeros(5000, int)), jax.random.key(1, impl="threefry2x32")
    fault = faults.churn(0.05, 0.2)
    state = fault.init(key, ids)
    assert np.mean(state) == pytest.approx(0.8, abs=0.02)
    after, alive = fault.draw(state, 0, jax.random.fold_in(key, 1), ids)
    assert np.mean(alive) == pytest.approx(0.8, abs=0.02)
    assert np.mean(~np.asarray(after)[np.asarray(state)]) == pytest.approx(0.05, abs=0.01)
    assert np.mean(np.asarray(after)[~np.asarray(state)]) == pytest.approx(0.2, abs=0.04)
    for fraction, expected in ((0.5, 2500), (0.0001, 1), (0.99999, 5000), (0.3333, 1666)):
        _, alive = faults.participation(fraction).draw((), 0, key, ids)
        assert int(alive.sum()) == expected


@pytest.mark.parametrize(
    ("p", "own", "bias"), [(0.1, 0.111111, 0.012346), (0.3, 0.142856, 0.047618), (0.5, 0.199805, 0.110894)]
)
def test_the_bias_of_clique_averaging_under_loss(p, own, bias):
    """E[g_i] = mean + beta (g_i - mean), since a node always hears itself."""
    members = 10
    assert (1 - p**members) / (members * (1 - p)) == pytest.approx(own, abs=1e-6)
    clique = np.full((members, members), 1 / members)
    weights = mixing.Neighbours.from_sparse(mixing.from_matrix(clique).to_sparse())
    fault, key = faults.message_loss(p), jax.random.key(3, impl="threefry2x32")
    everyone = jnp.arange(members, dtype=jnp.int32)
    process, network = outages.Faults((fault,), members), Network(mixing.Identity(members), weights)
    state = outages.start(process, network, key)

    def one(number):
        found = outages.take(process, state, network, Round(number, key, everyone, lambda params: params), key)
        return found.network.gradients.apply(jnp.eye(members))

    g = np.asarray(jax.lax.map(one, jnp.arange(4000)))
    np.testing.assert_allclose(g.sum(axis=2), 1, atol=1e-5)
    mean = g.mean(axis=0)
    assert np.diag(mean).mean() == pytest.approx(own, abs=0.003)
    assert (members * np.diag(mean).mean() - 1) / (members - 1) == pytest.approx(bias, abs=0.003)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("fault", "known"),
    [
        (faults.message_loss(0.1), 0.120),
        (faults.message_loss(0.3), 0.159),
        (faults.message_loss(0.1, directed=True), 0.123),
        (faults.message_loss(0.3, directed=True), 0.177),
    ],
)
def test_how_far_from_the_optimum_dsgd_ends_under_loss(fault, known):
    """The mean squared distance after 1000 rounds at rate 0.05 on 16 random quadratics, five seeds."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 5, 5)) / np.sqrt(5), rng.standard_normal((16, 5))
    best = np.linalg.solve(np.einsum("nij,nik->jk", a, a), np.einsum("nij,ni->j", a, b))
    everyone = jnp.arange(16, dtype=jnp.int32)
    process, network = outages.Faults((fault,), 16), Network(mixing.from_matrix(ring_of_16()), mixing.Identity(16))
    algorithm = algorithms.dsgd(optax.sgd(0.05))

    def end(seed):
        key = jax.random.key(seed, impl="threefry2x32")

        def one(carry, number):
            x, state, own = carry
            round = Round(number, jax.random.fold_in(key, number), everyone, lambda params: params)
            found = outages.take(process, state, network, round, key)
            gradients = jnp.einsum("nij,ni->nj", a, jnp.einsum("nij,nj->ni", a, x) - b)
            x, own = algorithm.step(x, gradients, own, found.network, round)
            return (x, found.state, own), None

        x = jnp.zeros((16, 5))
        start = (x, outages.start(process, network, key), algorithm.init(x, network))
        return jax.lax.scan(one, start, jnp.arange(1000))[0][0]

    distances = [np.square(np.asarray(end(seed)) - best).sum(axis=1).mean() for seed in range(5)]
    assert np.mean(distances) == pytest.approx(known, rel=0.08)


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: faults.message_loss(1.5), r"p=1.5 must be a number in 0..1"),
        (lambda: faults.message_loss("much"), "p='much' must be a number"),
        (lambda: faults.bursts(0.5, 0.5), "length=0.5 must be a number of at least 1"),
        (lambda: run(cliques(), faults=faults.stragglers(0.5)._replace(fails="node")), "fails='node' is unknown"),
        (lambda: run(cliques(), faults=faults.stragglers(0.5)._replace(rate=2)), "rate=2 must be a number in 0..1"),
        (lambda: faults.bursts(0.9, 2), "lower p, or raise length"),
        (lambda: faults.churn(0.5, 0), "never come back"),
        (lambda: faults.churn(float("nan"), 0.1), "leave=nan"),
        (lambda: faults.participation(0), "no node would ever take part"),
        (lambda: faults.trace(np.ones(3, bool)), r"booleans \[rounds, nodes\]"),
        (lambda: faults.trace(np.ones((2, 3))), "booleans"),
        (lambda: run(cliques(), faults="loss"), "faults='loss' must be a fault or a list"),
        (lambda: run(cliques(), faults=[0.1]), "must be a fault or a list"),
        (lambda: run(cliques(), faults=faults.trace(np.zeros((2, 3), bool))), "does not fit a topology of 20 nodes"),
        (lambda: run(cliques(), faults=faults.trace(np.ones((2, 3), bool))), "does not fit a topology of 20 nodes"),
        (lambda: faults.trace([[True], [True, False]]), r"booleans \[rounds, nodes\]"),
        (lambda: faults.message_loss(0.1, directed="yes"), "directed='yes' must be True or False"),
        (lambda: run(TOPOLOGIES["drawn"](), faults=faults.bursts(0.1, 3)), "needs links that last"),
    ],
)
def test_impossible_faults_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_links_of_a_large_fully_connected_network_are_refused_and_its_nodes_are_not():
    data = partitions.iid(datasets.synthetic(num_train=2100, num_test=10, input_shape=(2,)), 2100)
    full = topologies.fully_connected(2100)
    with pytest.raises(ValueError, match=r"every pair of 2,100 nodes.*sparser topology, or faults of nodes"):
        prepare(full, data, faults=faults.message_loss(0.1))
    assert prepare(full, data, faults=faults.stragglers(0.1)).round == 0


def test_algorithms_say_what_they_stand():
    def with_traits(**traits):
        return algorithms.dsgd()._replace(traits=algorithms.Traits(**traits))

    directed = faults.message_loss(0.1, directed=True)
    for requires in ("symmetric", "columns"):
        with pytest.raises(ValueError, match=f"columns of W no longer sum to 1.*{requires}"):
            run(cliques(), faults=directed, algorithm=with_traits(requires=requires))
    with pytest.raises(ValueError, match="asymmetric gossip matrix"):
        run(TOPOLOGIES["directed"](), faults=faults.churn(0.1, 0.5), algorithm=with_traits(requires="columns"))
    for fault, kind in ((faults.message_loss(0.1), "links"), (faults.stragglers(0.1), "nodes")):
        with pytest.raises(ValueError, match=f"not right if {kind} fail"):
            run(cliques(), faults=fault, algorithm=with_traits(stands=frozenset()))
    run(cliques(), faults=faults.message_loss(0.1), algorithm=with_traits(requires="columns"))


def test_weights_of_ones_own_must_say_which_nodes_they_read():
    class Own(mixing.Identity):
        senders = mixing.Weights.senders

    jax.tree_util.register_static(Own)
    own = algorithms.dsgd(weights=Own(NODES))
    for fault in (faults.stragglers(0.1), faults.message_loss(0.1)):
        with pytest.raises(ValueError, match="Own weights cannot lose messages"):
            run(topologies.fully_connected(NODES), algorithm=own, faults=fault)
