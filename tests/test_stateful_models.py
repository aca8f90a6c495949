"""Models that train otherwise than they predict: parity with the reference, streams, flax modules, what is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import perceptron
import reference
from dcliques_jax import (
    algorithms,
    datasets,
    faults,
    layers,
    metrics,
    mixing,
    models,
    partitions,
    prepare,
    simulate,
    topologies,
)
from dcliques_jax._engine import sampling
from dcliques_jax.results import Result

NODES, BATCH, ROUNDS, RATE = 8, 5, 7, 0.3
SET = datasets.synthetic(num_train=160, num_test=40, num_classes=4, input_shape=(6,), seed=3)
DATA = partitions.shards(SET, NODES, seed=1)  # 20 examples per node: four batches
START = perceptron.start(np.random.default_rng(0), 6, 9, 4)
RING = topologies.ring(NODES)
FAULTS = {
    "none": ([], []),
    "loss": ([faults.message_loss(0.3)], [("message_loss", (0.3,))]),
    "churn": ([faults.churn(0.2, 0.5)], [("churn", (0.2, 0.5))]),
}


def run(model=None, topology=RING, data=DATA, **more):
    model = perceptron.model(START) if model is None else model
    options = {"rounds": ROUNDS, "eval_every": ROUNDS, "batch_size": BATCH, "progress": False} | more
    algorithm = options.pop("algorithm", algorithms.dsgd(optax.sgd(RATE), clique_averaging=False))
    return simulate(topology, data, model=model, algorithm=algorithm, **options)


def shapes(model):
    """Parameters and state of one node."""
    return jax.eval_shape(models.as_model(model).init, jax.random.key(0), jnp.zeros((2, 6)))


def run_key(seed=0):
    return np.asarray(jax.random.key_data(jax.random.split(jax.random.key(seed, impl="threefry2x32"))[1]))


def batches(rounds):
    key = jax.random.wrap_key_data(jnp.asarray(run_key()), impl="threefry2x32")
    for number in range(rounds):
        epoch, turn = divmod(number, 20 // BATCH)
        order = np.asarray(sampling.shuffle(key, epoch, 20, DATA.sizes, np.arange(NODES)))
        rows = np.take_along_axis(DATA.indices, order, axis=1)[:, turn * BATCH : (turn + 1) * BATCH]
        yield [(SET.train_inputs[row], SET.train_labels[row]) for row in rows]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("gossiped", [False, True])
@pytest.mark.usefixtures("x64")
def test_equals_the_reference(fault, gossiped):
    ours, told = FAULTS[fault]
    model = models.with_statistics(perceptron.model(START), gossip=gossiped)
    result = run(model, faults=ours)
    w = reference.metropolis_hastings(NODES, RING.edges)
    fates = reference.Fates(run_key(), NODES, told)
    params, states = perceptron.dsgd(START, list(batches(ROUNDS)), w, RATE, run_key(), fates, gossiped)
    for node in range(NODES):
        for name in START:
            np.testing.assert_allclose(result.params[name][node], params[node][name], rtol=1e-10, atol=1e-10)
        for name in ("mean", "var"):
            np.testing.assert_allclose(result.model_state[name][node], states[node][name], rtol=1e-10, atol=1e-10)
    right = [perceptron.evaluate(*each, SET.test_inputs, SET.test_labels) for each in zip(params, states, strict=True)]
    np.testing.assert_allclose(result.history.accuracy[-1], right, atol=1e-6)
    mean = [{name: np.mean([each[name] for each in trees], axis=0) for name in trees[0]} for trees in (params, states)]
    of_mean = perceptron.evaluate(*mean, SET.test_inputs, SET.test_labels)
    np.testing.assert_allclose(result.history.mean_model_accuracy[-1], of_mean, atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_the_mean_models_state_is_estimated_on_training_data():
    model = models.with_statistics(perceptron.model(START), calibration_batches=60)

    def keep(params, state, inputs, labels):
        del params, inputs, labels
        return jnp.concatenate([state["mean"], state["var"]])

    result = run(model, metrics={"state": metrics.of_mean_model(keep)}, rounds=2, eval_every=2)
    seen = result.history.extra["state"][-1]
    mean = {name: np.mean(value, axis=0) for name, value in result.params.items()}
    hidden = SET.train_inputs.astype(np.float64) @ mean["a"]
    # Batches of 5 scatter around the statistics of all 160 examples.
    np.testing.assert_allclose(seen[:9], hidden.mean(axis=0), atol=0.45 * hidden.std(axis=0).max())
    np.testing.assert_allclose(seen[9:], hidden.var(axis=0), rtol=0.5)
    averaged = run(metrics={"state": metrics.of_mean_model(keep)}, rounds=2, eval_every=2).history.extra["state"][-1]
    np.testing.assert_allclose(averaged[:9], np.mean(result.model_state["mean"], axis=0), rtol=1e-12)
    assert np.abs(averaged - seen).max() > 0.1


def test_local_statistics_are_not_sent_and_gossiped_ones_are():
    local = run()
    gossiped = run(models.with_statistics(perceptron.model(START), gossip=True))
    assert gossiped.history.messages[-1] == local.history.messages[-1] == 2 * ROUNDS
    assert gossiped.history.bytes[-1] - local.history.bytes[-1] == 2 * ROUNDS * 2 * 9 * 4
    assert "state gossiped" in gossiped.provenance["model"]
    assert "state local, averaged in the mean model" in local.provenance["model"]


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        (None, ", state local, averaged in the mean model"),
        ({}, ", state local, averaged in the mean model"),
        ({"gossip": True}, ", state gossiped, averaged in the mean model"),
        ({"calibration_batches": 3}, ", state local, calibrated on 3 batches"),
    ],
)
def test_what_becomes_of_a_state_is_told(choices, told):
    model = Linen() if choices is None else models.with_statistics(Linen(), **choices)
    assert models.described(model, shapes(model)[1]) == "Linen(dropout=0.0)" + told


def test_nothing_is_told_of_models_without_a_state():
    plain = models.mlp((3,), 4)
    for model in (plain, models.with_statistics(plain)):
        assert models.described(model, shapes(model)[1]) == "MLP(hidden=(3,), num_classes=4)"


@pytest.mark.parametrize("gossip", [False, True])
@pytest.mark.optimised
def test_masks_depend_on_node_and_round_only(gossip, tmp_path):
    """The same bits in other storage, chunks of rounds, after a resume, and with several seeds."""
    model = models.with_statistics(perceptron.model(START), gossip=gossip)
    w = mixing.metropolis_hastings(RING)
    whole = run(model)
    stored = topologies.from_edges(NODES, RING.edges, clique_ids=np.arange(NODES)[::-1] // 4)  # in another order
    other = run(model, stored, algorithm=algorithms.dsgd(optax.sgd(RATE), clique_averaging=False, weights=w))
    simulation = prepare(
        RING, DATA, model=model, batch_size=BATCH, algorithm=algorithms.dsgd(optax.sgd(RATE), clique_averaging=False)
    )
    for rounds in (1, 2, 4):
        simulation.run(rounds)
    run(model, rounds=3, eval_every=3, checkpoint_dir=tmp_path / "c")
    resumed = run(model, rounds=3, extend=4, eval_every=3, checkpoint_dir=tmp_path / "c")
    for state in (other.state, simulation.state, resumed.state):
        jax.tree.map(np.testing.assert_array_equal, state[0], whole.state.params)
        jax.tree.map(np.testing.assert_array_equal, state.model, whole.state.model)
    both = run(model, seeds=[5, 0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=2e-5, atol=1e-6), both.params, whole.params)
    assert not np.allclose(both.params["a"][0], whole.params["a"])


def test_a_state_is_saved_and_continued(tmp_path):
    whole = run(rounds=6, eval_every=3)
    half = run(rounds=3, eval_every=3)
    half.save(tmp_path / "half.npz", state=True)
    loaded = Result.load(tmp_path / "half.npz")
    jax.tree.map(np.testing.assert_array_equal, loaded.model_state, half.model_state)
    rest = run(rounds=3, eval_every=3, init=loaded.state)
    jax.tree.map(np.testing.assert_array_equal, rest.params, whole.params)
    jax.tree.map(np.testing.assert_array_equal, rest.model_state, whole.model_state)
    predicted = models.predictor(perceptron.model(START))
    first = jax.tree.map(lambda leaf: leaf[0], (loaded.params, loaded.model_state))
    right = (np.asarray(predicted(*first, SET.test_inputs)).argmax(axis=1) == SET.test_labels).mean()
    np.testing.assert_allclose(right, half.history.accuracy[-1][0], atol=1e-6)


def test_further_gradients_see_the_same_masks():
    def step(params, gradients, state, network, round):
        del network
        again = round.gradient(params)
        differs = sum(jnp.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (again, gradients)), strict=True))
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), state + differs

    alone = algorithms.dsgd().network
    twice = algorithms.Algorithm(alone, lambda params, network: jnp.zeros(()), step)
    assert run(algorithm=twice).state.algorithm == 0


def test_offline_nodes_keep_their_statistics():
    result = run(faults=faults.trace(np.arange(NODES)[None] % 2 == 0))
    assert (result.model_state["var"][1::2] == 1).all()
    assert (result.model_state["var"][::2] != 1).any(axis=1).all()


# Flax


class Linen(nn.Module):
    """The reference's perceptron without dropout, or with it."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, inputs, train: bool = False):
        x = layers.Dense(9, use_bias=False)(inputs)
        x = nn.relu(layers.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return layers.Dense(4, use_bias=False)(x)


class Deterministic(Linen):
    @nn.compact
    def __call__(self, inputs, *, deterministic):
        return Linen.__call__(self, inputs, train=not deterministic)


class ByField(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, inputs):
        return Linen(0.5, name="inner")(inputs, train=self.train)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 9, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(9, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(9, 4, use_bias=False, rngs=rngs)

    def __call__(self, inputs):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(inputs)))))


def test_linen_modules_train_their_statistics():
    """Without dropout, the linen module is the pair with all units kept."""
    init, _ = perceptron.model(START)

    def without_dropout(params, state, inputs, *, train, key):
        del key
        h = inputs @ params["a"]
        mean, var = (h.mean(axis=0), h.var(axis=0)) if train else (state["mean"], state["var"])
        x = (h - mean[None]) / jnp.sqrt(var + 1e-5)[None] * params["scale"][None] + params["shift"][None]
        new = {"mean": mean, "var": var * len(h) / (len(h) - 1)}
        state = {name: 0.9 * state[name] + 0.1 * new[name] for name in state} if train else state
        return jnp.maximum(x, 0) @ params["b"], state

    expected = run((init, without_dropout))
    norm = {"scale": START["scale"], "bias": START["shift"]}
    given = {"Dense_0": {"kernel": START["a"]}, "BatchNorm_0": norm, "Dense_1": {"kernel": START["b"]}}
    found = run(Linen(), init=jax.tree.map(np.float32, given))
    np.testing.assert_allclose(found.params["Dense_0"]["kernel"], expected.params["a"], rtol=1e-4, atol=1e-5)
    kept = found.model_state["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(kept["var"], expected.model_state["var"], rtol=1e-4)
    np.testing.assert_allclose(found.history.loss, expected.history.loss, rtol=1e-4)


@pytest.mark.parametrize("model", [Linen(0.5), Deterministic(0.5), ByField(), lambda rngs: Plain(rngs)])
def test_dropout_is_on_in_rounds_and_off_in_evaluation(model):
    found = models.as_model(model)
    params, state = found.init(jax.random.key(0), jnp.zeros((2, 6)))
    inputs = jax.random.normal(jax.random.key(1), (2000, 6))
    outputs, same = (found.apply(params, state, inputs, train=False, key=None) for _ in range(2))
    np.testing.assert_array_equal(outputs[0], same[0])
    first, second = (found.apply(params, state, inputs, train=True, key=jax.random.key(k))[0] for k in (1, 2))
    assert np.abs(first - second).max() > 0.1
    _, after = found.apply(params, state, inputs, train=True, key=jax.random.key(1))
    assert all(np.abs(a - b).max() > 0 for a, b in zip(*map(jax.tree.leaves, (state, after)), strict=True))
    result = run(model)
    assert np.isfinite(result.history.loss).all()
    assert jax.tree.leaves(result.model_state)[0].shape == (NODES, 9)


def test_both_conventions_of_running_statistics():
    x = np.random.default_rng(0).normal(size=(10, 3, 2)).astype(np.float32)
    for unbiased, factor in ((True, 30 / 29), (False, 1.0)):
        layer = layers.BatchNorm(unbiased=unbiased, momentum=0.8)
        _, state = layer.apply({**layer.init(jax.random.key(0), x)}, x, mutable=["batch_stats"])
        np.testing.assert_allclose(state["batch_stats"]["mean"], 0.2 * x.mean(axis=(0, 1)), rtol=1e-5, atol=1e-7)
        expected = 0.8 + 0.2 * factor * x.var(axis=(0, 1))
        np.testing.assert_allclose(state["batch_stats"]["var"], expected, rtol=1e-5)
    flaxs = nn.BatchNorm(use_running_average=False, momentum=0.8, epsilon=1e-5)
    variables = flaxs.init(jax.random.key(0), x)
    ours, kept = layers.BatchNorm(unbiased=False, momentum=0.8).apply(variables, x, mutable=["batch_stats"])
    theirs, expected = flaxs.apply(variables, x, mutable=["batch_stats"])
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), kept, expected)


# What is refused


class Ambiguous(nn.Module):
    @nn.compact
    def __call__(self, inputs, is_training: bool = False):
        del is_training
        return nn.Dense(4)(inputs)


class Training(nn.Module):
    @nn.compact
    def __call__(self, inputs, training=None):
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=not training)(inputs))


class NnxTraining(Plain):
    def __call__(self, inputs, inference=None):
        del inference
        return Plain.__call__(self, inputs)


class Statistics(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False)(inputs))


class Masked(nn.Module):
    @nn.compact
    def __call__(self, inputs, mask=None):
        return nn.Dense(4)(inputs if mask is None else inputs * mask)


class Draws(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(inputs))


class DrawsAlways(nn.Module):
    @nn.compact
    def __call__(self, inputs, train: bool = False):
        del train
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(inputs))


INIT, APPLY = perceptron.model(START)


class Coupled(nn.Module):
    """Statistics of the batch, also in evaluation: no state, but padding must not enter them."""

    couples_examples: bool = True

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(4)(layers.BatchNorm(running=False)(nn.Dense(9)(inputs)))


def test_modules_with_statistics_of_batches_and_no_state_say_so():
    assert np.isfinite(run(Coupled()).history.loss).all()
    with pytest.raises(ValueError, match=r"fewer than batch_size=6 .*sampled\('full_batches'\)"):
        run(Coupled(), batch_size=6)
    with pytest.raises(ValueError, match=r"Coupled has BatchNorm.*couples_examples = True"):
        run(Coupled(couples_examples=False))


def test_optional_arguments_that_are_no_modes_are_left_alone():
    assert shapes(Masked())[0]["Dense_0"]["kernel"].shape == (6, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: run(Ambiguous()), "takes 'is_training', and nothing says what to pass"),
        (lambda: run(Training()), "takes 'training', and nothing says what to pass"),
        (lambda: run(lambda rngs: NnxTraining(rngs)), "takes 'inference', and nothing says what to pass"),
        (lambda: run(Statistics()), "keeps batch statistics but takes none of .*let __call__ take the argument train"),
        (lambda: run(nn.Sequential([nn.Dense(4), nn.BatchNorm(False)])), "Sequential keeps batch statistics"),
        (lambda: run(Draws()), "takes none of the arguments train, deterministic, use_running_average"),
        (lambda: run(DrawsAlways()), "as it is evaluated"),
        (lambda: run((INIT, lambda params, inputs, train: inputs)), "apply takes 'train' alone"),
        (lambda: run((lambda key, inputs: START, APPLY)), r"init returns dict: it must return \(params, state\)"),
        (lambda: run((INIT, lambda p, s, x, *, train, key: x)), r"it must return \(outputs, state\)"),
        (
            lambda: run((INIT, lambda p, s, x, *, train, key: (x[:, :4], {"mean": s["mean"]}))),
            "it must return what it takes",
        ),
        (lambda: run(batch_size=6), r"fewer than batch_size=6 .*sampled\('full_batches'\)"),
        (lambda: models.with_statistics(Linen(), gossip=2), "gossip=2"),
        (lambda: models.with_statistics(Linen(), calibration_batches=-1), "calibration_batches=-1"),
        (lambda: run(models.with_statistics(models.mlp((3,), 4), gossip=True)), "needs a model with a state"),
        (
            lambda: run(models.with_statistics(Linen(), gossip=True), algorithm=algorithms.push_sum(optax.sgd(0.1))),
            "sends shares of mass",
        ),
        (
            lambda: run(
                models.with_statistics(Linen(), gossip=True),
                algorithm=algorithms.repeated_gossip(algorithms.dsgd(), 3, chebyshev=True),
            ),
            r"running variance negative: pass repeated_gossip\(chebyshev=False\)",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
