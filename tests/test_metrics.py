"""What is measured: metrics of one's own, of the mean model, of classes, and on which examples."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reference
from dcliques_jax import Result, algorithms, datasets, metrics, models, partitions, prepare, simulate, topologies
from dcliques_jax._engine import evaluation

CLASSES, EXAMPLES = 4, 31  # a prime number: chunks leave a remainder
DATASET = datasets.synthetic(num_train=200, num_test=EXAMPLES, num_classes=CLASSES, input_shape=(5,), seed=1)
DATA = partitions.shards(DATASET, 10, seed=1)
CLIQUES = topologies.d_cliques(DATA.label_distribution, clique_size=4, seed=1)  # stored clique by clique
MODEL = models.logistic_regression(CLASSES)
CHUNK = 7


def brier(params, inputs, labels):
    """Mean squared error of probabilities, a mean over examples."""
    p = jax.nn.softmax(MODEL.apply({"params": params}, inputs))
    return jnp.square(p - jax.nn.one_hot(labels, CLASSES)).sum(axis=1).mean()


def largest_loss(params, inputs, labels):
    """Not a mean over examples."""
    return metrics.cross_entropy(MODEL.apply({"params": params}, inputs), labels).max()


def mean_logits(params, inputs, labels):
    return MODEL.apply({"params": params}, inputs).mean(axis=0)


def seen(params, inputs, labels):
    """How many examples it is called on, padding included."""
    return float(len(inputs))


METRICS = {
    "brier": brier,
    "largest": metrics.whole(largest_loss),
    "logits": mean_logits,
    "seen": seen,
    "seen at once": metrics.whole(seen),
    "brier of the mean": metrics.of_mean_model(brier),
    "largest of the mean": metrics.of_mean_model(metrics.whole(largest_loss)),
    "classes": metrics.per_class_accuracy(MODEL),
}


ALGORITHM = algorithms.dsgd(optax.sgd(0.5))


def evaluated(measured=None, dataset=DATA):
    """The record of models before training."""
    arguments = {"model": MODEL, "algorithm": ALGORITHM, "batch_size": 6}
    return prepare(CLIQUES, dataset, metrics=measured, **arguments).evaluate()


def run(measured=METRICS, dataset=DATA, **arguments):
    arguments = {"rounds": 6, "eval_every": 3, "batch_size": 6, "model": MODEL, "progress": False} | arguments
    return simulate(CLIQUES, dataset, algorithm=ALGORITHM, metrics=measured, init="independent", **arguments)


def log_probabilities(params, inputs):
    """Of every node, [nodes, examples, classes]."""
    layer = params["Dense_0"]
    flat = inputs.reshape(len(inputs), -1).astype(np.float64)
    return reference.log_softmax(np.stack([flat @ k + b for k, b in zip(layer["kernel"], layer["bias"], strict=True)]))


def in_numpy(params, inputs=DATASET.test_inputs, labels=DATASET.test_labels):
    """What METRICS measures on all examples at once, by loops."""
    log_p = log_probabilities(params, inputs)
    losses = -log_p[:, np.arange(len(labels)), labels]
    layer = params["Dense_0"]
    right = log_p.argmax(axis=2) == labels
    return {
        "brier": ((np.exp(log_p) - np.eye(CLASSES)[labels]) ** 2).sum(axis=2).mean(axis=1),
        "largest": losses.max(axis=1),
        "logits": np.stack([inputs.mean(axis=0) @ k + b for k, b in zip(layer["kernel"], layer["bias"], strict=True)]),
        "classes": np.stack([right[:, labels == c].mean(axis=1) for c in range(CLASSES)], axis=1),
    }


def mean_of(params):
    return jax.tree.map(lambda leaf: leaf.mean(axis=0, keepdims=True), params)


@pytest.fixture(scope="module")
def chunked():
    """A result measured on chunks of 7, 7, 7, 7 and 3 examples; its records, and the models they were measured of."""
    records, params = [], []

    def note(record):
        records.append(record)
        params.append(record.params())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "_MOST_EXAMPLES", CHUNK)
        return run(on_evaluation=note), records, params


@pytest.fixture(scope="module")
def at_once():
    """The same measured on all examples at once."""
    return run()


# Metrics of one's own


@pytest.mark.parametrize("name", ["brier", "largest", "logits", "classes"])
def test_metrics_of_nodes_equal_numpy(name, chunked):
    result, _, params = chunked
    for t in range(3):
        np.testing.assert_allclose(result.history.extra[name][t], in_numpy(params[t])[name], atol=2e-6)


@pytest.mark.parametrize("name", ["brier", "largest"])
def test_metrics_of_the_mean_model_equal_numpy(name, chunked):
    result, _, params = chunked
    for t in range(3):
        expected = in_numpy(mean_of(params[t]))[name][0]
        np.testing.assert_allclose(result.history.extra[f"{name} of the mean"][t], expected, atol=2e-6)


def test_means_over_chunks_are_means_over_all_examples(chunked, at_once):
    for name in METRICS.keys() - {"seen"}:
        found, expected = chunked[0].history.extra[name], at_once.history.extra[name]
        np.testing.assert_allclose(found, expected, atol=2e-6, err_msg=name)
    for name in ("accuracy", "nodes_right", "mean_model_accuracy"):
        np.testing.assert_array_equal(getattr(chunked[0].history, name), getattr(at_once.history, name))


def test_chunks_hold_no_padding(chunked, at_once):
    sizes = np.array([7, 7, 7, 7, 3])
    np.testing.assert_allclose(chunked[0].history.extra["seen"], (sizes**2).sum() / sizes.sum())
    assert (at_once.history.extra["seen"] == EXAMPLES).all()


def test_what_is_measured_as_a_whole_sees_all_examples(chunked):
    assert (chunked[0].history.extra["seen at once"] == EXAMPLES).all()


def test_metrics_have_their_axes(chunked):
    shapes = {name: values.shape for name, values in chunked[0].history.extra.items()}
    assert shapes == {
        "brier": (3, 10),
        "largest": (3, 10),
        "logits": (3, 10, CLASSES),
        "seen": (3, 10),
        "seen at once": (3, 10),
        "brier of the mean": (3,),
        "largest of the mean": (3,),
        "classes": (3, 10, CLASSES),
    }
    assert list(shapes) == list(METRICS)
    assert {values.dtype for values in chunked[0].history.extra.values()} == {np.dtype(np.float32)}


def test_metrics_of_seeds_and_of_some_nodes_have_their_axes():
    names = ("brier", "logits", "brier of the mean")
    result = run({name: METRICS[name] for name in names}, seeds=[0, 3], eval_nodes=3)
    extra, nodes = result.history.extra, result.history.eval_nodes
    assert [extra[name].shape for name in names] == [(2, 3, 3), (2, 3, 3, CLASSES), (2, 3)]
    for seed in range(2):
        params = jax.tree.map(lambda leaf, seed=seed: leaf[seed], result.params)
        for name in ("brier", "logits"):
            expected = in_numpy(params)[name][nodes[seed]]
            np.testing.assert_allclose(extra[name][seed, -1], expected, atol=2e-6, err_msg=name)
        of_mean = in_numpy(mean_of(params))["brier"][0]
        np.testing.assert_allclose(extra["brier of the mean"][seed, -1], of_mean, atol=2e-6)


def test_metrics_are_measured_on_the_chosen_examples():
    result = run(eval_examples=11)
    chosen = result.history.eval_examples
    expected = in_numpy(result.params, DATASET.test_inputs[chosen], DATASET.test_labels[chosen])
    for name in ("brier", "largest", "logits"):
        np.testing.assert_allclose(result.history.extra[name][-1], expected[name], atol=2e-6)


def test_metrics_do_not_change_a_run(chunked):
    plain = run(None)
    assert plain.history.extra == {}
    jax.tree.map(np.testing.assert_array_equal, plain.state, chunked[0].state)


def test_integers_and_truth_values_are_averaged():
    def right(params, inputs, labels):
        return (metrics.predictions(MODEL.apply({"params": params}, inputs)) == labels).all()

    extra = evaluated({"all": right, "two": lambda *_: 2}).extra
    np.testing.assert_array_equal(extra["all"], np.zeros(10))
    np.testing.assert_array_equal(extra["two"], np.full(10, 2))


# Where they are found


def test_records_hold_metrics(chunked):
    result, records, _ = chunked
    for t, record in enumerate(records):
        assert list(record.extra) == list(METRICS)
        for name, values in record.extra.items():
            np.testing.assert_array_equal(values, result.history.extra[name][t])


def test_records_cannot_be_changed(chunked):
    for values in (chunked[1][0].extra["brier"], chunked[1][0].accuracy):
        with pytest.raises(ValueError, match="read-only"):
            values[...] = 0


def test_records_give_the_models_when_asked(chunked):
    result, records, params = chunked
    jax.tree.map(np.testing.assert_array_equal, params[-1], result.params)
    assert (params[0]["Dense_0"]["kernel"] != params[1]["Dense_0"]["kernel"]).any()
    assert records[0].round == 0


def test_tables_have_a_column_for_each_entry_of_a_metric(chunked):
    table = chunked[0].to_pandas()
    extra = chunked[0].history.extra
    assert len(table) == 3 * 10
    np.testing.assert_array_equal(table["brier"].to_numpy().reshape(3, 10), extra["brier"])
    np.testing.assert_array_equal(
        table["brier of the mean"].to_numpy().reshape(3, 10)[:, 4], extra["brier of the mean"]
    )
    for entry in range(CLASSES):
        np.testing.assert_array_equal(table[f"logits_{entry}"].to_numpy().reshape(3, 10), extra["logits"][..., entry])
    assert "logits" not in table
    assert (
        table["mean_model_accuracy"].to_numpy().reshape(3, 10)[:, 2] == chunked[0].history.mean_model_accuracy
    ).all()


def test_metrics_are_saved_and_loaded(at_once, tmp_path):
    at_once.save(tmp_path / "result.npz")
    loaded = Result.load(tmp_path / "result.npz")
    assert loaded.history.extra.keys() == METRICS.keys()
    for name, values in at_once.history.extra.items():
        np.testing.assert_array_equal(loaded.history.extra[name], values)
    assert loaded.to_pandas().equals(at_once.to_pandas())


def test_a_run_that_goes_on_has_the_metrics_from_before(at_once, tmp_path):
    run(rounds=3, checkpoint_dir=tmp_path)
    records = []
    resumed = run(rounds=3, extend=3, checkpoint_dir=tmp_path, on_evaluation=records.append)
    for name, values in at_once.history.extra.items():
        np.testing.assert_array_equal(resumed.history.extra[name], values)
        np.testing.assert_array_equal(records[0].extra[name], values[0])
    with pytest.raises(ValueError, match="the models of round 0 are gone: this record was restored from a checkpoint"):
        records[0].params()
    jax.tree.map(np.testing.assert_array_equal, records[-1].params(), at_once.params)


@pytest.mark.parametrize(
    "changed",
    [{}, {"brier": brier, "seen": seen}, {"brier": metrics.of_mean_model(brier)}, {"other": brier}],
    ids=["fewer", "more", "of the mean", "renamed"],
)
def test_a_checkpoint_with_other_metrics_is_refused(changed, tmp_path):
    run({"brier": brier}, rounds=1, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"holds checkpoints of another run: metrics was {'brier': 'nodes'} and is"):
        run(changed, rounds=1, checkpoint_dir=tmp_path)


# What is refused


@pytest.mark.parametrize(
    "name", ["accuracy", "loss", "train_loss", "mean_model_loss", "round", "epoch", "seed", "node"]
)
def test_names_that_are_taken_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}.* is measured already: choose another name"):
        prepare(CLIQUES, DATA, metrics={name: brier})


@pytest.mark.parametrize("name", ["a/b", "", 3])
def test_names_that_files_cannot_hold_are_refused(name):
    with pytest.raises(ValueError, match="names of metrics must be strings without '/'"):
        prepare(CLIQUES, DATA, metrics={name: brier})


@pytest.mark.parametrize("wrong", [3, None, metrics.whole("brier")])
def test_what_is_not_a_function_is_refused(wrong):
    with pytest.raises(ValueError, match=r"metrics\['mine'\]=.* is not a function of \(params, inputs, labels\)"):
        prepare(CLIQUES, DATA, metrics={"mine": wrong})


@pytest.mark.parametrize("wrong", [brier, [brier], {"brier"}])
def test_metrics_come_by_name(wrong):
    with pytest.raises(ValueError, match="must be a dictionary"):
        prepare(CLIQUES, DATA, metrics=wrong)


@pytest.mark.parametrize("returned", [{"a": 1.0, "b": 2.0}, (1.0, 2.0), [], None], ids=str)
def test_a_metric_returns_one_array(returned):
    with pytest.raises(ValueError, match=r"metrics\['mine'\] returns .*: it must return one array, for one node"):
        prepare(CLIQUES, DATA, model=MODEL, metrics={"mine": lambda params, inputs, labels: returned})


def test_a_metric_returns_real_numbers():
    with pytest.raises(ValueError, match="complex64: it must return real numbers"):
        prepare(CLIQUES, DATA, model=MODEL, metrics={"mine": lambda *_: jnp.array(1j)})


# What every run measures


def test_the_mean_model_equals_numpy(chunked):
    result, _, params = chunked
    for t in range(3):
        mean = mean_of(params[t])["Dense_0"]
        accuracy, loss = reference.evaluate(mean, DATASET.test_inputs, DATASET.test_labels)
        np.testing.assert_allclose(result.history.mean_model_accuracy[t], accuracy[0], atol=1e-6)
        np.testing.assert_allclose(result.history.mean_model_loss[t], loss[0], rtol=1e-5)


def test_the_mean_model_is_that_of_all_nodes_whichever_are_evaluated(at_once):
    some = run(None, eval_nodes=[7])
    np.testing.assert_array_equal(some.history.mean_model_accuracy, at_once.history.mean_model_accuracy)


def test_equal_models_are_their_mean():
    record = evaluated()
    assert (record.accuracy == record.mean_model_accuracy).all()


# Classes


def test_classes_without_examples_have_no_accuracy():
    kept = DATASET.test_labels != 2
    arrays = (DATASET.train_inputs, DATASET.train_labels, DATASET.test_inputs[kept], DATASET.test_labels[kept])
    without = partitions.from_indices(datasets.from_arrays(*arrays), DATA.indices)
    found = evaluated({"classes": METRICS["classes"]}, without).extra["classes"]
    assert np.isnan(found[:, 2]).all()
    assert np.isfinite(found[:, [0, 1, 3]]).all()


def test_accuracies_of_classes_average_to_the_accuracy(at_once):
    counts = np.bincount(DATASET.test_labels, minlength=CLASSES)
    found = at_once.history.extra["classes"] @ counts / EXAMPLES
    np.testing.assert_allclose(found, at_once.history.accuracy, atol=1e-6)


# Examples for validation


def with_validation():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(17, 5)).astype(np.float32)
    labels = np.arange(17) % CLASSES
    return datasets.from_arrays(
        DATASET.train_inputs,
        DATASET.train_labels,
        DATASET.test_inputs,
        DATASET.test_labels,
        validation_inputs=inputs,
        validation_labels=labels,
    )


def test_models_are_evaluated_on_validation_examples():
    dataset = with_validation()
    result = run(dataset=partitions.from_indices(dataset, DATA.indices), evaluate_on="validation")
    inputs, labels = dataset.validation_inputs, dataset.validation_labels
    accuracy, loss = reference.evaluate(result.params["Dense_0"], inputs, labels)
    np.testing.assert_allclose(result.history.accuracy[-1], accuracy, atol=1e-6)
    np.testing.assert_allclose(result.history.loss[-1], loss, rtol=1e-5)
    assert result.history.eval_examples.tolist() == list(range(17))
    expected = in_numpy(result.params, inputs, labels)
    np.testing.assert_allclose(result.history.extra["brier"][-1], expected["brier"], atol=2e-6)
    assert result.provenance["evaluate_on"] == "validation"


def test_validation_examples_are_asked_for_where_there_are_none():
    with pytest.raises(ValueError, match=r"evaluate_on='validation', but .* has no validation examples"):
        prepare(CLIQUES, DATA, evaluate_on="validation")


def test_models_are_evaluated_on_nothing_else():
    with pytest.raises(ValueError, match="evaluate_on='train' is unknown: choose one of test, validation"):
        prepare(CLIQUES, DATA, evaluate_on="train")


def test_a_checkpoint_of_another_function_by_the_same_name_is_refused(tmp_path):
    scale = types.SimpleNamespace(value=1.0)

    def scaled(params, inputs, labels):
        return scale.value * inputs.mean()

    run({"scaled": scaled}, rounds=1, checkpoint_dir=tmp_path)
    scale.value = 2.0
    with pytest.raises(ValueError, match="holds checkpoints of another run: metric_checksums was"):
        run({"scaled": scaled}, rounds=1, extend=1, checkpoint_dir=tmp_path)
    scale.value = 1.0
    with pytest.raises(ValueError, match="holds checkpoints of another run: metric_checksums was"):
        run({"scaled": metrics.whole(scaled)}, rounds=1, extend=1, checkpoint_dir=tmp_path)
    run({"scaled": scaled}, rounds=1, extend=1, checkpoint_dir=tmp_path)


@pytest.mark.parametrize("weight_of_all", [False, True])
def test_chunks_are_averaged_by_weights_and_values_without_weight_do_not_count(weight_of_all, monkeypatch):
    """Chunks of one class each: the share of the others is 0 / 0."""
    labels = np.sort(DATASET.test_labels)

    def share(params, inputs, labels):
        counts = (labels[:, None] == jnp.arange(CLASSES)[None]).sum(axis=0)
        return (counts / len(labels), len(labels)) if weight_of_all else (counts / counts, counts)

    monkeypatch.setattr(evaluation, "_MOST_EXAMPLES", 3)
    dataset = datasets.from_arrays(DATASET.train_inputs, DATASET.train_labels, DATASET.test_inputs, labels)
    found = simulate(
        topologies.ring(CLASSES),  # as many nodes as classes: axes must not be confused
        dataset,
        metrics={"share": metrics.Metric(share, weighted=True)},
        rounds=0,
        progress=False,
    ).history.extra["share"]
    expected = np.bincount(labels, minlength=CLASSES) / EXAMPLES if weight_of_all else np.ones(CLASSES)
    np.testing.assert_allclose(found, np.tile(expected, (1, CLASSES, 1)), rtol=1e-6)


@pytest.mark.parametrize("returned", [(np.zeros(3), np.ones(2)), (np.zeros(3),), (np.zeros(3), np.ones(3), np.ones(3))])
def test_weights_of_metrics_must_fit(returned):
    weighted = metrics.Metric(lambda params, inputs, labels: tuple(map(jnp.asarray, returned)), weighted=True)
    with pytest.raises(ValueError, match=r"returns arrays of shapes .*: every value must have one weight"):
        prepare(CLIQUES, DATA, metrics={"own": weighted})


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_sums_over_nodes_do_not_overflow_in_half_precision(dtype):
    params = {"scale": jnp.tile(jnp.array([[1.0078125], [3.0078125]], dtype), (40_000, 1))}
    mean = metrics.mean_model(params)["scale"]
    assert mean.dtype == dtype
    np.testing.assert_allclose(mean.astype(np.float32), 2.0078125, rtol=2**-8)
    np.testing.assert_allclose(metrics.consensus_distance(params).astype(np.float32), 1, rtol=2**-8)
