"""Sweeps: all combinations in one program, each as a run of its own."""

import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcliques_jax import (
    algorithms,
    compressors,
    datasets,
    faults,
    metrics,
    models,
    partitions,
    prepare,
    simulate,
    topologies,
)
from dcliques_jax._engine import memory
from dcliques_jax._engine.simulation import Simulation
from dcliques_jax.results import Result

DATA = partitions.shards(datasets.synthetic(num_train=200), 10)
RATES = [0.03, 0.1, 0.3]


def momentum(learning_rate, momentum):
    return algorithms.dsgd(optax.sgd(learning_rate, momentum=momentum))


def run(algorithm, **more):
    return simulate(topologies.ring(10), DATA, algorithm=algorithm, epochs=2, progress=False, **more)


@pytest.fixture(scope="module")
def swept():
    return run(momentum, sweep={"learning_rate": RATES, "momentum": [0.0, 0.9]}, seeds=[0, 3])


def test_axes_are_those_of_the_sweep_then_seeds(swept):
    assert swept.history.accuracy.shape == (3, 2, 2, 3, 10)
    assert swept.history.consensus_distance.shape == (3, 2, 2, 3)
    assert swept.params["Dense_0"]["bias"].shape == (3, 2, 2, 10, 10)
    assert swept.provenance["sweep"] == {"learning_rate": RATES, "momentum": [0.0, 0.9]}
    assert swept.provenance["seeds"] == [0, 3]
    assert repr(swept).startswith("Result('ring', num_nodes=10, learning_rate=3, momentum=2, seeds=2, rounds=8")


@pytest.mark.parametrize(("rate", "factor"), [(0.03, 0.9), (0.3, 0.0)])
def test_every_combination_is_a_run_of_its_own(swept, rate, factor):
    alone = run(momentum(rate, factor), seeds=[0, 3])
    part = swept.at(learning_rate=rate, momentum=factor)
    for name in ("accuracy", "loss", "train_loss", "consensus_distance", "messages", "bytes"):
        np.testing.assert_allclose(getattr(part.history, name), getattr(alone.history, name), rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), part.params, alone.params)
    assert part.provenance["sweep"] == {"learning_rate": rate, "momentum": factor}
    assert part.provenance["algorithm"] == alone.provenance["algorithm"]


def test_without_seeds_there_is_no_axis_of_seeds():
    result = run(lambda rate: algorithms.gradient_tracking(optax.sgd(rate)), sweep={"rate": [0.01, 0.02]}, seed=3)
    assert result.history.accuracy.shape == (2, 3, 10)
    assert result.best("loss").history.accuracy.shape == (3, 10)


def test_other_values_compile_nothing():
    compiled = []

    def listener(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    def swept(rates):
        return run(lambda rate: algorithms.dsgd(optax.sgd(rate)), sweep={"rate": rates})

    swept([0.1, 0.2])
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        swept([0.05, 0.4])
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []


def test_the_best_is_chosen_by_the_last_evaluation_and_never_diverged():
    def algorithm(learning_rate):
        return algorithms.dsgd(optax.sgd(learning_rate))

    with pytest.warns(RuntimeWarning, match="non-finite.*with learning_rate=1e\\+38"):
        result = run(algorithm, sweep={"learning_rate": [0.001, 1e38, 0.1]}, seeds=[0, 1])
    scores = result.history.accuracy[:, :, -1].mean(axis=(1, 2))
    assert result.best().provenance["sweep"]["learning_rate"] == (0.1 if scores[2] > scores[0] else 0.001)
    assert result.best("loss").provenance["sweep"] == {"learning_rate": 0.1}
    assert result.best("loss", largest=True).provenance["sweep"] == {"learning_rate": 0.001}
    with (
        pytest.warns(RuntimeWarning, match="non-finite"),
        pytest.raises(ValueError, match=r"all combinations of .* diverged"),
    ):
        run(algorithm, sweep={"learning_rate": [1e38]}).best()


@pytest.mark.filterwarnings("ignore:non-finite:RuntimeWarning")
def test_what_diverged_at_a_node_that_is_not_evaluated_is_never_best():
    inputs = np.array(DATA.dataset.train_inputs)
    inputs[DATA.indices[4]] *= 1e25
    data = partitions.from_indices(dataclasses.replace(DATA.dataset, train_inputs=inputs), list(DATA.indices))

    def algorithm(learning_rate):
        return algorithms.dsgd(optax.sgd(learning_rate), weights=np.eye(10))

    options = {"algorithm": algorithm, "sweep": {"learning_rate": [0.1, 1e-30]}, "epochs": 2, "progress": False}
    result = simulate(topologies.ring(10), data, eval_nodes=1, **options)
    assert result.history.eval_nodes.tolist() != [[[4]], [[4]]]
    assert np.isfinite(result.history.loss).all()
    accuracy = result.history.accuracy[:, -1].ravel()
    assert accuracy[0] > accuracy[1]
    assert result.best().provenance["sweep"] == {"learning_rate": 1e-30}


@pytest.mark.parametrize("name", ["messages", "messages_lost", "bytes", "train_loss", "mean_model_loss"])
def test_the_best_costs_least(swept, name):
    costs = np.arange(6.0).reshape(3, 2)[::-1]  # least at the last rate and the first momentum
    measured = np.broadcast_to(costs[:, :, None, None], (3, 2, 2, 3))
    result = dataclasses.replace(swept, history=dataclasses.replace(swept.history, **{name: measured}))
    assert result.best(name).provenance["sweep"] == {"learning_rate": 0.3, "momentum": 0.0}
    assert result.best(name, largest=True).provenance["sweep"] == {"learning_rate": 0.03, "momentum": 0.9}


def test_sweeps_are_saved_loaded_and_tabled(swept, tmp_path):
    swept.save(tmp_path / "sweep.npz")
    loaded = Result.load(tmp_path / "sweep.npz")
    assert loaded.provenance["sweep"] == swept.provenance["sweep"]
    np.testing.assert_array_equal(loaded.best().history.accuracy, swept.best().history.accuracy)
    frame = loaded.to_pandas()
    assert len(frame) == swept.history.accuracy.size
    row = frame[(frame["learning_rate"] == 0.1) & (frame["momentum"] == 0.9) & (frame["seed"] == 3)].iloc[-1]
    assert row["accuracy"] == swept.history.accuracy[1, 1, 1, -1, -1]
    assert len(swept.plot().get_lines()) >= 6


def test_sweeps_resume_to_the_same_bits(tmp_path):
    sweep = {"learning_rate": [0.01, 0.1], "momentum": [0.5]}
    whole = run(momentum, sweep=sweep)
    arguments = {"sweep": sweep, "checkpoint_dir": tmp_path}
    run(momentum, on_evaluation=lambda record: record.round == 4, **arguments)
    resumed = run(momentum, **arguments)
    np.testing.assert_array_equal(resumed.history.loss, whole.history.loss)
    with pytest.raises(ValueError, match="sweep was"):
        run(momentum, sweep={"learning_rate": [0.02, 0.1], "momentum": [0.5]}, checkpoint_dir=tmp_path)


@pytest.mark.parametrize(
    ("finished", "sweep"),
    [(5, {"rate": [0.01, 0.05], "seeds": [0, 1]}), (2, {"rate": [0.01], "seeds": [0, 1]}), (1, None)],
)
def test_an_interrupted_sweep_keeps_what_has_the_shape_of_a_sweep(finished, sweep, monkeypatch):
    """One run at a time; Ctrl-C in the first round of the run after the finished ones."""
    monkeypatch.setattr(memory, "available", lambda mesh: 1)
    monkeypatch.setattr(memory, "check", lambda *_: None)
    original, started = Simulation._run, []

    def watched(simulation, count):
        started.append(count)
        if sum(started) == 8 * finished + 4:
            signal.raise_signal(signal.SIGINT)
        return original(simulation, count)

    def factory(rate):
        return algorithms.dsgd(optax.sgd(rate))

    whole = run(factory, sweep={"rate": [0.01, 0.05, 0.1]}, seeds=[0, 1])
    monkeypatch.setattr(Simulation, "_run", watched)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        result = run(factory, sweep={"rate": [0.01, 0.05, 0.1]}, seeds=[0, 1])
    if sweep is None:
        assert result.combinations() == []
        np.testing.assert_allclose(result.history.loss, whole.history.loss[0, :1], rtol=1e-5)
        return
    assert result.provenance["sweep"] == {"rate": sweep["rate"]}
    assert result.provenance["seeds"] == sweep["seeds"]
    for rate in sweep["rate"]:
        found, expected = result.at(rate=rate).history, whole.at(rate=rate).history
        np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
        np.testing.assert_array_equal(found.bytes, expected.bytes)
    assert len(result.to_pandas()) == result.history.accuracy.size


@pytest.mark.parametrize("seeds", [[1, 2, 3], None])
def test_every_combination_continues_the_state_of_its_seed(seeds):
    def factory(rate):
        return algorithms.dsgd(optax.sgd(rate))

    more = {"init": "independent"} | ({} if seeds is None else {"seeds": seeds})
    before = run(factory(0.1), **more)
    again = more | {"init": before.state}
    found = run(factory, sweep={"rate": [0.01, 0.02, 0.03]}, **again)
    for of_rate in found.history.loss:  # [seeds, t, nodes], or without seeds
        np.testing.assert_allclose(of_rate[..., 0, :], before.history.loss[..., -1, :], rtol=1e-5)
    alone = run(factory(0.02), **again)
    np.testing.assert_allclose(found.at(rate=0.02).history.loss, alone.history.loss, rtol=1e-5)
    with pytest.raises(ValueError, match=f"state of {len(seeds or [0])} seeds, but there are 2"):
        run(factory, sweep={"rate": [0.01, 0.02, 0.03]}, init=before.state, seeds=[1, 2])


def test_what_all_combinations_miss_does_not_count_and_is_no_divergence():
    def factory(rate):
        return algorithms.dsgd(optax.sgd(rate))

    model = models.logistic_regression()
    own = {"classes": metrics.per_class_accuracy(model)}
    options = {"model": model, "faults": faults.participation(0.3), "metrics": own, "eval_examples": 5}
    result = run(factory, sweep={"rate": [0.001, 0.1]}, eval_every=1, **options)
    last = result.history.extra["classes"][:, -1].reshape(2, -1)
    assert np.isnan(last).any(axis=1).all()
    best = int(np.nanmean(last, axis=1).argmax())
    assert result.best("classes").provenance["sweep"] == {"rate": [0.001, 0.1][best]}
    with pytest.raises(ValueError, match="metric='local_accuracy' was not measured"):
        result.best("local_accuracy")
    broken = {"classes": np.full_like(result.history.extra["classes"], np.inf)}
    with pytest.raises(ValueError, match="it is infinite or NaN in all combinations"):
        dataclasses.replace(result, history=dataclasses.replace(result.history, extra=broken)).best("classes")


def test_swept_step_sizes_keep_the_type_of_models():
    def algorithm(step_size):
        return algorithms.choco(optax.sgd(0.1), compressors.top_k(0.2), step_size)

    simulation = prepare(topologies.ring(10), DATA, algorithm=algorithm, sweep={"step_size": [0.1, 0.5]})
    half = jax.tree.map(lambda leaf: leaf[0].astype(jnp.bfloat16), simulation.params)
    result = run(algorithm, sweep={"step_size": [0.1, 0.5]}, init=half)
    assert {leaf.dtype for leaf in jax.tree.leaves(result.params)} == {jnp.dtype(jnp.bfloat16)}


def test_step_sizes_of_compressed_gossip_are_swept():
    def algorithm(step_size):
        return algorithms.choco(optax.sgd(0.1), compressors.top_k(0.2), step_size)

    result = run(algorithm, sweep={"step_size": [0.1, 0.5]})
    alone = run(algorithm(0.5))
    np.testing.assert_allclose(result.at(step_size=0.5).history.loss, alone.history.loss, rtol=1e-4)


def concrete(learning_rate):
    return algorithms.dsgd(optax.sgd(learning_rate if learning_rate > 0 else 0.1))


def compressed(share):
    return algorithms.choco(optax.sgd(0.1), compressors.top_k(share), 0.1)


@pytest.mark.parametrize(
    ("algorithm", "sweep", "message"),
    [
        (algorithms.dsgd(), {"learning_rate": [0.1]}, "sweep needs an algorithm that is a function"),
        (momentum, {"learning_rate": [0.1]}, r"sweep has the arguments \['learning_rate'\], which algorithm does not"),
        (momentum, {"rate": [0.1]}, "which algorithm does not take"),
        (concrete, {"learning_rate": [0.1]}, r"does not accept traced values of \['learning_rate'\]"),
        (concrete, {}, r"sweep=\{\} must be a dictionary"),
        (concrete, [0.1], "must be a dictionary"),
        (concrete, {"learning_rate": []}, "must be a list of numbers"),
        (concrete, {"learning_rate": 0.1}, "must be a list of numbers"),
        (concrete, {"learning_rate": ["a"]}, "'a' must be a number"),
        (concrete, {"learning_rate": [0.1, 0.1]}, "must hold different numbers"),
        (lambda k: algorithms.local_steps(algorithms.dsgd(), k), {"k": [1, 2]}, r"traced values of \['k'\].*must be"),
        (compressed, {"share": [0.1]}, r"does not accept traced values of \['share'\].*\(fraction=.*must be a number"),
    ],
)
def test_impossible_sweeps_are_refused(algorithm, sweep, message):
    with pytest.raises(ValueError, match=message):
        run(algorithm, sweep=sweep)


def test_only_sweeps_have_combinations(swept):
    with pytest.raises(ValueError, match="best chooses a combination of a sweep"):
        swept.best().best()
    with pytest.raises(ValueError, match="is not a combination"):
        swept.at(learning_rate=0.5, momentum=0.9)
    with pytest.raises(ValueError, match="metric='speed' is unknown"):
        swept.best("speed")
    with pytest.raises(ValueError, match="state of a sweep"):
        run(momentum(0.1, 0.9), init=swept.state)
    more = run(momentum(0.1, 0.9), init=swept.best().state, seeds=[0, 3])
    assert more.history.round.tolist() == [8, 12, 16]
