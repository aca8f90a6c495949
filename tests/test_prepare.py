"""Runs that go forward when they are told to, and states that are passed back."""

import signal

import jax
import numpy as np
import optax
import pytest

import monitoring
from dcliques_jax import Result, Simulation, algorithms, datasets, models, partitions, prepare, simulate, topologies

DATASET = datasets.synthetic(num_train=200, num_test=30, num_classes=4, input_shape=(5,), seed=1)
DATA = partitions.shards(DATASET, 10, seed=1)
CLIQUES = topologies.d_cliques(DATA.label_distribution, clique_size=4, seed=1)
MOMENTUM = algorithms.dsgd(optax.sgd(0.1, momentum=0.9))
SEEDS = [4, 0]
ARGUMENTS = {"algorithm": MOMENTUM, "batch_size": 6}  # of 20 examples per node: epochs of four rounds


def prepared(topology=CLIQUES, dataset=DATA, **arguments):
    return prepare(topology, dataset, **ARGUMENTS | arguments)


def simulated(rounds, topology=CLIQUES, dataset=DATA, **arguments):
    arguments = {"eval_every": 100, "progress": False} | ARGUMENTS | arguments
    return simulate(topology, dataset, rounds=rounds, **arguments)


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_differ(one, other):
    assert not all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.fixture(scope="module")
def seven():
    """Seven rounds in one go."""
    return simulated(7)


@pytest.fixture(scope="module")
def three():
    """Three rounds, which end in the middle of an epoch."""
    return simulated(3)


@pytest.fixture(scope="module")
def seven_of_seeds():
    return simulated(7, seeds=SEEDS)


# Simulation


def test_rounds_in_parts_have_the_bits_of_simulate(seven):
    simulation = prepared()
    simulation.run(3)
    simulation.run(4)
    assert_same_bits(simulation.state, seven.state)


def test_evaluations_measure_what_simulate_does(seven):
    simulation = prepared()
    for t, rounds in enumerate((0, 7)):
        simulation.run(rounds)
        record = simulation.evaluate()
        assert record.round == seven.history.round[t]
        for name in ("accuracy", "loss", "train_loss", "consensus_distance", "mean_model_accuracy", "nodes_right"):
            np.testing.assert_array_equal(getattr(record, name), getattr(seven.history, name)[t], err_msg=name)


def test_models_are_evaluated_before_the_first_round():
    record = prepared().evaluate()
    assert record.round == 0
    assert record.accuracy.shape == (10,)
    assert np.isnan(record.train_loss).all()
    assert record.consensus_distance == 0


def test_evaluation_does_not_change_a_run(seven):
    simulation = prepared()
    for _ in range(7):
        simulation.run(1)
        simulation.evaluate()
    assert_same_bits(simulation.state, seven.state)


def test_a_second_run_of_another_length_compiles_nothing():
    simulation = prepared()
    simulation.run(1)
    simulation.evaluate()
    with monitoring.compilations() as compiled:
        simulation.run(5)
        simulation.evaluate()
    assert compiled == []


def test_a_simulation_tells_its_round_and_what_it_is():
    simulation = prepared()
    assert simulation.round == 0
    simulation.run(2)
    assert simulation.round == simulation.state.round == 2
    assert isinstance(simulation, Simulation)
    assert repr(simulation) == f"Simulation({CLIQUES.name!r}, num_nodes=10, round=2)"


def test_states_and_params_are_copies():
    simulation = prepared()
    before = simulation.params
    simulation.run(2)
    assert_same_bits(before, prepared().params)
    assert_same_bits(simulation.state.params, simulation.params)
    assert_differ(simulation.params, before)


def test_with_seeds_everything_has_them_first():
    simulation = prepared(seeds=SEEDS)
    simulation.run(2)
    assert simulation.round == 2
    assert simulation.state.round.tolist() == [2, 2]
    assert {leaf.shape[:2] for leaf in jax.tree.leaves(simulation.params)} == {(2, 10)}
    assert simulation.evaluate().accuracy.shape == (2, 10)


@pytest.mark.parametrize("wrong", [-1, 2.5, "3", None])
def test_rounds_are_counted_in_whole_numbers(wrong):
    with pytest.raises(ValueError, match="rounds="):
        prepared().run(wrong)


# Initial models


def test_stacked_models_of_all_nodes_are_taken():
    independent = prepared(init="independent")
    given = prepared(init=independent.params)
    assert_same_bits(given.params, independent.params)
    independent.run(3)
    given.run(3)
    assert_same_bits(given.state, independent.state)


def test_models_of_a_result_are_taken_without_its_momentum(three):
    simulation = prepared(init=three.params)
    assert simulation.round == 0
    assert_same_bits(simulation.params, three.params)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(simulation.state.algorithm))


def test_stacked_models_of_another_shape_are_refused(three):
    nine = jax.tree.map(lambda leaf: leaf[:9], three.params)
    narrower = jax.tree.map(lambda leaf: leaf[..., :3], three.params)
    for wrong in (nine, narrower, {"params": three.params}):
        with pytest.raises(
            ValueError, match=r"init has leaves .*pass those, or the stacked parameters of all 10 nodes"
        ):
            prepared(init=wrong)


def test_stacked_models_must_be_finite(three):
    spoilt = jax.tree.map(np.copy, three.params)
    jax.tree.leaves(spoilt)[0][4] = np.nan
    with pytest.raises(ValueError, match="init holds NaN or infinite values"):
        prepared(init=spoilt)


# Continued runs


@pytest.mark.parametrize("first", [3, 4])  # in the middle and at the end of an epoch
def test_a_state_continues_a_run_to_the_same_bits(first, seven):
    further = simulated(7 - first, init=simulated(first).state)
    assert_same_bits(further.state, seven.state)
    np.testing.assert_array_equal(further.history.loss[-1], seven.history.loss[-1])


def test_rounds_and_epochs_go_on(three):
    further = simulated(4, init=three.state, eval_every=2)
    assert further.history.round.tolist() == [3, 5, 7]
    assert further.history.epoch.tolist() == [0.75, 1.25, 1.75]
    np.testing.assert_array_equal(further.history.accuracy[0], three.history.accuracy[-1])
    assert further.provenance["rounds_run"] == 7


def test_a_prepared_run_continues_a_state(three, seven):
    simulation = prepared(init=three.state)
    assert simulation.round == 3
    simulation.run(4)
    assert_same_bits(simulation.state, seven.state)


def test_a_state_is_not_changed_by_a_run_that_continues_it(three):
    before = jax.tree.map(np.copy, three.state)
    prepared(init=three.state).run(2)
    assert_same_bits(three.state, before)


def test_the_seed_of_a_continued_run_is_that_of_its_state(three, seven):
    assert_same_bits(simulated(4, init=three.state, seed=9).state, seven.state)


def test_states_of_several_seeds_continue(seven_of_seeds):
    further = simulated(4, init=simulated(3, seeds=SEEDS).state, seeds=SEEDS)
    assert_same_bits(further.state, seven_of_seeds.state)
    assert further.history.round.tolist() == [3, 7]


def test_a_saved_state_continues(three, seven, tmp_path):
    three.save(tmp_path / "three.npz", state=True)
    loaded = Result.load(tmp_path / "three.npz")
    assert loaded.state.round == 3
    assert_same_bits(simulated(4, init=loaded.state).state, seven.state)


def test_a_saved_state_of_several_seeds_continues(seven_of_seeds, tmp_path):
    simulated(3, seeds=SEEDS).save(tmp_path / "three.npz", state=True)
    further = simulated(4, init=Result.load(tmp_path / "three.npz").state, seeds=SEEDS)
    assert_same_bits(further.state, seven_of_seeds.state)


def test_a_result_without_its_state_cannot_be_saved_with_it(three, tmp_path):
    three.save(tmp_path / "three.npz")
    loaded = Result.load(tmp_path / "three.npz")
    assert loaded.state is None
    with pytest.raises(ValueError, match="loaded from a file without state: pass state=False"):
        loaded.save(tmp_path / "again.npz", state=True)


def test_a_run_continues_on_another_topology(three):
    algorithm = algorithms.dsgd(optax.sgd(0.1, momentum=0.9), clique_averaging=False)
    further = simulated(2, topologies.ring(10), init=three.state, algorithm=algorithm)
    assert further.history.round.tolist() == [3, 5]
    assert further.topology.name == "ring"
    simulation = prepared(topologies.ring(10), init=three.state, algorithm=algorithm)
    assert_same_bits(simulation.state, three.state)


def test_a_continued_run_resumes_from_its_checkpoint(three, seven, tmp_path):
    arguments = {"init": three.state, "checkpoint_dir": tmp_path}
    simulated(2, **arguments)
    resumed = simulated(2, extend=2, **arguments)
    assert resumed.history.round.tolist() == [3, 5, 7]
    assert_same_bits(resumed.state, seven.state)


# States that do not fit


def test_a_state_of_another_number_of_nodes_is_refused(three):
    with pytest.raises(
        ValueError, match=r"init has params/.* of shape \(10, 4\), but this run needs \(20, 4\): .*nodes"
    ):
        prepared(topologies.ring(20), DATASET, init=three.state, algorithm=algorithms.dsgd())


def test_a_state_of_another_model_is_refused(three):
    with pytest.raises(
        ValueError, match=r"init has params/.* but this run needs .*the model and algorithm that it comes"
    ):
        prepared(init=three.state, model=models.mlp((3,), 4))


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adam(0.1)], ids=["fewer", "others"])
def test_a_state_of_another_algorithm_is_refused(optimizer, three):
    with pytest.raises(ValueError, match=r"init has algorithm/.*algorithm"):
        prepared(init=three.state, algorithm=algorithms.dsgd(optimizer))


def test_a_state_of_another_number_of_seeds_is_refused(three, seven_of_seeds):
    with pytest.raises(ValueError, match="init is the state of 1 seeds, but there are 2: pass as many"):
        prepared(init=three.state, seeds=[0, 1])
    with pytest.raises(ValueError, match="init is the state of 2 seeds, but there are 3: pass as many"):
        prepared(init=seven_of_seeds.state, seeds=[0, 1, 2])
    with pytest.raises(ValueError, match="init is the state of 2 seeds, but there are 1: pass as many"):
        prepared(init=seven_of_seeds.state)


def test_states_of_any_keys_and_of_algorithms_that_look_at_values_go_on(tmp_path):
    def init(params, network):
        size = float(jax.tree.leaves(params)[0].sum())  # cannot be traced
        keys = jax.random.split(jax.random.key(1, impl="rbg"), 10)
        return {"size": np.full(10, size, np.float32), "keys": keys, "key": keys[0]}

    def step(params, gradients, state, network, round):
        drawn = jax.vmap(jax.random.normal)(state["keys"]) + state["size"]
        moved = jax.tree.map(lambda p: p + 1e-3 * drawn.reshape(-1, *[1] * (p.ndim - 1)), params)
        return moved, state | {"keys": jax.vmap(lambda key: jax.random.split(key)[0])(state["keys"])}

    arguments = {"algorithm": algorithms.Algorithm(algorithms.over_topology(), init, step)}
    three, five = simulated(3, **arguments), simulated(5, **arguments)
    three.save(tmp_path / "three.npz", state=True)
    for state in (three.state, Result.load(tmp_path / "three.npz").state):
        assert_same_bits(simulated(2, init=state, **arguments).params, five.params)


def test_states_go_on_whatever_parameters_are_called():
    def init(key, inputs):
        return {"mlp/linear": jax.random.normal(key, (inputs.shape[1], 4))}

    model = (init, lambda params, inputs: inputs @ params["mlp/linear"])
    state = simulated(3, model=model).state
    assert_same_bits(simulated(2, model=model, init=state).params, simulated(5, model=model).params)


def test_seeds_that_are_after_different_rounds_do_not_go_on_together(seven_of_seeds):
    state = seven_of_seeds.state._replace(round=np.array([7, 3]))
    with pytest.raises(ValueError, match=r"init holds states after different rounds, \[3 7\]: pass states after"):
        prepared(init=state, seeds=SEEDS)


def test_records_give_no_models_of_another_round():
    simulation = prepared()
    record = simulation.evaluate()
    assert_same_bits(record.params(), simulation.params)
    simulation.run(1)
    with pytest.raises(ValueError, match="the models of round 0 are gone, the run is at round 1: call params"):
        record.params()


def test_rounds_that_fail_or_are_interrupted_are_counted(monkeypatch):
    diverging = prepared(algorithm=algorithms.dsgd(optax.sgd(np.inf)))
    with pytest.raises(FloatingPointError):
        diverging.run(20)
    assert diverging.round == diverging.state.round > 0

    simulation = prepared()
    run = simulation._run

    def interrupted(count):
        signal.raise_signal(signal.SIGINT)
        return run(count)

    monkeypatch.setattr(simulation, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        simulation.run(5)
    assert simulation.round == simulation.state.round == 1
    monkeypatch.setattr(simulation, "_run", run)
    simulation.run(6)
    assert simulation.round == simulation.state.round == 7
