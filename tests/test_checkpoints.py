"""Stopped at any moment, a run goes on and ends with the very bits of one that was never stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcliques_jax import (
    _checkpoints,
    _layouts,
    algorithms,
    datasets,
    metrics,
    mixing,
    models,
    partitions,
    simulate,
    topologies,
)
from dcliques_jax._checks import checksum

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
    monkeypatch.setattr(_checkpoints, "_SPACING", 0)


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
    with pytest.raises(ValueError, match=r"further than .* pass extend"):
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
    monkeypatch.setattr(_checkpoints, "_SPACING", 1e9)
    saved = []

    def on_evaluation(record):
        saved.append({path.name for path in tmp_path.glob("from_run_0/checkpoints/*")})

    result = run(checkpoint_dir=tmp_path, on_evaluation=on_evaluation)
    assert saved == 5 * [{"0"}]  # the first, and then none is due
    assert [path.name for path in tmp_path.glob("from_run_0/checkpoints/*")] == [str(result.history.round[-1])]
    assert_same(run(checkpoint_dir=tmp_path), result)


PROGRAM = """
import sys
import test_checkpoints
test_checkpoints._checkpoints._SPACING = 0
test_checkpoints.run(epochs=60, checkpoint_dir=sys.argv[1])
"""


def test_killed_at_any_moment_it_goes_on(tmp_path, monkeypatch):
    """The process is killed, not asked to end, at arbitrary moments; then the rest is run."""
    folder = tmp_path / "run"
    rng = np.random.default_rng(0)

    def saved():
        return {path.name for path in folder.glob("from_run_0/checkpoints/*") if path.name.isdigit()}  # as a whole

    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], cwd=HERE)
        deadline, before = time.monotonic() + 120, saved()
        while saved() <= before and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.7))
        process.send_signal(signal.SIGKILL)
        process.wait()
    found, original = [], _layouts.Rounds.run
    with monkeypatch.context() as patch:
        patch.setattr(_layouts.Rounds, "run", lambda *arguments: found.append(1) or original(*arguments))
        resumed = run(epochs=60, checkpoint_dir=folder)
    assert 0 < len(found) < 60, "nothing was resumed"
    assert_same(resumed, run(epochs=60))


OTHERS = {
    "topology_checksum": {"topology": topologies.d_cliques(SHARDS.label_distribution, clique_size=5)},
    "partition_checksum": {"dataset": partitions.shards(DATA, 20, seed=2)},
    "dataset_checksum": {"dataset": partitions.shards(OTHER_DATA, 20, seed=1)},
    "seeds": {"seed": 1},
    "init": {"init": "independent"},
    "epochs": {"epochs": 5},
    "eval_every": {"eval_every": 2},
    "eval_nodes": {"eval_nodes": 6},
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
    run(checkpoint_dir=folder)
    return folder


@pytest.mark.parametrize("field", OTHERS)
def test_another_run_is_refused_and_the_difference_is_named(field, finished):
    others = OTHERS[field]
    field = "program" if field == "loss_fn" else field
    with pytest.raises(ValueError, match=rf"checkpoints of another run: .*{field} was"):
        run(checkpoint_dir=finished, **others)


def test_modules_with_functions_in_them_are_recognised_in_another_process(tmp_path):
    code = (
        "import sys, flax.linen as nn, test_checkpoints as t\n"
        "print(len(t.run(epochs=1, model=nn.Dense(4), checkpoint_dir=sys.argv[1]).history.round))"
    )
    for _ in range(2):
        command = [sys.executable, "-c", code, str(tmp_path / "run")]
        assert subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.split() == ["2"]


def test_the_program_is_recognised_in_another_process(finished):
    told = json.loads((finished / "from_run_0" / "run.json").read_text())["program"]
    code = "import test_checkpoints as t; print(t.run(epochs=4).provenance['program'])"
    again = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert again.stdout.split()[-1] == told


def test_another_process_gets_the_same_bits():
    code = "import test_checkpoints as t; print(t.checksum(*t.jax.tree.leaves(t.run().state)))"
    told = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert told.stdout.split()[-1] == checksum(*jax.tree.leaves(run().state))


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


def test_a_corrupt_checkpoint_is_refused(tmp_path):
    run(checkpoint_dir=tmp_path, epochs=1)
    for path in tmp_path.glob("from_run_0/checkpoints/*/state/**/*"):
        if path.is_file() and path.name not in ("_METADATA", "commit_success.txt"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    # In a process of its own: orbax leaves unfinished tasks behind.
    code = f"import test_checkpoints as t; t.run(epochs=1, checkpoint_dir={str(tmp_path)!r})"
    tried = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=False)
    assert tried.returncode == 1
    assert "remove the folder to start afresh" in tried.stderr
    assert "ValueError: the checkpoint in" in tried.stderr


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
