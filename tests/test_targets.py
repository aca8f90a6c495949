"""Real targets, sequences of labels, ways of sampling and test sets per node."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quadratic
from dcliques_jax import (
    algorithms,
    datasets,
    metrics,
    models,
    partitions,
    plotting,
    prepare,
    reports,
    simulate,
    topologies,
)

RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(6, 2))
INPUTS = RNG.normal(size=(160, 6))
LINEAR = datasets.from_arrays(INPUTS[:120], INPUTS[:120] @ MATRIX, INPUTS[120:], INPUTS[120:] @ MATRIX)
RING = topologies.ring(4)


def linear(**more):
    options = {"model": nn.Dense(2, use_bias=False), "epochs": 30, "eval_every": 10, "progress": False} | more
    return simulate(RING, LINEAR, algorithm=algorithms.dsgd(optax.sgd(0.2)), **options)


# Real targets


def test_real_targets_are_learnt_and_have_no_accuracy():
    """Without noise, least squares finds the matrix."""
    result = linear()
    np.testing.assert_allclose(result.params["kernel"], np.tile(MATRIX, (4, 1, 1)), atol=0.02)
    history = result.history
    assert np.isnan(history.accuracy).all()
    assert np.isnan(history.mean_model_accuracy).all()
    assert history.loss[-1].max() < 1e-3 < history.loss[0].min()
    assert "loss=0.000" in repr(result)
    assert "accuracy" not in result._repr_html_()
    assert "squared_error" in result.provenance["loss"]


def test_losses_of_real_targets_are_means_over_examples():
    result = linear(epochs=0)
    kernel = np.asarray(result.params["kernel"], np.float64)
    errors = np.square(INPUTS[120:] @ kernel - INPUTS[120:] @ MATRIX).mean(axis=(1, 2))
    np.testing.assert_allclose(result.history.loss[0], errors, rtol=1e-5)


def test_own_metrics_see_real_targets():
    def largest(params, inputs, targets):
        return jnp.abs(inputs @ params["kernel"] - targets).max()

    result = linear(metrics={"largest": metrics.whole(largest)})
    assert result.history.extra["largest"][-1].max() < 0.1


def test_a_sweep_over_real_targets_is_judged_by_its_loss():
    def factory(learning_rate):
        return algorithms.dsgd(optax.sgd(learning_rate))

    options = {"model": nn.Dense(2), "epochs": 5, "progress": False}
    result = simulate(RING, LINEAR, algorithm=factory, sweep={"learning_rate": [0.001, 0.2]}, **options)
    assert result.best().provenance["sweep"] == {"learning_rate": 0.2}


def test_pictures_of_real_targets_show_losses():
    result = linear(epochs=2)
    assert result.plot().get_ylabel() == "test loss"
    with pytest.raises(ValueError, match=r"no accuracy.*plot_loss"):
        plotting.plot_accuracy({"linear": result})


@pytest.mark.usefixtures("x64")
def test_a_quadratic_problem_in_three_lines():
    """The golden figure of D-SGD on 16 nodes, with targets as the data set holds them."""
    found, _ = quadratic.run(algorithms.dsgd(optax.sgd(0.05)), rounds=(10,))
    assert found.shape == (1, 16, 5)
    x = np.zeros((16, 5))
    for _ in range(10):
        x = quadratic.RING @ (x - 0.05 * quadratic.gradients(x))
    np.testing.assert_allclose(found[0], x, rtol=1e-10)


# Sequences

LENGTH, SYMBOLS = 6, 5
TEXT = RNG.integers(0, SYMBOLS, (60, LENGTH + 1))
LABELS = np.where(np.arange(LENGTH) < RNG.integers(1, LENGTH + 1, 60)[:, None], (TEXT[:, 1:] + 1) % SYMBOLS, -1)
SEQUENCES = datasets.from_arrays(TEXT[:40, 1:], LABELS[:40], TEXT[40:, 1:], LABELS[40:], num_classes=SYMBOLS)


class Each(nn.Module):
    """Predicts every label from the symbol in its place."""

    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(SYMBOLS, use_bias=False)(nn.one_hot(inputs, SYMBOLS))


def test_sequences_are_learnt():
    result = simulate(
        RING, SEQUENCES, model=Each(), algorithm=algorithms.dsgd(optax.sgd(2.0)), epochs=20, progress=False
    )
    assert (result.history.accuracy[-1] == 1).all()
    assert (result.history.nodes_right[-1] == 4).all()


def test_losses_and_accuracies_of_sequences_are_means_over_positions_without_padding():
    simulation = prepare(
        topologies.fully_connected(1), SEQUENCES, model=Each(), batch_size=40, algorithm=algorithms.dsgd(optax.sgd(0.7))
    )
    kernel = np.asarray(simulation.params["Dense_0"]["kernel"][0], np.float64)

    def scores(kernel, inputs, labels):
        right = losses = count = 0
        gradient, solved = np.zeros_like(kernel), []
        for sequence, wanted in zip(inputs, labels, strict=True):
            solved.append(True)
            for symbol, label in zip(sequence, wanted, strict=True):
                if label < 0:
                    continue
                logits = kernel[symbol]
                p = np.exp(logits - logits.max())
                p /= p.sum()
                count += 1
                right += logits.argmax() == label
                solved[-1] &= bool(logits.argmax() == label)
                losses -= np.log(p[label])
                p[label] -= 1
                gradient[symbol] += p
        return right / count, losses / count, gradient / count, solved

    for _ in range(2):
        record = simulation.evaluate()
        accuracy, loss, _, solved = scores(kernel, SEQUENCES.test_inputs, SEQUENCES.test_labels)
        np.testing.assert_allclose(record.accuracy, [accuracy], rtol=1e-6)
        np.testing.assert_allclose(record.loss, [loss], rtol=1e-6)
        np.testing.assert_array_equal(record.nodes_right, solved)
        simulation.run(1)
        kernel = kernel - 0.7 * scores(kernel, SEQUENCES.train_inputs, SEQUENCES.train_labels)[2]
        np.testing.assert_allclose(simulation.params["Dense_0"]["kernel"][0], kernel, rtol=1e-5, atol=1e-6)


# Ways of sampling

SKEWED = partitions.dirichlet(datasets.synthetic(num_train=200, num_test=20), 5, alpha=0.5, seed=2)


class Seen(nn.Module):
    """Remembers in its state how often it has seen every number that examples begin with."""

    @nn.compact
    def __call__(self, inputs, train: bool = False):
        counts = self.variable("seen", "counts", jnp.zeros, 200)
        if train:
            counts.value = counts.value + (inputs[:, :1].astype(int) == jnp.arange(200)[None]).sum(axis=0)
        return nn.Dense(10, kernel_init=nn.initializers.zeros)(0 * inputs)


def seen(data, batch_size, rounds, **more):
    """How often every node has seen every example, `[nodes, examples]`."""
    numbers = np.arange(200, dtype=np.float32)[:, None]
    dataset = datasets.from_arrays(numbers, np.arange(200) % 10, numbers[:5], np.arange(5), num_classes=10)
    numbered = partitions.PartitionedDataset(dataset, data.indices, data.sizes, data.sampling)
    topology = topologies.ring(data.num_nodes)
    simulation = prepare(topology, numbered, model=Seen(), batch_size=batch_size, **more)
    simulation.run(rounds)
    return np.asarray(simulation.state.model["seen"]["counts"]), simulation


def test_full_batches_hold_every_example_at_most_once_per_epoch():
    smallest = SKEWED.sizes.min()
    found, simulation = seen(SKEWED.sampled("full_batches"), 4, smallest // 4)
    assert simulation.plan.rounds_per_epoch == smallest // 4
    assert (found.sum(axis=1) == 4 * (smallest // 4)).all()
    assert found.max() == 1
    for node, counts in enumerate(found):
        assert set(np.flatnonzero(counts)) <= set(SKEWED.indices[node].tolist())
    later, _ = seen(SKEWED.sampled("full_batches"), 4, 40 * (smallest // 4))
    own = SKEWED.indices[SKEWED.sizes.argmax()]
    assert (later[SKEWED.sizes.argmax(), own] > 0).all()  # other examples in other epochs


def test_draws_with_replacement_are_uniform_and_independent():
    data = SKEWED.sampled("with_replacement")
    found, simulation = seen(data, 10, 300)
    assert simulation.plan.rounds_per_epoch == -(-data.sizes.max() // 10)
    assert (found.sum(axis=1) == 3000).all()
    for node, size in enumerate(data.sizes):
        own = found[node, data.indices[node, :size]]
        assert own.sum() == 3000
        square = ((own - 3000 / size) ** 2 / (3000 / size)).sum()
        assert abs(square - (size - 1)) < 5 * np.sqrt(2 * (size - 1))
    again, _ = seen(data, 10, 300)
    np.testing.assert_array_equal(found, again)
    other, _ = seen(data, 10, 300, seed=1)
    assert (found != other).any()


@pytest.mark.parametrize("how", ["full_batches", "with_replacement"])
@pytest.mark.optimised
def test_ways_of_sampling_resume_to_the_bit(how, tmp_path):
    data = SKEWED.sampled(how)
    options = {"batch_size": 3, "eval_every": 5, "progress": False}
    whole = simulate(topologies.ring(5), data, rounds=10, **options)
    simulate(topologies.ring(5), data, rounds=5, checkpoint_dir=tmp_path / "c", **options)
    resumed = simulate(topologies.ring(5), data, rounds=5, extend=5, checkpoint_dir=tmp_path / "c", **options)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    assert whole.provenance["sampling"] == how


# Test sets per node


def test_local_accuracy_is_that_on_the_nodes_own_test_examples():
    data = partitions.shards(datasets.synthetic(num_train=800, num_test=100), 8, seed=1)
    tests = [np.arange(node, 100, 7 + node) for node in range(8)]
    result = simulate(topologies.ring(8), data.with_tests(tests), epochs=2, eval_nodes=[5, 2], progress=False)
    predict = models.predictor(models.logistic_regression())
    for place, node in enumerate((5, 2)):
        params = jax.tree.map(lambda leaf, node=node: leaf[node], result.params)
        logits = np.asarray(predict(params, data.dataset.test_inputs[tests[node]]))
        right = (logits.argmax(axis=1) == data.dataset.test_labels[tests[node]]).mean()
        np.testing.assert_allclose(result.history.local_accuracy[-1, place], right, atol=1e-6)
    plain = simulate(topologies.ring(8), data, epochs=2, eval_nodes=[5, 2], progress=False)
    assert np.isnan(plain.history.local_accuracy).all()
    np.testing.assert_array_equal(plain.history.accuracy, result.history.accuracy)


def test_local_accuracy_of_sequences_is_a_mean_over_positions_too():
    everything = partitions.from_indices(SEQUENCES, [[0, 1], [2, 3]]).with_tests([np.arange(20)] * 2)
    result = simulate(topologies.ring(2), everything, model=Each(), init="independent", rounds=1, progress=False)
    assert len(np.unique(result.history.accuracy)) > 1
    np.testing.assert_array_equal(result.history.local_accuracy, result.history.accuracy)


@pytest.mark.parametrize(("dataset", "model"), [(SEQUENCES, Each()), (LINEAR, models.logistic_regression(2))])
def test_accuracy_per_class_needs_one_class_per_example(dataset, model):
    with pytest.raises(ValueError, match="per_class_accuracy needs one class per example"):
        simulate(RING, dataset, model=model, metrics={"c": metrics.per_class_accuracy(model)}, rounds=1)


def test_local_tests_have_the_label_shares_of_the_node():
    data = partitions.shards(datasets.synthetic(num_train=2000, num_test=1000), 10, seed=1).with_local_tests(seed=4)
    for node in range(10):
        own = data.test_indices[node]
        own = own[own >= 0]
        assert len(set(own.tolist())) == len(own)
        counts = np.bincount(data.dataset.test_labels[own], minlength=10)
        np.testing.assert_array_equal(counts, np.ceil(data.label_distribution[node] * 100 - 1e-9))


def test_feature_shift_transforms_the_inputs_of_every_node():
    images = datasets.synthetic(num_train=90, num_test=20, input_shape=(4, 4, 1))
    ways = [lambda x: x, lambda x: np.rot90(x, 1, (1, 2)), lambda x: -x]
    data = partitions.feature_shift(images, 6, transforms=ways, seed=2)
    even = partitions.iid(images, 6, seed=2)
    np.testing.assert_array_equal(data.indices, even.indices)
    for node in range(6):
        rows = data.indices[node]
        np.testing.assert_array_equal(data.dataset.train_inputs[rows], ways[node % 3](images.train_inputs[rows]))
        own = data.test_indices[node]
        np.testing.assert_array_equal(data.dataset.test_inputs[own], ways[node % 3](images.test_inputs))
        np.testing.assert_array_equal(data.dataset.test_labels[own], images.test_labels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: partitions.shards(LINEAR, 4), "real numbers instead of one class per example"),
        (lambda: partitions.iid(SEQUENCES, 4).label_distribution, "sequences of classes instead of one class"),
        (lambda: partitions.iid(LINEAR, 4).with_local_tests(), "this needs classes"),
        (lambda: simulate(RING, LINEAR, progress=False), "real numbers to predict: pass a model"),
        (lambda: linear(model=nn.Dense(3)), r"outputs of shape \(2, 3\) for targets of shape \(2, 2\)"),
        (
            lambda: simulate(RING, SEQUENCES, model=nn.Embed(9, 4), progress=False),
            r"logits of shape \(2, 6, 4\).*must return \(2, 6, 5\)",
        ),
        (lambda: datasets.from_arrays(INPUTS, INPUTS, INPUTS, np.zeros(160, int)), "test_labels must be real"),
        (lambda: datasets.from_arrays(INPUTS, INPUTS, INPUTS, INPUTS[:, :2]), "test_labels have shape"),
        (lambda: datasets.from_arrays(INPUTS, INPUTS * np.inf, INPUTS, INPUTS), "train_labels hold NaN"),
        (lambda: datasets.from_arrays(INPUTS, INPUTS, INPUTS, INPUTS, num_classes=3), "num_classes=3"),
        (lambda: datasets.from_arrays(TEXT, TEXT - 2, TEXT, TEXT), "must lie in -1"),
        (lambda: datasets.from_arrays(TEXT, TEXT * 0 - 1, TEXT, TEXT), "all padding"),
        (lambda: SKEWED.sampled("twice"), "sampling='twice'"),
        (lambda: SKEWED.with_tests([[0]] * 4), "for 5 nodes"),
        (lambda: SKEWED.with_tests([[0]] * 4 + [[20]]), "there are 20 test examples"),
        (lambda: SKEWED.with_tests([[0]] * 4 + [[]]), "node 4 has no test example"),
        (lambda: partitions.feature_shift(LINEAR, 4, transforms=[]), "transforms="),
        (lambda: partitions.feature_shift(LINEAR, 4, transforms=[lambda x: x[:2]]), "must keep the shape"),
        (lambda: reports.compare([RING], partitions.iid(LINEAR, 4).label_distribution), "this needs classes"),
        (
            lambda: simulate(topologies.ring(5), SKEWED.sampled("full_batches"), batch_size=60, progress=False),
            "batch_size=60",
        ),
    ],
)
def test_what_needs_classes_or_examples_says_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()
