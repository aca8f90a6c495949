"""Studies: what a file may say, and runs that are never repeated, resumed bit for bit and reported."""

import contextlib
import csv
import inspect
import pathlib
import runpy
import shutil
import tomllib

import numpy as np
import optax
import pytest

from dcliques_jax import algorithms, cliques, datasets, partitions, simulate, studies, topologies
from dcliques_jax.__main__ import main
from dcliques_jax._store import files
from dcliques_jax._studies import file, kept, names, runner
from dcliques_jax._studies.cases import Builder

TEXT = """
title = "Small"
num_nodes = 10
seeds = [0, 1]
targets = [0.3, 0.99]
data = {use = "synthetic", num_train = 300}
simulate = {rounds = 4, eval_every = 2, batch_size = 10}
tune = {evaluate_on = "test", rounds = 2}

[grids]
rate = [0.03, 0.3]
rate2 = [0.5]

[partitions.shards]

[topologies.ring]
[topologies.moving]
use = "one_peer_exponential"

[algorithms.dsgd]
optimizer = {use = "sgd", learning_rate = {tune = "rate"}}
[algorithms.d2]
optimizer = {use = "sgd", learning_rate = 0.1}

[faults]
none = []
loss = [{use = "message_loss", p = 0.1}]
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "small.toml").write_text(TEXT)
    return folder, studies.run(folder / "small.toml", folder / "out", progress=False)


def test_all_combinations_are_run_with_all_seeds(done):
    _, outcomes = done
    assert len(outcomes) == 1 * 2 * 2 * 2
    assert {outcome.case.labels["topologies"] for outcome in outcomes} == {"ring", "moving"}
    assert all((outcome.result is None) != (outcome.refused is None) for outcome in outcomes)
    found = [outcome.result.history.accuracy.shape for outcome in outcomes if outcome.result is not None]
    assert set(found) == {(2, 3, 10)}


def test_a_case_is_the_call_of_simulate_that_it_describes(done):
    _, outcomes = done
    dataset = datasets.synthetic(num_train=300)
    data = [partitions.shards(dataset, 10, seed=seed) for seed in (0, 1)]
    graphs = [topologies.ring(10, seed=seed) for seed in (0, 1)]
    alone = simulate(
        graphs,
        data,
        algorithm=algorithms.d2(optax.sgd(0.1)),
        rounds=4,
        eval_every=2,
        batch_size=10,
        seeds=[0, 1],
        progress=False,
    )
    (found,) = (o.result for o in outcomes if list(o.case.labels.values()) == ["shards", "ring", "d2", "none"])
    np.testing.assert_array_equal(found.history.accuracy, alone.history.accuracy)
    np.testing.assert_array_equal(found.history.loss, alone.history.loss)


def test_values_are_tuned_once_and_without_faults(done):
    folder, outcomes = done
    tuned = [outcome for outcome in outcomes if outcome.case.labels["algorithms"] == "dsgd"]
    assert len(list((folder / "out" / "tuning").iterdir())) == 2  # one per topology
    for outcome in tuned:
        assert outcome.values["rate"] in (0.03, 0.3)
    by_topology = {}
    for outcome in tuned:
        by_topology.setdefault(outcome.case.labels["topologies"], set()).add(outcome.values["rate"])
    assert all(len(values) == 1 for values in by_topology.values())


def test_what_an_algorithm_does_not_allow_is_kept_with_the_reason(done):
    _, outcomes = done
    refused = {outcome.case.name(): outcome.refused for outcome in outcomes if outcome.refused is not None}
    assert set(refused) == {"shards, moving, d2", "shards, moving, d2, loss"}
    assert "gradient_tracking" in refused["shards, moving, d2"]


def test_a_seed_that_is_refused_does_not_end_the_study(tmp_path):
    """D2 is stable on the random graph of the first seed, and not on that of the other."""
    text = """
        num_nodes = 20
        seeds = [0, 4]
        data = {use = "synthetic", num_train = 300}
        simulate = {rounds = 1}
        [topologies.random]
        use = "random_regular"
        degree = 10
        [topologies.ring]
        [algorithms.d2]
        lazy = false
    """
    random, ring = studies.run(studies.parse(tomllib.loads(text)), tmp_path / "out", progress=False)
    assert "D2 is unstable" in random.refused
    assert ring.result is not None


def test_what_was_refused_is_asked_again(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(TEXT)
    options = {"only": ["ring", "d2", "none"], "progress": False}
    with monkeypatch.context() as patched:
        patched.setattr(runner, "refusal", lambda *_, **__: "too large for this machine")
        (outcome,) = studies.run(tmp_path / "small.toml", tmp_path / "out", **options)
    assert outcome.refused == "too large for this machine"
    (outcome,) = studies.run(tmp_path / "small.toml", tmp_path / "out", resume=True, **options)
    assert outcome.refused is None
    assert not list((tmp_path / "out").rglob("refused.json"))


def test_nothing_finished_is_run_again(done, monkeypatch):
    folder, before = done
    monkeypatch.setattr(kept, "trained", None)
    again = studies.run(folder / "small.toml", folder / "out", resume=True, progress=False)
    for one, other in zip(before, again, strict=True):
        assert one.refused == other.refused
        if one.result is not None:
            np.testing.assert_array_equal(one.result.history.loss, other.result.history.loss)
    with pytest.raises(ValueError, match="continue with --resume"):
        studies.run(folder / "small.toml", folder / "out", progress=False)


def test_an_interrupted_study_resumes_to_the_same_bits(done, tmp_path, monkeypatch):
    _, before = done
    (tmp_path / "small.toml").write_text(TEXT)
    real = kept.simulate

    def interrupted(*arguments, **options):
        """Stops after the second evaluation, as Ctrl-C would."""
        result = real(*arguments, **options | {"on_evaluation": lambda record: record.round == 2})
        object.__setattr__(result, "interrupted", True)
        return result

    monkeypatch.setattr(kept, "simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        studies.run(tmp_path / "small.toml", tmp_path / "out", only=["ring", "d2", "none"], progress=False)
    monkeypatch.setattr(kept, "simulate", real)
    options = {"only": ["ring", "d2", "none"], "resume": True, "progress": False}
    (outcome,) = studies.run(tmp_path / "small.toml", tmp_path / "out", **options)
    (found,) = (o.result for o in before if o.case.labels == outcome.case.labels)
    np.testing.assert_array_equal(outcome.result.history.loss, found.history.loss)
    np.testing.assert_array_equal(outcome.result.history.train_loss, found.history.train_loss)
    assert not list((tmp_path / "out").rglob("checkpoint"))


def test_a_study_can_stop_early_and_go_on(done, tmp_path):
    _, before = done
    (tmp_path / "small.toml").write_text(TEXT)
    options = {"only": ["ring", "d2", "none"], "progress": False}
    (first,) = studies.run(tmp_path / "small.toml", tmp_path / "out", until=0.5, **options)
    assert first.result.history.round.tolist() == [0, 2]  # the first evaluation after half an epoch
    (again,) = studies.run(tmp_path / "small.toml", tmp_path / "out", until=0.5, resume=True, **options)
    assert again.result.history.round.tolist() == [0, 2]
    assert "0 cases are finished, 1 stopped early, 7 not run" in studies.report(tmp_path / "out")
    (whole,) = studies.run(tmp_path / "small.toml", tmp_path / "out", resume=True, **options)
    (found,) = (o.result for o in before if o.case.labels == whole.case.labels)
    np.testing.assert_array_equal(whole.result.history.loss, found.history.loss)
    assert not list((tmp_path / "out").rglob("checkpoint"))


def test_results_of_other_data_are_refused(done, tmp_path, monkeypatch):
    folder, _ = done
    other = datasets.synthetic(num_train=300, seed=1)
    monkeypatch.setitem(names.BUILDERS, "data", {"synthetic": lambda **_: other})
    with pytest.raises(ValueError, match="results of another run: dataset_checksum was"):
        studies.run(folder / "small.toml", folder / "out", resume=True, progress=False)
    shutil.copytree(folder / "out" / "tuning", tmp_path / "out" / "tuning")  # nor are values tuned on other data
    with pytest.raises(ValueError, match="results of another run: dataset_checksum was"):
        studies.run(folder / "small.toml", tmp_path / "out", only=["ring", "dsgd", "none"], progress=False)


def test_samples_of_examples_end_with_all_of_them(done, tmp_path):
    _, before = done
    given = tomllib.loads(TEXT.replace("rounds = 4", "eval_examples = 7, eval_nodes = 3, rounds = 4"))
    (outcome,) = studies.run(studies.parse(given), tmp_path, only=["ring", "d2", "loss"], progress=False)
    assert outcome.result.history.accuracy.shape == (2, 3, 3)
    (folder,) = (tmp_path / "runs").iterdir()
    final = files.read_arrays(folder / "final.npz")
    (whole,) = (o.result for o in before if o.case.labels == outcome.case.labels)
    np.testing.assert_array_equal(final["accuracy"], whole.history.accuracy[:, -1])
    np.testing.assert_allclose(final["nodes_right"].mean(axis=1) / 10, final["accuracy"].mean(axis=1), rtol=1e-6)
    assert f"| ring | d2 |  | {100 * final['accuracy'].mean():.1f} ±" in studies.report(tmp_path)


def test_parts_of_topologies_are_built():
    given = tomllib.loads(TEXT)
    by_messages = {"use": "decentralised_greedy_swap", "clique_size": 5, "rounds": 3}
    whole = {"use": "d_cliques", "cliques": by_messages}
    less = {"use": "remove_intra_clique_edges", "per_clique": 1, "topology": whole}
    given["topologies"] = {"whole": whole, "less": less}
    study = studies.parse(given)
    cases = {case.labels["topologies"]: case for case in study.cases()}
    built = {label: Builder(study).arguments(case, [0], {"rate": 0.1}) for label, case in cases.items()}
    graphs = {label: arguments["topology"][0] for label, arguments in built.items()}
    p = built["whole"]["dataset"][0].label_distribution
    ids = cliques.decentralised_greedy_swap(p, 5, rounds=3, seed=0)
    np.testing.assert_array_equal(graphs["whole"].clique_ids, ids)
    assert len(graphs["whole"].edges) - len(graphs["less"].edges) == 2
    given["topologies"]["less"] = less | {"topology": {"use": "d_clique"}}
    with pytest.raises(ValueError, match=r"topologies.less.topology.use='d_clique' is unknown"):
        studies.parse(given)


def test_results_load_as_one_table(done):
    folder, outcomes = done
    frame = studies.load(folder / "out")
    finished = [outcome for outcome in outcomes if outcome.result is not None]
    assert len(frame) == len(finished) * 2 * 3
    part = frame[(frame["topologies"] == "ring") & (frame["algorithms"] == "d2") & (frame["faults"] == "loss")]
    part = part[(part["seed"] == 1) & (part["round"] == 4)]
    (found,) = (o.result for o in finished if list(o.case.labels.values()) == ["shards", "ring", "d2", "loss"])
    assert part["accuracy"].item() == found.history.accuracy[1, -1].mean()
    assert part["accuracy_min"].item() == found.history.accuracy[1, -1].min()
    assert part["bytes"].item() == found.history.bytes[1, -1]
    assert part["seconds_wan"].item() > part["seconds_lan"].item() > 0


def test_the_report_has_a_table_and_a_figure_of_every_condition(done, capsys):
    folder, _ = done
    assert main(["report", str(folder / "out")]) == 0
    text = capsys.readouterr().out
    assert (folder / "out" / "report.md").read_text() in text
    assert "## shards\n" in text
    assert "## shards, loss" in text
    assert "never" in text
    assert "## Not possible" in text
    assert len(list((folder / "out").glob("accuracy-*.png"))) == 2


def test_the_page_of_a_comparison_is_made_from_results(done, tmp_path):
    folder, outcomes = done
    script = pathlib.Path(__file__).parent.parent / "docs" / "comparison.py"
    module = runpy.run_path(str(script))
    make = module["main"]
    make.__globals__["TARGETS"] = (0.15, 0.99)
    make(folder / "out", tmp_path, folder / "out")
    names = {"accuracy.png", "faults.png", "epochs-shards.png", "costs-shards.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == names
    rows = list(csv.DictReader((tmp_path / "results.csv").read_text().splitlines()))
    finished = [outcome for outcome in outcomes if outcome.result is not None]
    assert len(rows) == len(finished)
    for row, outcome in zip(rows, finished, strict=True):
        assert row["topologies"] == outcome.case.labels["topologies"]
        assert float(row["accuracy"]) == pytest.approx(outcome.result.history.accuracy[:, -1].mean(), rel=1e-4)
    tables = (tmp_path / "tables.md").read_text()
    assert "| topology | dsgd | d2 |" in tables
    assert "never" in tables
    assert "### 10 nodes" in tables
    row, outcome = rows[0], finished[0]
    history = outcome.result.history
    reached = int(np.flatnonzero(history.accuracy.mean(axis=(0, 2)) >= 0.15)[0])
    assert float(row["messages to 15%"]) == pytest.approx(history.messages[:, reached].mean())
    assert float(row["bytes to 15%"]) == pytest.approx(history.bytes[:, reached].mean(), rel=1e-4)
    assert row["messages to 99%"] == ""
    # What is not in the folder keeps its lines.
    text = (tmp_path / "results.csv").read_text()
    (tmp_path / "results.csv").write_text(text.replace(",shards,", ",earlier,"))
    make(folder / "out", tmp_path)
    both = (tmp_path / "results.csv").read_text().splitlines()
    assert both == [*text.replace(",shards,", ",earlier,").splitlines(), *text.splitlines()[1:]]
    assert "### 10 nodes" in (tmp_path / "tables.md").read_text()


def test_the_page_of_a_comparison_leaves_out_what_was_stopped(tmp_path):
    (tmp_path / "small.toml").write_text(TEXT)
    only = {"only": ["ring", "d2", "none"], "progress": False}
    studies.run(tmp_path / "small.toml", tmp_path / "out", until=0, **only)
    summary = runpy.run_path(str(pathlib.Path(__file__).parent.parent / "docs" / "comparison.py"))["summary"]
    assert len(summary(tmp_path / "out")) == 0
    studies.run(tmp_path / "small.toml", tmp_path / "out", resume=True, **only)
    assert len(summary(tmp_path / "out")) == 1


def test_sweeps_are_kept_whole(tmp_path):
    given = tomllib.loads(TEXT.replace('tune = "rate"', 'sweep = "rate"'))
    options = {"only": ["ring", "dsgd", "none"], "progress": False}
    (outcome,) = studies.run(studies.parse(given), tmp_path, **options)
    assert outcome.result.history.accuracy.shape == (2, 2, 3, 10)
    frame = studies.load(tmp_path)
    assert sorted(frame["rate"].unique()) == [0.03, 0.3]
    assert "rate 0." in studies.report(tmp_path)


def test_the_command_line_runs_lists_and_refuses(tmp_path, capsys):
    (tmp_path / "small.toml").write_text(TEXT)
    arguments = [str(tmp_path / "small.toml"), "--out", str(tmp_path / "out"), "--only", "moving", "d2"]
    assert main(["run", *arguments]) == 0
    assert "0 cases have results, 2 are not possible" in capsys.readouterr().out
    assert main(["run", *arguments]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["run", *arguments[:-2], "nowhere"]) == 2
    assert "'nowhere' is unknown: choose among" in capsys.readouterr().err
    assert main(["list"]) == 0
    assert "comparison" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "none.toml")]) == 2
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no study" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_nodes = 10", "nodes = 10", "nodes=10 is unknown: choose one of title, num_nodes"),
        ("num_nodes = 10", "num_nodes = 0", "num_nodes=0"),
        ("seeds = [0, 1]", "seeds = 3", "seeds=3 must be a list of numbers"),
        ("rounds = 2}", "metric = 'local_accuracy'}", "tune.metric='local_accuracy' is unknown"),
        ("rounds = 2}", "metric = 'acuracy'}", "tune.metric='acuracy' is unknown: choose one of accuracy"),
        ('evaluate_on = "test"', 'evaluate_on = "tset"', "tune.evaluate_on='tset' is unknown"),
        ("rounds = 2}", "rounds = 2, epochs = 1}", "tune.epochs=1 and tune.rounds=2: pass either, not both"),
        ("rounds = 4", "rounds = 4, epochs = 1", "simulate.epochs=1 and simulate.rounds=4: pass either, not both"),
        ("[partitions.shards]", "[partitions.shards]\nsampling = 'all'", "partitions.shards.sampling='all' is unknown"),
        (
            'learning_rate = {tune = "rate"}',
            'learning_rate = {tune = "rate"}, momentum = {sweep = "rate2"}',
            "tunes some grids and sweeps others",
        ),
        ('use = "one_peer_exponential"', 'use = "one_pear"', "topologies.moving.use='one_pear' is unknown: choose one"),
        ("[topologies.ring]", "[topologies.ring]\ndegree = 3", "topologies.ring.degree=3 is not an argument of ring"),
        ("[partitions.shards]", "[partitions.dirichlet]", "partitions.dirichlet has no alpha"),
        (
            "[topologies.ring]",
            "[topologies.d_cliques]\ncliques = {clique_size = 10}",
            "topologies.d_cliques.cliques.use='cliques' is unknown: choose one of greedy_swap",
        ),
        ("[partitions.shards]", "[partitions]\nshards = 3", "partitions.shards=3 must be a table"),
        (
            '"sgd", learning_rate = 0.1',
            '"sdg"',
            "d2.optimizer.use='sdg' is unknown: choose one of adabelief",
        ),
        (
            '"sgd", learning_rate = 0.1',
            '"sgd", rate = 0.1',
            "d2.optimizer.rate=0.1 is not an argument of sgd",
        ),
        ('{tune = "rate"}', '{tune = "rats"}', r"refers to \{tune = 'rats'\}, but \[grids\] has rate"),
        ("rate = [0.03, 0.3]", 'rate = ["a"]', "grids.rate='a' must be a number"),
        ("p = 0.1", "q = 0.1", r"faults.loss\[0\].q=0.1 is not an argument of message_loss"),
        ("targets = [0.3, 0.99]", "targets = 0.9", "targets=0.9 must be a list"),
        ("[grids]\nrate = [0.03, 0.3]\nrate2 = [0.5]", "[[grids]]\nrate = [0.03]", "grids=.* must be a table"),
        ("targets = [0.3, 0.99]", "metrics = ['a']", r"metrics=\['a'\] must be a table"),
        ('tune = {evaluate_on = "test", rounds = 2}', "tune = 'accuracy'", "tune='accuracy' must be a table"),
        ('"synthetic"', '["synthetic"]', r"data.use=\['synthetic'\] is unknown"),
        ("num_train = 300", "num_train = 2026-01-01", "numbers, strings, lists and tables only"),
        ('{tune = "rate"}', "{tune = [0.1, 0.3]}", r"\{tune = \[0.1, 0.3\]\} must be the name of a list"),
        ("p = 0.1", "p = 3", r"faults.loss\[0\]: p=3 must be"),
        (
            "[algorithms.d2]",
            "[algorithms.gossip_momentum]\nlearning_rate = {tune = 'rate'}\nmomentum = [0.9, 0.99]\n[algorithms.d2]",
            r"algorithms.gossip_momentum: momentum=\[0.9, 0.99\] must be a number",
        ),
        ("rounds = 4", "round = 4", "simulate.round=4 is unknown: choose one of epochs"),
        ("targets = [0.3, 0.99]", "targets = [3]", "targets=3 must be a number in 0..1"),
        (
            "[grids]",
            '[[skip]]\nalgorithms = "sgd"\n[grids]',
            r"skip\[0\].algorithms='sgd' is unknown: choose one",
        ),
        ("[grids]", "skip = [{topologies = {a = 1}}]\n[grids]", r"skip\[0\].topologies=\{'a': 1\} is unknown"),
        ("rounds = 4", "rounds = -3", "simulate.rounds=-3 must be"),
        ("batch_size = 10", "batch_size = 0.5", "simulate.batch_size=0.5 must be"),
        ('data = {use = "synthetic", num_train = 300}', "", r"needs at least the sections \[data\]"),
        ("seeds = [0, 1]", "seeds = [0, 1", "is not TOML"),
    ],
)
def test_bad_files_are_refused_with_the_key_and_what_would_do(tmp_path, old, new, message):
    assert old in TEXT
    (tmp_path / "bad.toml").write_text(TEXT.replace(old, new))
    with pytest.raises(ValueError, match=message):
        studies.read(tmp_path / "bad.toml")


def test_combinations_can_be_skipped():
    single = tomllib.loads(TEXT) | {"skip": {"algorithms": "d2", "faults": ["loss"]}}
    assert "shards, ring, d2, loss" not in [case.name() for case in studies.parse(single).cases()]
    given = tomllib.loads(TEXT) | {"skip": [{"algorithms": "d2", "faults": ["loss"]}, {"topologies": "moving"}]}
    names = [case.name() for case in studies.parse(given).cases()]
    assert names == ["shards, ring, dsgd", "shards, ring, dsgd, loss", "shards, ring, d2"]


def test_another_number_of_nodes_keeps_the_rounds_of_an_epoch(tmp_path, monkeypatch, capsys):
    (tmp_path / "small.toml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "small.toml", "--nodes", "30", "--only", "ring", "d2", "none"]) == 0
    assert "written to small-30-nodes" in capsys.readouterr().out
    study = studies.read_study("small-30-nodes")
    assert (study.num_nodes, study.simulate["batch_size"]) == (30, 3)
    (result,) = [each.result for each in runner.kept_outcomes(tmp_path / "small-30-nodes") if each.result is not None]
    assert result.history.accuracy.shape == (2, 3, 30)
    assert studies.read("comparison").resized(1000).simulate["batch_size"] == 13
    assert main(["run", "small.toml", "--nodes", "0"]) == 2
    assert "num_nodes=0" in capsys.readouterr().err


def test_a_length_of_nothing_is_refused():
    with pytest.raises(ValueError, match="epochs=0 must be an integer of at least 1"):
        studies.read("one_page").lasting(0)


def test_another_length_stretches_learning_rates(tmp_path):
    study = studies.read("one_page").lasting(30)
    (table,) = study.axes["algorithms"].values()
    assert study.simulate["epochs"] == 30
    assert (table["learning_rate"]["warm_up"], table["learning_rate"]["drops"]) == (0.5, [15, 22.5])
    assert (table["learning_rate"]["peak"], table["momentum"]) == (0.8, 0.9)


@pytest.mark.parametrize(
    ("simulate", "epochs", "expected"),
    [
        ("rounds = 200, eval_every = 50", 10, {"epochs": 10}),
        ("epochs = 10, eval_every = [5, 10]", 4, {"epochs": 4, "eval_every": [2, 4]}),
        ("epochs = 10, eval_every = [1, 2, 10]", 1, {"epochs": 1, "eval_every": [1]}),
    ],
)
def test_another_length_changes_evaluations_and_tuning(simulate, epochs, expected):
    text = TEXT.replace("rounds = 4, eval_every = 2", simulate).replace("rounds = 2}", "epochs = 20}")
    study = studies.parse(tomllib.loads(text)).lasting(epochs)
    assert study.simulate == expected | {"batch_size": 10}
    assert study.tune["epochs"] == (20 if "rounds" in simulate else 2 * epochs)


def test_a_fault_may_be_named_by_its_label():
    text = TEXT.replace('loss = [{use = "message_loss", p = 0.1}]', "message_loss = {p = 0.1}")
    study = studies.parse(tomllib.loads(text))
    (case,) = [c for c in study.cases() if list(c.labels.values()) == ["shards", "ring", "d2", "message_loss"]]
    assert [fault.name for fault in Builder(study).faults(case)] == ["message_loss(0.1)"]


def test_wrong_values_are_refused_before_the_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "trained", None)
    text = TEXT.replace(
        "[topologies.moving]", '[topologies.late]\nuse = "d_cliques"\ninter = "smal"\n[topologies.moving]'
    )
    with pytest.raises(ValueError, match=r"topologies\.late: inter='smal' is unknown"):
        studies.run(studies.parse(tomllib.loads(text)), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_a_folder_does_not_hide_a_shipped_study(tmp_path, monkeypatch):
    (tmp_path / "comparison").mkdir()
    monkeypatch.chdir(tmp_path)
    assert studies.read("comparison").title == "Comparison"


def test_ctrl_c_during_the_last_evaluation_ends_the_study(tmp_path, monkeypatch):
    real = kept.simulate

    def interrupted(*arguments, **options):
        result = real(*arguments, **options)
        if options.get("rounds") == 0:
            object.__setattr__(result, "interrupted", True)
        return result

    text = TEXT.replace("eval_every = 2", "eval_every = 2, eval_examples = 7")
    options = {"only": ["ring", "d2", "none"], "progress": False}
    monkeypatch.setattr(kept, "simulate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        studies.run(studies.parse(tomllib.loads(text)), tmp_path / "out", **options)
    monkeypatch.setattr(kept, "simulate", real)
    (outcome,) = studies.run(studies.parse(tomllib.loads(text)), tmp_path / "out", resume=True, **options)
    assert outcome.result.provenance["final"] is not None


@pytest.mark.parametrize("sampling", ["", 'sampling = "full_batches"'])
def test_learning_rates_in_epochs_know_the_nodes_of_all_seeds(sampling, monkeypatch):
    text = TEXT.replace("[partitions.shards]", f"[partitions.dirichlet]\nalpha = 0.3\n{sampling}")
    text = text.replace("rounds = 4", "epochs = 4").replace("seeds = [0, 1]", "seeds = [0, 1, 2]")
    text = text.replace("learning_rate = 0.1}", 'learning_rate = {use = "in_epochs", peak = 0.1}}')
    study = studies.parse(tomllib.loads(text))
    (case,) = [c for c in study.cases() if list(c.labels.values()) == ["dirichlet", "ring", "d2", "none"]]
    told = []
    monkeypatch.setitem(
        names.BUILDERS,
        "schedules",
        {"in_epochs": lambda peak, rounds_per_epoch, epochs: told.append(rounds_per_epoch) or peak},
    )
    builder = Builder(study)
    arguments = builder.arguments(case, study.seeds, {})
    sizes = [each.sizes for each in arguments["dataset"]]
    expected = min(size.min() for size in sizes) // 10 if sampling else -(-max(size.max() for size in sizes) // 10)
    assert told == [expected]


def test_other_definitions_have_other_folders():
    one = studies.parse(tomllib.loads(TEXT))
    other = studies.parse(tomllib.loads(TEXT.replace("learning_rate = 0.1", "learning_rate = 0.2")))
    ids = [{case.name(): case.id(study) for case in study.cases()} for study in (one, other)]
    assert ids[0]["shards, ring, dsgd"] == ids[1]["shards, ring, dsgd"]
    assert ids[0]["shards, ring, d2"] != ids[1]["shards, ring, d2"]


@pytest.mark.parametrize(("old", "new"), [("rate = [0.03, 0.3]", "rate = [0.03, 0.1]"), ("rounds = 2}", "rounds = 3}")])
def test_cases_depend_on_the_grids_that_they_use(old, new):
    studied = [studies.parse(tomllib.loads(text)) for text in (TEXT, TEXT.replace(old, new))]
    ids = [{case.name(): case.id(study) for case in study.cases()} for study in studied]
    assert ids[0]["shards, ring, d2"] == ids[1]["shards, ring, d2"]
    assert ids[0]["shards, ring, dsgd"] != ids[1]["shards, ring, dsgd"]


@pytest.mark.parametrize("name", studies.shipped())
def test_shipped_studies_are_valid(name):
    assert studies.read(name).cases()


def test_arguments_of_simulate_are_those_of_simulate():
    assert set(file._ARGUMENTS) <= set(inspect.signature(simulate).parameters)


def test_the_quick_start_is_a_dozen_lines():
    path = pathlib.Path(studies.shipped()["quickstart"])
    assert sum(bool(line.strip()) for line in path.read_text().splitlines()) <= 14


def test_the_quick_start_is_that_of_the_example(tmp_path):
    """The same data, graphs and seeds as in examples/quickstart.py, after two epochs."""
    (outcome,) = studies.run(studies.read("quickstart").lasting(2), tmp_path, only=["D-Cliques"], progress=False)
    data = partitions.shards(datasets.mnist_5k(), 100, shards_per_node=2, seed=1)
    topology = topologies.d_cliques(data.label_distribution, clique_size=10, inter="fully_connected", seed=1)
    result = simulate(topology, data, epochs=2, progress=False)
    np.testing.assert_array_equal(outcome.result.history.accuracy[0], result.history.accuracy)


def test_metrics_of_a_study_are_columns(tmp_path):
    text = TEXT.replace("[grids]", '[metrics.classes]\nuse = "per_class_accuracy"\n[grids]')
    (outcome,) = studies.run(studies.parse(tomllib.loads(text)), tmp_path, only=["ring", "d2", "none"], progress=False)
    frame, measured = studies.load(tmp_path), outcome.result.history.extra["classes"]  # [seeds, t, nodes, classes]
    np.testing.assert_allclose(frame["classes_3"], measured.mean(axis=2)[..., 3].ravel(), rtol=1e-6)
    np.testing.assert_allclose(frame["classes_3_min"], measured.min(axis=2)[..., 3].ravel())


def test_a_case_of_which_all_values_diverge_is_kept_as_such(tmp_path, capsys):
    text = TEXT.replace("rate = [0.03, 0.3]", "rate = [1e38, 3e38]")
    arguments = {"only": ["ring", "dsgd", "none"], "progress": False}
    for resume in (False, True):
        with pytest.warns(RuntimeWarning) if not resume else contextlib.nullcontext():
            (outcome,) = studies.run(studies.parse(tomllib.loads(text)), tmp_path, resume=resume, **arguments)
        assert outcome.refused == "all values of its grids diverged: add smaller ones"
    swept = studies.parse(tomllib.loads(text.replace('tune = "rate"', 'sweep = "rate"')))
    with pytest.warns(RuntimeWarning):
        studies.run(swept, tmp_path / "swept", **arguments)
    assert "all diverged" in studies.report(tmp_path / "swept")


def test_only_what_an_algorithm_does_not_allow_is_called_impossible(tmp_path):
    text = TEXT.replace("batch_size = 10", "batch_size = 1000")
    with pytest.raises(ValueError, match="batch_size=1000"):
        studies.run(studies.parse(tomllib.loads(text)), tmp_path, only=["ring", "d2"], progress=False)
