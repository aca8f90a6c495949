"""Sweeps: all combinations in one program, each as a run of its own."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from dcliques_jax import algorithms, compressors, datasets, partitions, simulate, topologies
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
        (lambda k: algorithms.local_steps(algorithms.dsgd(), k), {"k": [1, 2]}, r"k=1\.0 must be an integer"),
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
