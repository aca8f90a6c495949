"""Ctrl-C ends a run soon, and nothing is lost."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest

from dcliques_jax import Result, datasets, partitions, simulate, topologies
from dcliques_jax._engine import evaluation, memory, simulation
from dcliques_jax._engine.simulation import Simulation
from dcliques_jax.paper import Scale
from dcliques_jax.paper.runs import Runs
from dcliques_jax.paper.settings import TASKS, Setting

DATA = datasets.synthetic(num_train=400, num_test=50, num_classes=4, input_shape=(5,), seed=1)
SHARDS = partitions.shards(DATA, 20, seed=1)


def run(**arguments):
    arguments = {"rounds": 12, "eval_every": 5} | arguments
    return simulate(topologies.ring(20), arguments.pop("dataset", SHARDS), progress=False, **arguments)


@pytest.fixture
def pressed_after(monkeypatch):
    """Presses Ctrl-C in the middle of the call of rounds that reaches a round."""

    def press(number, times=1):
        original, done = Simulation._run, [0]

        def watched(rounds, count):
            done[0] += count
            if done[0] - count < number <= done[0]:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return original(rounds, count)

        monkeypatch.setattr(Simulation, "_run", watched)

    return press


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one.state, two.state)
    for name, values in vars(one.history).items():
        np.testing.assert_array_equal(values, getattr(two.history, name), err_msg=name)


@pytest.fixture
def _one_round_at_a_time(monkeypatch):
    monkeypatch.setattr(simulation, "_PACE", 0)


@pytest.mark.usefixtures("_one_round_at_a_time")
def test_the_result_so_far_is_returned(pressed_after, tmp_path):
    pressed_after(7)
    with pytest.warns(RuntimeWarning, match="interrupted after round 7 of 12"):
        result = run()
    assert result.interrupted
    assert result.history.round.tolist() == [0, 5]
    assert result.provenance["rounds_run"] == int(result.state.round) == 7
    jax.tree.map(np.testing.assert_array_equal, result.params, run(rounds=7).params)
    result.save(tmp_path / "run.npz")
    assert Result.load(tmp_path / "run.npz").interrupted
    assert not run().interrupted


@pytest.mark.usefixtures("_one_round_at_a_time")
@pytest.mark.parametrize("after", [1, 5, 7])
def test_the_checkpoint_goes_on_to_the_same_bits(after, pressed_after, tmp_path, monkeypatch):
    with monkeypatch.context():
        pressed_after(after)
        with pytest.warns(RuntimeWarning, match="repeat the call to continue from"):
            stopped = run(checkpoint_dir=tmp_path)
    assert int(stopped.state.round) == after
    monkeypatch.undo()
    assert_same(run(checkpoint_dir=tmp_path), run())


@pytest.mark.usefixtures("_one_round_at_a_time")
def test_evaluated_more_often_it_goes_on_from_where_it_was(pressed_after, tmp_path, monkeypatch):
    pressed_after(7)
    with pytest.warns(RuntimeWarning, match="interrupted"):
        run(checkpoint_dir=tmp_path)
    monkeypatch.undo()
    resumed = run(checkpoint_dir=tmp_path, eval_every=1)
    assert resumed.history.round.tolist() == [0, 5, 7, 8, 9, 10, 11, 12]
    jax.tree.map(np.testing.assert_array_equal, resumed.params, run().params)


def test_nobody_need_read_what_is_told(pressed_after, monkeypatch):
    class Gone:
        def write(self, _):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    pressed_after(1)
    monkeypatch.setattr("sys.stderr", Gone())
    with pytest.warns(RuntimeWarning, match="interrupted"):
        assert run().interrupted
    monkeypatch.setattr("sys.stderr", None)
    assert not run().interrupted


def test_pressed_twice_it_ends_at_once(pressed_after):
    pressed_after(1, times=2)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_one_s_own_stays():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        result = run(on_evaluation=lambda _: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == 4 * [1]
    assert not result.interrupted


def test_other_threads_run_as_before():
    results = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    assert_same(results[0], run())


def test_seeds_by_turns_return_those_that_are_finished(pressed_after, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda mesh: 1)
    monkeypatch.setattr(memory, "check", lambda *_: None)
    pressed_after(13)  # the first of the second seed
    with pytest.warns(RuntimeWarning, match="interrupted"):
        result = run(seeds=[3, 4, 5])
    assert result.provenance["seeds"] == [3]
    assert result.history.round.tolist() == [0, 5, 10, 12]
    assert result.history.accuracy.shape == (1, 4, 20)


@pytest.mark.optimised
def test_bits_do_not_depend_on_how_rounds_are_divided(monkeypatch):
    whole = run()
    monkeypatch.setattr(simulation, "_MOST_ROUNDS", 3)
    assert_same(run(), whole)


def test_an_evaluation_is_left_after_a_chunk(monkeypatch, tmp_path):
    """The run goes on from the rounds before it to the same bits."""
    monkeypatch.setattr(evaluation, "_MOST_EXAMPLES", 7)
    chunks, original = [], evaluation.Evaluation._arguments

    def watched(*arguments):
        chunks.append(1)
        if len(chunks) == 3 + 8 + 5:  # three programs, the first evaluation of eight chunks, a part of the second
            signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation.Evaluation, "_arguments", watched)
        with pytest.warns(RuntimeWarning, match="interrupted after round 5 of 12"):
            result = run(checkpoint_dir=tmp_path)
    assert result.interrupted
    assert len(chunks) == 16
    assert result.history.round.tolist() == [0]
    assert_same(run(checkpoint_dir=tmp_path), run())


def test_it_acts_soon(tmp_path):
    """A process with rounds of some milliseconds and no evaluation for minutes."""
    code = """
    import time, dcliques_jax as dc
    data = dc.partitions.shards(dc.datasets.synthetic(num_train=2000), 50)
    result = dc.simulate(dc.topologies.ring(50), data, rounds=10**7, eval_every=10**7, progress=False,
                         on_evaluation=lambda record: print("evaluated", flush=True))
    print("ended", result.interrupted, int(result.state.round) > 0, time.time())
    """
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "evaluated\n"
        time.sleep(1)
        pressed = time.time()
        os.kill(process.pid, signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    ended, interrupted, further, at = told.split()
    assert (ended, interrupted, further) == ("ended", "True", "True")
    assert float(at) - pressed < 30  # seconds on a busy machine; a run would take hours


def test_a_paper_run_stops_as_a_whole(tmp_path, monkeypatch, pressed_after):
    monkeypatch.setitem(TASKS, "mnist", TASKS["mnist"]._replace(batch_size=1))
    pressed_after(1)
    runs = Runs(tmp_path, Scale({"mnist": 2, "cifar10": 2}), 1, datasets={"mnist": DATA})
    with pytest.warns(RuntimeWarning, match="interrupted"), pytest.raises(KeyboardInterrupt):
        runs.measure(Setting("mnist", num_nodes=10))
