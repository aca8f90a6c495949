"""Stopped at any moment, a run goes on and ends with the very bits of one that was never stopped."""

import errno
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcliques_jax import (
    algorithms,
    datasets,
    metrics,
    mixing,
    models,
    partitions,
    simulate,
    topologies,
)
from dcliques_jax._arrays import checksum
from dcliques_jax._engine import memory
from dcliques_jax._engine.simulation import Simulation
from dcliques_jax._store import checkpoints

DATA = datasets.synthetic(num_train=400, num_test=50, num_classes=4, input_shape=(5,), seed=1)
SHARDS = partitions.shards(DATA, 20, seed=1)
OTHER_DATA = datasets.synthetic(num_train=400, num_test=50, num_classes=4, input_shape=(5,), seed=2)
CLIQUES = topologies.d_cliques(SHARDS.label_distribution, clique_size=6, max_steps=50)
HASTINGS = mixing.metropolis_hastings(CLIQUES).to_dense()
HERE = os.path.dirname(__file__)


def product(params, inputs):
    return inputs @ params["w"]


@pytest.fixture(autouse=True)
def _saved_at_every_evaluation(monkeypatch):
    monkeypatch.setattr(checkpoints, "_SPACING", 0)


class StopError(Exception):
    """Stands for whatever ends a process."""


def run(**arguments):
    arguments = {"algorithm": algorithms.dsgd(optax.adam(0.01)), "epochs": 4, "eval_nodes": 5} | arguments
    return simulate(arguments.pop("topology", CLIQUES), arguments.pop("dataset", SHARDS), progress=False, **arguments)


def interrupted(after, **arguments):
    """A run that ends with an error at its evaluation number `after`, right after the checkpoint."""
    seen = []

    def on_evaluation(record):
        seen.append(record.round)
        if len(seen) == after:
            raise StopError

    with pytest.raises(StopError):
        run(on_evaluation=on_evaluation, **arguments)


def names_of(folder):
    """The checkpoints in a folder that are whole."""
    return {path.name for path in folder.glob("from_run_0/round_*.npz")}


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one.state, two.state)
    for name, values in vars(one.history).items():
        np.testing.assert_array_equal(values, getattr(two.history, name), err_msg=name)


@pytest.mark.parametrize("after", [1, 2, 4])
def test_an_interrupted_run_ends_with_the_bits_of_a_whole_one(after, tmp_path):
    interrupted(after, checkpoint_dir=tmp_path)
    rounds = []
    resumed = run(checkpoint_dir=tmp_path, on_evaluation=lambda record: rounds.append(record.round))
    assert rounds == resumed.history.round.tolist()  # those before are told again
    assert_same(resumed, run())
    assert_same(run(checkpoint_dir=tmp_path), resumed)  # and a finished one is found again


def test_several_seeds_go_on_together(tmp_path):
    arguments = {"dataset": DATA, "seeds": [3, 1]}
    interrupted(2, checkpoint_dir=tmp_path, **arguments)
    assert_same(run(checkpoint_dir=tmp_path, **arguments), run(**arguments))


def test_extending_a_run_gives_the_longer_one(tmp_path):
    run(epochs=2, checkpoint_dir=tmp_path)
    extended = run(epochs=2, extend=2, checkpoint_dir=tmp_path)
    assert_same(extended, run())
    assert_same(run(epochs=2, extend=2, checkpoint_dir=tmp_path), extended)
    with pytest.raises(ValueError, match=r"past the requested .* pass extend=2"):
        run(epochs=2, checkpoint_dir=tmp_path)
    assert run(epochs=None, rounds=3, extend=2, eval_every=2).history.round.tolist() == [0, 2, 3, 4, 5]


def test_a_run_may_be_extended_again_and_again(tmp_path):
    arguments = {"epochs": None, "rounds": 4, "eval_every": 3}
    for extend in (0, 3, 6):
        extended = run(extend=extend, checkpoint_dir=tmp_path, **arguments)
    assert extended.history.round.tolist() == [0, 3, 4, 6, 7, 9, 10]
    jax.tree.map(np.testing.assert_array_equal, extended.state, run(extend=6, **arguments).state)
    nothing = {"checkpoint_dir": tmp_path / "from nothing", "epochs": 0}
    run(**nothing)
    assert run(extend=1, **nothing).history.epoch.tolist() == [0, 1]


def test_saving_takes_little_of_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_SPACING", 1e9)
    saved = []

    def on_evaluation(record):
        saved.append(names_of(tmp_path))

    result = run(checkpoint_dir=tmp_path, on_evaluation=on_evaluation)
    assert saved == 5 * [{"round_0.npz"}]  # the first, and then none is due
    assert names_of(tmp_path) == {"round_0.npz", f"round_{result.history.round[-1]}.npz"}
    assert_same(run(checkpoint_dir=tmp_path), result)


PROGRAM = """
import sys
import test_checkpoints
test_checkpoints.checkpoints._SPACING = 0
test_checkpoints.run(epochs=400, checkpoint_dir=sys.argv[1])
"""


@pytest.mark.optimised
def test_killed_at_any_moment_it_goes_on(tmp_path, monkeypatch):
    """The process is killed, not asked to end, at arbitrary moments; then the rest is run."""
    folder = tmp_path / "run"
    rng = np.random.default_rng(0)

    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], cwd=HERE)
        deadline, before = time.monotonic() + 120, names_of(folder)
        while names_of(folder) <= before and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
    (folder / "from_run_0" / ".round_3.npz.0123").write_bytes(b"what a killed process may leave")
    found, original = [], Simulation._run
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_run", lambda *arguments: found.append(1) or original(*arguments))
        resumed = run(epochs=400, checkpoint_dir=folder)
    assert 0 < len(found) < 400, "nothing was resumed"
    last = resumed.history.round[-2:]
    assert {path.name for path in (folder / "from_run_0").iterdir()} == {f"round_{number}.npz" for number in last}
    assert_same(resumed, run(epochs=400))


OTHERS = {
    "topology_checksum": {"topology": topologies.d_cliques(SHARDS.label_distribution, clique_size=5)},
    "partition_checksum": {"dataset": partitions.shards(DATA, 20, seed=2)},
    "partition_checksum of tests": {"dataset": SHARDS.with_local_tests(seed=1)},
    "dataset_checksum": {"dataset": partitions.shards(OTHER_DATA, 20, seed=1)},
    "seeds": {"seed": 1},
    "init": {"init": "independent"},
    "epochs": {"epochs": 3},
    "eval_nodes": {"eval_nodes": 6},
    "eval_examples": {"eval_examples": 6},
    "batch_size": {"batch_size": 3},
    "program": {"algorithm": algorithms.dsgd(optax.adam(0.02))},
    "model": {"model": models.mlp(hidden=(3,), num_classes=4)},
    "loss_fn": {"loss_fn": lambda logits, labels: 2 * metrics.cross_entropy(logits, labels)},
}
# What enters the compiled program as an argument, and is no part of its text.
STARTS = {
    "matrix": [{"algorithm": algorithms.dsgd(weights=weights)} for weights in (HASTINGS, (HASTINGS + np.eye(20)) / 2)],
    "optimiser's state": [
        {"algorithm": algorithms.dsgd(optax.inject_hyperparams(optax.sgd)(learning_rate=rate))} for rate in (0.1, 0.01)
    ],
    "initial model": [{"model": (lambda key, x, v=value: {"w": jnp.full((5, 4), v)}, product)} for value in (0.0, 0.1)],
}


@pytest.mark.parametrize("case", STARTS)
def test_what_is_no_part_of_the_program_is_recognised_too(case, tmp_path):
    one, other = STARTS[case]
    run(checkpoint_dir=tmp_path, epochs=1, **one)
    run(checkpoint_dir=tmp_path, epochs=1, **one)
    with pytest.raises(ValueError, match=r"checkpoints of another run: .*start was"):
        run(checkpoint_dir=tmp_path, epochs=1, **other)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "_SPACING", 0)
        run(checkpoint_dir=folder)
    return folder


@pytest.mark.parametrize("field", OTHERS)
def test_another_run_is_refused_and_the_difference_is_named(field, finished):
    others = OTHERS[field]
    field = "program" if field == "loss_fn" else field.split()[0]
    with pytest.raises(ValueError, match=rf"checkpoints of another run: .*{field} was"):
        run(checkpoint_dir=finished, **others)


ELSEWHERE = """
import sys, flax.linen as nn, test_checkpoints as t
of_flax, of_ours = sys.argv[1:]
print(len(t.run(epochs=1, model=nn.Dense(4), checkpoint_dir=of_flax).history.round))
print(t.run(checkpoint_dir=of_ours).provenance["program"])
print(t.checksum(*t.jax.tree.leaves(t.run().state)))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """What another process tells: evaluations of a run that began here, the program of another, and a checksum."""
    of_flax, of_ours = tmp_path_factory.mktemp("flax") / "run", tmp_path_factory.mktemp("ours") / "run"
    run(epochs=1, model=nn.Dense(4), checkpoint_dir=of_flax)
    run(checkpoint_dir=of_ours)
    command = [sys.executable, "-c", ELSEWHERE, str(of_flax), str(of_ours)]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.split()[-3:]


@pytest.mark.optimised
def test_modules_with_functions_in_them_are_recognised_in_another_process(elsewhere):
    assert elsewhere[0] == "2"


@pytest.mark.optimised
def test_the_program_is_recognised_in_another_process(elsewhere):
    assert elsewhere[1] == run().provenance["program"]


@pytest.mark.optimised
def test_another_process_gets_the_same_bits(elsewhere):
    assert elsewhere[2] == checksum(*jax.tree.leaves(run().state))


def test_folders_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"holds thesis.tex but no run.json: pass a new or empty folder"):
        run(checkpoint_dir=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file: pass a folder"):
        run(checkpoint_dir=tmp_path / "file")


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{", b"\xff\xfe"])
def test_a_corrupt_description_is_refused(content, tmp_path):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"run.json is corrupt: remove the folder"):
        run(checkpoint_dir=tmp_path)


def spoil(path, place=0.5, bit=0):
    """Flips one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def copied(finished, tmp_path):
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_goes_on_from_the_checkpoint_before_a_corrupt_one(copied):
    last, before = (copied / "from_run_0" / f"round_{number}.npz" for number in (16, 12))
    spoil(last)
    with pytest.warns(RuntimeWarning, match=rf"{last} is corrupt .* continues from {before}"):
        assert_same(run(checkpoint_dir=copied), run())
    assert_same(run(checkpoint_dir=copied), run())  # it has been written again
    before.write_bytes(b"")
    last.write_bytes(last.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=rf"{last} is corrupt .*; {before} is corrupt .*: remove the folder"):
        run(checkpoint_dir=copied)


def resumed_or_told(folder):
    """The result if there is one, and what was told."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result, told = run(checkpoint_dir=folder), []
        except ValueError as error:
            result, told = None, [str(error)]
    return result, told + [str(warning.message) for warning in caught]


def test_no_flipped_bit_changes_a_number(copied):
    """In no file of the folder: either it is told, or the run ends with the same bits."""
    rng, expected, found = np.random.default_rng(0), run(), []
    before, last = (copied / "from_run_0" / f"round_{number}.npz" for number in (12, 16))
    # Names and sizes of arrays are at the end of a file, and part of no array.
    places = {
        last: [*rng.random(15), *rng.uniform(0.9, 1, 15)],
        before: rng.random(2),
        copied / "run.json": rng.random(15),
    }
    assert {path for path in copied.rglob("*") if path.is_file()} == {*places, copied / "lock"}
    for path, some in places.items():
        content = path.read_bytes()
        for place in some:
            spoil(path, place, rng.integers(8))
            result, told = resumed_or_told(copied)
            assert all(str(path) in text for text in told)
            if result is None:
                assert told
            else:
                assert_same(result, expected)
            found.append(bool(told))
            path.write_bytes(content)
    assert sum(found) > 30


# What may change, and what must not


def test_evaluations_may_be_made_at_other_times(tmp_path):
    interrupted(2, checkpoint_dir=tmp_path)
    resumed = run(checkpoint_dir=tmp_path, eval_every=2)
    assert resumed.history.epoch.tolist() == [0, 1, 2, 4]
    whole = run()
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    np.testing.assert_array_equal(resumed.history.accuracy, whole.history.accuracy[[0, 1, 2, 4]])


def test_seeds_that_run_by_turns_are_evaluated_together(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda mesh: 0)  # one at a time
    monkeypatch.setattr(memory, "check", lambda *_: None)
    arguments = {"dataset": DATA, "seeds": [3, 1], "checkpoint_dir": tmp_path}
    interrupted(2, eval_every=3, **arguments)
    resumed = run(**arguments)
    assert resumed.history.epoch.tolist() == [0, 3, 4]
    np.testing.assert_array_equal(
        resumed.history.accuracy, run(dataset=DATA, seeds=[3, 1]).history.accuracy[:, [0, 3, 4]]
    )


def test_versions_that_compile_nothing_may_change(finished, monkeypatch):
    monkeypatch.setattr(np, "__version__", "99.0")
    assert_same(run(checkpoint_dir=finished), run())
    monkeypatch.setattr(jax, "__version__", "99.0")
    with pytest.raises(ValueError, match=r"another run: versions was .*'jax': '99.0'"):
        run(checkpoint_dir=finished)


@pytest.mark.parametrize(("first", "then"), [({"epochs": 4}, {"epochs": 6}), ({"rounds": 3}, {"rounds": 5})])
def test_a_longer_run_is_told_to_extend(first, then, tmp_path):
    arguments = {"epochs": None, "checkpoint_dir": tmp_path}
    run(**arguments | first)
    ((unit, length),) = first.items()
    with pytest.raises(ValueError, match=rf"To train longer, pass {unit}={length}, extend=2"):
        run(**arguments | then)
    assert_same(run(extend=2, **arguments | first), run(**{"epochs": None} | then))


def test_what_was_measured_on_other_nodes_cannot_go_on(finished):
    with pytest.raises(ValueError, match="Its history is measured on other nodes"):
        run(checkpoint_dir=finished, eval_nodes=6)
    with pytest.raises(ValueError, match="Its history is measured on other examples"):
        run(checkpoint_dir=finished, eval_examples=7)
    assert_same(run(checkpoint_dir=finished, eval_examples=50), run())  # all


def test_other_types_and_keys_are_saved_as_they_are(tmp_path):
    def init(params, network):
        return {"key": jax.random.key(3), "half": jnp.full(20, 0.1, jnp.bfloat16)}

    def step(params, gradients, state, network, round):
        key, noise = jax.random.split(state["key"])
        half = state["half"] + jax.random.normal(noise, (20,), jnp.bfloat16)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), {"key": key, "half": half}

    algorithm = algorithms.Algorithm(algorithms.over_topology(), init, step)
    interrupted(2, algorithm=algorithm, checkpoint_dir=tmp_path)
    resumed, whole = (run(algorithm=algorithm, checkpoint_dir=folder).state for folder in (tmp_path, None))
    assert resumed.algorithm["half"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(resumed.algorithm["half"], whole.algorithm["half"])
    np.testing.assert_array_equal(*(jax.random.key_data(state.algorithm["key"]) for state in (resumed, whole)))


# Disks and folders


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_run_outlives_a_disk_that_takes_no_more(number, tmp_path, monkeypatch):
    interrupted(2, checkpoint_dir=tmp_path)
    before = names_of(tmp_path)

    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        told = rf"{tmp_path}.*{os.strerror(number)}.*: the run continues, and the last checkpoint is of round 4"
        with pytest.warns(RuntimeWarning, match=told) as caught:
            result = run(checkpoint_dir=tmp_path)
    assert caught[0].filename == __file__
    assert_same(result, run())
    assert names_of(tmp_path) == before
    assert len(list((tmp_path / "from_run_0").iterdir())) == len(before)  # nothing half-written
    assert_same(run(checkpoint_dir=tmp_path), result)


@pytest.mark.optimised
def test_a_really_full_disk(tmp_path):
    """Not a byte can be written."""
    interrupted(2, checkpoint_dir=tmp_path)
    before = names_of(tmp_path)
    code = (
        "import resource, signal, sys, test_checkpoints as t\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "print(t.run(checkpoint_dir=sys.argv[1]).history.round[-1])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["16"]
    assert "RuntimeWarning: could not save a checkpoint of round 16" in told.stderr
    assert "Traceback" not in told.stderr
    assert {path.name for path in (tmp_path / "from_run_0").iterdir()} == before


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"checkpoint_dir='.*file/run' cannot be used .*: pass another folder"):
        run(checkpoint_dir=tmp_path / "file" / "run")


@pytest.mark.optimised
def test_two_processes_do_not_share_a_folder(tmp_path):
    folder = tmp_path / "run"
    code = "import sys, test_checkpoints as t; t.run(epochs=100_000, checkpoint_dir=sys.argv[1])"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=HERE)
    try:
        deadline = time.monotonic() + 120
        while not names_of(folder):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        told = rf"in use by process {process.pid} on {socket.gethostname()}: wait until it ends, or pass another folder"
        with pytest.raises(ValueError, match=told):
            run(epochs=100_000, checkpoint_dir=folder)
    finally:
        process.kill()
        process.wait()
    stopped = run(epochs=100_000, checkpoint_dir=folder, on_evaluation=lambda record: True)  # the dead keep nothing
    assert stopped.history.round[0] == 0


def test_a_folder_is_free_again_after_an_error(tmp_path):
    interrupted(1, checkpoint_dir=tmp_path)

    def inside(record):
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
            run(checkpoint_dir=tmp_path)

    run(checkpoint_dir=tmp_path, on_evaluation=inside)


def test_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run(epochs=1, checkpoint_dir="~/runs/one")
    assert names_of(tmp_path / "runs" / "one")


# Callbacks


def test_a_callback_sees_every_evaluation_and_may_stop_the_run():
    records = []

    def on_evaluation(record):
        records.append(record)
        return record.epoch == 2

    result = run(on_evaluation=on_evaluation)
    assert result.history.epoch.tolist() == [0, 1, 2]
    assert int(result.state.round) == result.provenance["rounds_run"] == records[-1].round
    for number, record in enumerate(records):
        np.testing.assert_array_equal(record.accuracy, result.history.accuracy[number])
        np.testing.assert_array_equal(record.train_loss, result.history.train_loss[number])
    assert_same(result, run(epochs=2))


def test_called_again_a_stopped_run_is_stopped(tmp_path):
    stops = {"on_evaluation": lambda record: record.accuracy.min() >= 0 and np.bool_(record.epoch >= 2)}
    for _ in range(3):
        assert run(checkpoint_dir=tmp_path, **stops).history.epoch.tolist() == [0, 1, 2]


def test_without_its_callback_a_stopped_run_goes_on(tmp_path):
    stopped = run(checkpoint_dir=tmp_path, on_evaluation=lambda record: record.epoch == 1)
    assert stopped.history.epoch[-1] == 1
    assert_same(run(checkpoint_dir=tmp_path), run())


def test_several_seeds_are_reported_and_stopped_together():
    shapes = []

    def on_evaluation(record):
        shapes.append(record.accuracy.shape)
        return True

    result = run(dataset=DATA, seeds=[0, 1, 2], on_evaluation=on_evaluation)
    assert shapes == [(3, 5)]
    assert result.history.accuracy.shape == (3, 1, 5)


def test_restored_history_cannot_be_changed_by_callbacks(tmp_path):
    run(checkpoint_dir=tmp_path, epochs=1)

    def spoil(record):
        with pytest.raises(ValueError, match="read-only"):
            record.accuracy.fill(-1)

    assert run(checkpoint_dir=tmp_path, epochs=1, on_evaluation=spoil).history.accuracy.min() >= 0


def test_runs_in_half_precision_go_on(tmp_path):
    def init(key, inputs):
        return {"w": jax.random.normal(key, (5, 4), jnp.bfloat16)}

    model = (init, lambda params, inputs: inputs.astype(jnp.bfloat16) @ params["w"])
    arguments = {"model": model, "algorithm": algorithms.dsgd(optax.sgd(0.1))}
    interrupted(3, checkpoint_dir=tmp_path / "run", **arguments)
    assert_same(run(checkpoint_dir=tmp_path / "run", **arguments), result := run(**arguments))
    result.save(tmp_path / "result.npz")
    np.testing.assert_array_equal(type(result).load(tmp_path / "result.npz").history.loss, result.history.loss)
