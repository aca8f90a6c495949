"""The experiments of the paper: all of them are built, run at tiny size and drawn; claims are judged both ways."""

import csv
import functools
import json
import os
import pathlib
import re
import runpy
import shutil

import numpy as np
import pytest

from dcliques_jax import datasets, paper, partitions
from dcliques_jax._studies import kept
from dcliques_jax._studies.cases import Builder
from dcliques_jax.paper import EXPERIMENTS, Experiment, Scale, claims
from dcliques_jax.paper.__main__ import main
from dcliques_jax.paper.claims import Curve, judged
from dcliques_jax.paper.found import all_found, runs_of
from dcliques_jax.paper.runs import Runs, SkewStudy
from dcliques_jax.paper.settings import TASKS, Setting, Task

GALLERY = pathlib.Path(__file__).parent.parent / "docs" / "gallery.py"
TINY_DATA = {"use": "synthetic", "num_train": 2000, "num_test": 40, "input_shape": [5], "seed": 1}
TINY = Scale({"mnist": 2, "cifar10": 2}, eval_every=1, experiments=2)
SETTINGS = {part.name: part for e in EXPERIMENTS.values() for part in e.parts.values() if isinstance(part, Setting)}


@pytest.fixture(autouse=True)
def _tiny_tasks(monkeypatch):
    """Two rounds an epoch on 1, 10 and 20 nodes."""
    for name, task in list(TASKS.items()):
        small = Task(task.title, TINY_DATA, {"use": "logistic_regression"}, task.learning_rate, batch_size=10)
        monkeypatch.setitem(TASKS, name, small)


def built(setting, dataset, seed):
    """The partition and the topology of a setting."""
    study = setting.study([seed])
    made = Builder(study, lambda: dataset).arguments(study.cases()[0], [seed], {})
    return made["dataset"][0], made["topology"][0]


def shrunk(setting):
    return setting._replace(task="mnist", num_nodes=min(setting.num_nodes, 20))


@pytest.fixture
def _shrunk_settings(monkeypatch):
    """Experiments of twenty nodes in the place of more."""
    monkeypatch.setattr(
        Experiment,
        "parts",
        property(lambda self: {label: shrunk(s) for panel in self.panels.values() for label, s in panel.items()}),
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_built_as_large_as_in_the_paper(name):
    setting = SETTINGS[name]
    labelled = datasets.synthetic(num_train=50_000, num_test=10, input_shape=(1,))
    data, topology = built(setting, labelled, seed=0)
    assert topology.num_nodes == data.num_nodes == setting.num_nodes
    assert len(set(data.sizes)) == 1
    if setting.averaging and setting.num_nodes > 1:
        assert topology.gradient_edges is not None
    if setting.removed_edges:
        _, whole = built(setting._replace(removed_edges=0), labelled, seed=0)
        removed = (topology.clique_ids.max() + 1) * setting.removed_edges
        assert len(whole.edges) - len(topology.edges) == removed


@pytest.mark.parametrize("setting", sorted({shrunk(s) for s in SETTINGS.values()}), ids=lambda s: s.name)
def test_every_setting_trains(setting, tmp_path):
    result = Runs(tmp_path, TINY, 2, until=1).measure(setting)
    assert result.history.round.tolist() == [0, 2]
    assert result.history.accuracy.shape == (2, 2, setting.num_nodes)
    assert result.history.loss[:, 1].mean() < result.history.loss[:, 0].mean()


def test_the_network_of_the_paper_trains(tmp_path, monkeypatch):
    images = {"use": "synthetic", "num_train": 400, "num_test": 20, "input_shape": [32, 32, 3]}
    monkeypatch.setitem(TASKS, "cifar10", Task("CIFAR-10", images, {"use": "gn_lenet"}, 0.002, 2))
    setting = EXPERIMENTS["d-cliques-cifar10"].parts["D-Cliques"]._replace(num_nodes=10)
    assert setting.batch_size == 20
    result = Runs(tmp_path, TINY, 1, until=1).measure(setting)
    assert result.provenance["model"] == "GNLeNet(num_classes=10)"
    assert result.history.round.tolist() == [0, 2]


def test_some_examples_of_one_task_and_all_of_another_are_evaluated(tmp_path):
    runs = Runs(tmp_path, TINY._replace(eval_examples={"cifar10": 7}), 1, until=1)
    found = {task: runs.measure(Setting(task, num_nodes=10)).history.eval_examples for task in TASKS}
    assert {task: examples.shape for task, examples in found.items()} == {"mnist": (1, 40), "cifar10": (1, 7)}


def test_batches_are_those_of_the_paper(monkeypatch):
    monkeypatch.undo()
    sizes = {(task, n): Setting(task, num_nodes=n).batch_size for task in TASKS for n in (1, 10, 100, 1000)}
    assert [sizes["mnist", n] for n in (1, 10, 100, 1000)] == [12_800, 1280, 128, 13]
    assert [sizes["cifar10", n] for n in (1, 10, 100, 1000)] == [2000, 200, 20, 2]


def test_balanced_iid_data_has_the_examples_of_one_class_data():
    dataset = datasets.synthetic(num_train=2000)
    iid, skewed = (make(dataset, 20, seed=3) for make in (partitions.balanced_iid, partitions.one_class))
    assert sorted(iid.indices.ravel()) == sorted(skewed.indices.ravel())
    assert (iid.label_counts > 0).sum(axis=1).min() > 5


def test_names_tell_settings_apart():
    parts = {part for experiment in EXPERIMENTS.values() for part in experiment.parts.values()}
    assert len({part.name for part in parts}) == len(parts)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_claims_are_about_what_is_run(name):
    experiment = EXPERIMENTS[name]
    assert experiment.claims
    asked = set()

    class Asked(dict):
        def __missing__(self, label):
            asked.add(label)
            return (
                Curve(np.arange(200.0), np.ones((2, 200, 2)))
                if isinstance(experiment, Experiment)
                else np.ones((2, 1001))
            )

    for claim in experiment.claims:
        assert claim.judge(Asked()).words != "cannot be told"
    assert asked <= set(experiment.parts)
    beside = set(experiment.beside) if isinstance(experiment, Experiment) else set()
    assert beside <= asked


@pytest.mark.parametrize("name", [name for name, e in EXPERIMENTS.items() if isinstance(e, Experiment)])
def test_quick_runs_are_long_enough_for_claims(name):
    experiment, epochs = EXPERIMENTS[name], paper.SCALES["quick"].epochs
    measured = {label: curve(*np.ones(epochs[part.task] + 1)) for label, part in experiment.parts.items()}
    untold = [claim.text for claim in experiment.claims if judged(claim, measured).words == "cannot be told"]
    assert all("at epoch 100" in text for text in untold)


# Claims, both ways


def curve(*means, band=0.0, seeds=2):
    accuracy = np.array(means, np.float64)[:, None] + band * np.array([-0.5, 0.5])
    return Curve(np.arange(len(means)) * 1.0, np.repeat(accuracy[None], seeds, axis=0))


def wide(band):
    return curve(1, 1, band=band)


@pytest.mark.parametrize(
    ("claim", "true", "false"),
    [
        (claims.within("a", "b", points=1, since=1), (curve(9, 50), curve(3, 50.5)), (curve(3, 3), curve(5, 5))),
        (claims.faster("a", "b"), (curve(9, 60, 80), curve(9, 50, 80)), (curve(9, 50, 80), curve(9, 60, 80))),
        (claims.faster("a", "b", by=2), (curve(0, 9), curve(0, 6)), (curve(0, 9), curve(0, 8))),
        (claims.narrower("a", "b"), (wide(1), wide(2)), (wide(2), wide(1))),
        (claims.narrower("a", "b", factor=3), (wide(1), wide(4)), (wide(1), wide(0))),
        (claims.no_wider("a", "b", points=1), (wide(2), wide(1.5)), (wide(2), wide(0))),
        (claims.reaches("a", 90, points=1, at=1), (curve(0, 89.5), None), (curve(0, 88), None)),
    ],
)  # fmt: skip
def test_claims_hold_or_do_not(claim, true, false):
    assert claim.judge(dict(zip("ab", true, strict=True))).holds is True
    assert claim.judge(dict(zip("ab", false, strict=True))).holds is False


def test_equal_curves_leave_a_claim_open():
    same = {"a": curve(0, 9, band=1), "b": curve(0, 9, band=1)}
    assert claims.faster("a", "b").judge(same).words == claims.narrower("a", "b").judge(same).words == "open"


def test_a_gain_is_held_against_another():
    curves = {"a": curve(0, 9), "b": curve(0, 5), "c": curve(0, 8), "d": curve(0, 6)}
    assert claims.gains_more(("a", "b"), ("c", "d")).judge(curves).holds is True
    assert claims.gains_more(("c", "d"), ("a", "b")).judge(curves).holds is False


def test_seeds_on_both_sides_of_a_number_reach_it():
    around = curve(0, 90, seeds=3)
    around.accuracy[:2, 1] += [[3], [-3]]
    verdict = claims.reaches("a", 90, points=1, at=1).judge({"a": around})
    assert (verdict.margin, verdict.words) == (1, "open")


@pytest.mark.parametrize(("claim", "broken"), [
    (claims.smaller_skew("x", most=0.1), [[0.5, 0.2, 0.2], [0.5, 0.2, 0.2]]),
    (claims.smaller_skew("x", most=0.1), [[0.5, 0.2, 0.0], [0.5, 0.6, 0.6]]),
    (claims.settles("x", steps=1), [[0.5, 0.4, 0.0], [0.5, 0.4, 0.0]]),
    (claims.harder("x", "y", since=1), [[0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]),
])  # fmt: skip
def test_claims_of_skew_hold_or_do_not(claim, broken):
    good, easy = np.array([[0.5, 0.05, 0.05], [0.4, 0.05, 0.05]]), np.array([[0.5, 0.01, 0.01], [0.4, 0.01, 0.01]])
    assert claim.judge({"x": good, "y": easy}).holds is True
    assert claim.judge({"x": np.array(broken), "y": easy}).holds is False


def test_what_was_not_run_long_enough_cannot_be_told():
    short = {"a": curve(1, 2), "b": curve(1, 2)}
    assert claims.within("a", "b", points=1, since=10).judge(short).holds is None
    assert claims.reaches("a", 90, points=1, at=100).judge(short).holds is None
    assert str(judged(claims.faster("a", "c"), short)) == "cannot be told: c was not run"


def test_skews_are_compared_on_the_experiments_that_both_data_sets_have():
    many, few = np.full((5, 3), 0.5), np.full((2, 3), 0.1)
    many[2:] = 0
    assert claims.harder("x", "y", since=1).judge({"x": many, "y": few}).holds is True


def test_untrained_models_are_not_judged():
    early, late = (Curve(np.array(epoch), np.ones((1, 2, 2))) for epoch in ([0.0, 1.0], [0.0, 5.0]))
    for claim in (claims.faster("a", "b"), claims.narrower("a", "b"), claims.gains_more(("a", "b"), ("a", "b"))):
        assert str(judged(claim, {"a": early, "b": late})) == "cannot be told: not run long enough"


def test_seeds_are_counted():
    a, b = curve(0, 9, seeds=2), curve(0, 8, seeds=2)
    a.accuracy[1] -= 1.5
    verdict = claims.faster("a", "b").judge({"a": a, "b": b})
    assert "(1 of 2 seeds)" in verdict.numbers
    assert verdict.words == "open"
    assert (verdict.margin, verdict.error) == (0.25, 0.75)  # margins of 1 and -0.5


def on_images(right, images=None):
    """The curve of one node that is right on some images at epochs 1, 2, ..., `[seeds, t, images]`, and none at 0."""
    right = 100.0 * np.concatenate([np.zeros_like(right)[:, :1], right], axis=1)
    images = np.tile(np.arange(right.shape[2]), (len(right), 1)) if images is None else images
    mean = right.mean(axis=2)
    return Curve(np.arange(right.shape[1]) * 1.0, mean[:, :, None], right, images, mean)


def test_errors_are_those_of_paired_images_and_seeds():
    """Against the formula, written out with loops."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(2, size=(3, 4, 50)) for _ in range(2))
    verdict = claims.faster("a", "b").judge({"a": on_images(a), "b": on_images(b)})
    lead = [[100 * np.mean([a[s, t, i] - b[s, t, i] for t in range(4)]) for i in range(50)] for s in range(3)]
    of_seeds = [np.mean(lead[s]) for s in range(3)]
    of_images = [np.mean([lead[s][i] for s in range(3)]) for i in range(50)]
    assert verdict.margin == pytest.approx(np.mean(of_seeds))
    assert verdict.error == pytest.approx(np.sqrt(np.var(of_seeds, ddof=1) / 3 + np.var(of_images, ddof=1) / 50))
    # Samples of which two have half of their images in common.
    images = np.stack([np.arange(50), np.arange(25, 75), [*range(25), *range(50, 75)]])
    apart = claims.faster("a", "b").judge({"a": on_images(a, images), "b": on_images(b, images)})
    within = np.mean([np.var(lead[s], ddof=1) for s in range(3)])
    assert apart.error == pytest.approx(np.sqrt(np.var(of_seeds, ddof=1) / 3 + within / 50 / 2))


# [seeds, images] that three seeds are evaluated on, of 120: the same, others, or some in common
SAMPLES = {
    "same": np.tile(np.arange(40), (3, 1)),
    "disjoint": np.arange(120).reshape(3, 40),
    "overlapping": np.stack([np.arange(40), np.arange(20, 60), [*range(20), *range(40, 60)]]),
}


def experiments(count, sample, *, of_seeds, of_images, of_both):
    """Verdicts on a true margin of 0 with effects of seeds, of images and of both, which have these deviations."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        lead = of_seeds * rng.normal(size=(3, 1)) + of_images * rng.normal(size=120)[SAMPLES[sample]]
        lead = lead + of_both * rng.normal(size=(3, 40))
        a, b = (on_images(values[:, None] / 100, SAMPLES[sample]) for values in (lead, np.zeros((3, 40))))
        yield claims.faster("a", "b").judge({"a": a, "b": b})


@pytest.mark.parametrize("sample", SAMPLES)
def test_errors_are_as_large_as_margins_vary(sample):
    found = list(experiments(1500, sample, of_seeds=1, of_images=8, of_both=3))
    known = np.std([verdict.margin for verdict in found])
    assert np.sqrt(np.mean([verdict.error**2 for verdict in found])) == pytest.approx(known, rel=0.1)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("of_seeds", [0, 1, 2, 4])
def test_chance_seldom_gives_a_verdict(sample, of_seeds):
    """With no true difference, three seeds say that there is one in at most about 5 of 100 cases."""
    found = experiments(600, sample, of_seeds=of_seeds, of_images=6, of_both=6)
    assert np.mean([verdict.holds is not None for verdict in found]) < 0.07


def test_chance_gives_a_verdict_in_5_of_100_cases():
    rng = np.random.default_rng(0)
    told = 0
    for _ in range(600):
        a, b = (curve(0, 0, seeds=3)._replace(accuracy=rng.normal(size=(3, 2, 1))) for _ in range(2))
        told += claims.faster("a", "b").judge({"a": a, "b": b}).holds is not None
    assert told / 600 == pytest.approx(0.05, abs=0.03)


@pytest.mark.parametrize("seeds", [1, 3])
def test_chance_seldom_refutes_what_holds_at_every_evaluation(seeds):
    """The largest of twenty gaps is larger than the true one, here as large as the claim allows."""
    rng = np.random.default_rng(0)
    claim, refuted = claims.within("a", "b", points=3, since=1), 0
    for _ in range(200):
        values = rng.normal(size=(2, seeds, 20, 50)) / 10 + [[[[0.03]]], [[[0]]]]
        a, b = map(on_images, values)
        refuted += claim.judge({"a": a, "b": b}).holds is False
    assert refuted / 200 < 0.07


def test_one_evaluation_refutes_a_claim_about_all():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 1, 20, 500)) / 10
    a[0, 7] += 0.06  # six points more
    claim = claims.within("a", "b", points=3, since=1)
    verdict = claim.judge({"a": on_images(a), "b": on_images(b)})
    assert verdict.holds is False
    assert verdict.margin == pytest.approx(-3, abs=2)


def test_a_claim_about_all_evaluations_holds_at_each():
    """The last gap is the largest and has no error; at others seeds differ by more than the claim allows."""
    a, b = curve(0, 0, 0, 0.5, seeds=3), curve(0, 0, 0, 0, seeds=3)
    a.accuracy[0, 1:3] += [[2], [-2]]
    a.accuracy[1, 1:3] -= [[2], [-2]]
    verdict = claims.within("a", "b", points=1, since=1).judge({"a": a, "b": b})
    assert (verdict.margin, verdict.words) == (0.5, "open")


def test_the_mean_gap_of_three_seeds_refutes_a_claim_about_all():
    """Each evaluation alone would need an error of a twentieth of its margin."""
    rng = np.random.default_rng(0)
    a, b = curve(*[0] * 20, seeds=3), curve(*[0] * 20, seeds=3)
    a.accuracy[:] += 5 + rng.normal(size=(3, 20, 1)) / 2
    verdict = claims.within("a", "b", points=3, since=1).judge({"a": a, "b": b})
    assert verdict.holds is False
    assert "5.0" in verdict.numbers


def test_chance_seldom_gives_a_gap_of_seeds_that_lead_in_turn():
    """Curves of three seeds are 2 points apart, now this way and now that way: their means are not."""
    a, b = curve(0, 2, -2, seeds=3), curve(0, 0, 0, seeds=3)
    a.accuracy[0] *= -1
    verdict = claims.within("a", "b", points=1, since=1).judge({"a": a, "b": b})
    assert verdict.margin == pytest.approx(1 - 2 / 3)


def test_what_is_hard_for_both_cancels():
    hard = np.arange(100) < 50
    a = np.tile(~hard, (1, 1, 1)).astype(int)
    b = a.copy()
    b[0, 0, 99] = 0  # one image less
    paired = claims.faster("a", "b").judge({"a": on_images(a), "b": on_images(b)})
    assert (paired.margin, paired.error) == (pytest.approx(1), pytest.approx(1))  # 5 without the pairing
    other = on_images(b, np.arange(100)[None] + 1)
    told = str(judged(claims.faster("a", "b"), {"a": on_images(a), "b": other}))
    assert told == "cannot be told: not evaluated on the same test examples"


@pytest.mark.parametrize("claim", [
    claims.within("a", "b", points=5, since=1),
    claims.reaches("a", 50, points=5, at=1),
    claims.gains_more(("a", "b"), ("b", "a")),
])  # fmt: skip
def test_errors_shrink_with_the_number_of_images(claim):
    rng = np.random.default_rng(0)
    errors = []
    for count in (100, 10_000):
        curves = {name: on_images(rng.integers(2, size=(1, 2, count))) for name in "ab"}
        errors.append(claim.judge(curves).error)
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.2)


def test_bands_of_one_seed_are_open():
    one, other = curve(1, 1, band=1, seeds=1), curve(1, 1, band=4, seeds=1)
    verdict = claims.narrower("a", "b").judge({"a": one, "b": other})
    assert (verdict.words, verdict.margin, verdict.error) == ("open", 3, None)
    assert str(verdict) == "open: band of 1.00 against 4.00 points (1 of 1 seed); margin 3.00"


def test_a_seed_with_several_initial_models_counts_once():
    a, b = curve(0, 9, seeds=4), curve(0, 0, seeds=4)
    a.accuracy[:, 1] += np.array([[0], [2], [4], [6]])
    runs = [(3, "averaged"), (3, "shared"), (5, "averaged"), (5, "shared")]
    a, b = a._replace(runs=runs), b._replace(runs=runs)
    verdict = claims.faster("a", "b").judge({"a": a, "b": b})
    assert (verdict.margin, verdict.error) == (12, 2)  # seeds with margins of 10 and 14
    one = {name: each._replace(runs=[(3, init) for init in "wxyz"]) for name, each in (("a", a), ("b", b))}
    assert claims.narrower("a", "b").judge(one).error is None


def test_mean_models_are_told_beside_the_mean_of_models():
    a, b = on_images(np.ones((2, 2, 10), int)), on_images(np.zeros((2, 2, 10), int))
    verdict = claims.faster("a", "b").judge({"a": a, "b": b._replace(mean_model=b.mean_model + 7)})
    assert "100.0 (mean model 100.0) against 0.0 (mean model 7.0) at epoch 2" in verdict.numbers


def test_curves_are_compared_on_the_seeds_that_both_have():
    a, b = curve(0, 9, seeds=3), curve(0, 8, seeds=2)
    a.accuracy[1:] += 5
    a, b = a._replace(runs=[("x",), ("y",), ("z",)]), b._replace(runs=[("z",), ("x",)])
    b.accuracy[0] += 3  # z
    verdict = claims.faster("a", "b").judge({"a": a, "b": b})
    assert (verdict.margin, verdict.numbers[-14:]) == (2, "(2 of 2 seeds)")  # 1 for x and 3 for z
    other = b._replace(runs=[("u",), ("v",)])
    assert str(judged(claims.faster("a", "b"), {"a": a, "b": other})).startswith(
        "cannot be told: not run with the same"
    )


def test_curves_are_compared_where_both_were_evaluated():
    often = Curve(np.arange(11.0), np.linspace([0, 0], [100, 100], 11).T[:, :, None])
    rarely = Curve(np.array([0.0, 5, 10]), np.array([[0.0, 50, 100]] * 2)[:, :, None])
    assert claims.within("a", "b", points=0.1, since=0).judge({"a": often, "b": rarely}).holds is True
    assert claims.faster("a", "b").judge({"a": often, "b": rarely}).margin == 0
    # A gain of 4 after one epoch is more than one of 1, whatever the other becomes in the tenth.
    curves = {"a": curve(0, 9), "b": curve(0, 5), "c": curve(0, 8, *[99] * 9), "d": curve(0, 7, *[1] * 9)}
    assert claims.gains_more(("a", "b"), ("c", "d")).judge(curves).holds is True


# Folders


@pytest.mark.usefixtures("_shrunk_settings")
def test_an_experiment_leaves_everything_behind(tmp_path):
    outcome = paper.run("clique-averaging-mnist", scale=TINY, seeds=2, out=tmp_path, progress=False)
    folder = tmp_path / "clique-averaging-mnist"
    assert outcome.folder == folder
    assert list(outcome.measured) == ["with Clique Averaging", "without"]
    config = json.loads((folder / "config.json").read_text())
    assert config["versions"]["dcliques_jax"]
    assert config["parts"]["without"]["seeds"] == [0, 1]
    rows = list(csv.DictReader((folder / "summary.csv").read_text().splitlines()))
    assert len(rows) == 2 * 2 * 3  # curves, seeds, evaluations
    accuracy = outcome.measured["without"].history.accuracy
    last = [row for row in rows if row["curve"] == "without" and row["seed"] == "1"][-1]
    assert float(last["mean"]) == pytest.approx(accuracy[1, -1].mean(), abs=1e-5)
    assert float(last["min"]) == pytest.approx(accuracy[1, -1].min(), abs=1e-5)
    for picture in ("figure.png", "figure.svg"):
        assert 1000 < (folder / picture).stat().st_size < 150_000
    assert not list(tmp_path.glob("runs/*/checkpoint"))
    assert str(outcome).count("\n") == 1 + 2 * 2


@pytest.mark.usefixtures("_shrunk_settings")
def test_finished_parts_are_not_run_again(tmp_path, monkeypatch):
    first = paper.run("clique-averaging-mnist", scale=TINY, out=tmp_path, progress=False)
    monkeypatch.setattr(kept, "simulate", None)
    again = paper.run("clique-averaging-mnist", scale=TINY, out=tmp_path, progress=False)
    assert again.verdicts == first.verdicts
    # Another experiment shares one of the two settings.
    shared = paper.EXPERIMENTS["greedy-swap-mnist"].parts["Greedy Swap"]
    assert Runs(tmp_path, TINY, 1).found(shared).history.epoch[-1] == 2
    with pytest.raises(TypeError):
        paper.run("clique-averaging-mnist", scale=TINY, seeds=2, out=tmp_path, progress=False)


@pytest.mark.usefixtures("_shrunk_settings")
def test_an_interrupted_experiment_goes_on_bit_for_bit(tmp_path):
    whole = paper.run("greedy-swap-mnist", scale=TINY, out=tmp_path / "whole", progress=False)
    arguments = {"name": "greedy-swap-mnist", "scale": TINY, "out": tmp_path / "parts", "progress": False}
    half = paper.run(**arguments, until=1)
    assert half.measured["Greedy Swap"].history.epoch.tolist() == [0, 1]
    assert "Epochs run: 1 of 2; seeds: 1; nodes evaluated: 20 of 20; test examples: 40; " in str(half)
    assert half.markdown().count("so far") == 1  # a band of one seed is open
    assert "so far" not in whole.markdown()
    with pytest.raises(ValueError, match=r"holds an unfinished run: .* --resume"):
        paper.run(**arguments)
    resumed = paper.run(**arguments, resume=True)
    for label, result in whole.measured.items():
        np.testing.assert_array_equal(resumed.measured[label].history.accuracy, result.history.accuracy)
        np.testing.assert_array_equal(resumed.measured[label].history.loss, result.history.loss)
    ended, stopped = (each.measured["Greedy Swap"].provenance["seconds"] for each in (resumed, half))
    assert ended > stopped


@pytest.mark.usefixtures("_shrunk_settings")
def test_results_of_other_data_are_refused_and_nothing_is_hidden(tmp_path):
    arguments = {"name": "clique-averaging-mnist", "scale": TINY, "out": tmp_path, "progress": False, "until": 1}
    first = paper.run(**arguments)
    other = datasets.synthetic(num_train=2000, num_test=40, input_shape=(5,), seed=2)
    with pytest.raises(ValueError, match=r"results of another run: dataset_checksum was .* choose another --out"):
        paper.run(**arguments, datasets={"mnist": other})
    with pytest.raises(ValueError, match="--resume"):
        paper.run(**arguments | {"until": 2})
    (again,) = (outcome for outcome in paper.report(tmp_path) if outcome.name == first.name)
    assert again.verdicts == first.verdicts
    assert json.loads((again.folder / "config.json").read_text())["until"] == 1


@pytest.mark.usefixtures("_shrunk_settings")
@pytest.mark.parametrize("eval_examples", [None, {"mnist": 7}])
def test_what_diverges_is_a_result(tmp_path, monkeypatch, eval_examples):
    monkeypatch.setitem(TASKS, "mnist", TASKS["mnist"]._replace(learning_rate=1e38))
    scale = TINY._replace(eval_examples=eval_examples)
    with pytest.warns(RuntimeWarning, match="non-finite"):
        outcome = paper.run("greedy-swap-mnist", scale=scale, out=tmp_path, progress=False)
    assert all(result.history.epoch[-1] == 2 for result in outcome.measured.values())


def test_a_corrupt_study_is_named(tmp_path):
    runs = Runs(tmp_path, TINY, 1)
    runs.measure(SkewStudy("mnist"))
    (file,) = tmp_path.glob("runs/*/measured.npz")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"is corrupt .* remove it to measure again"):
        runs.found(SkewStudy("mnist"))


def test_no_flipped_bit_changes_a_number(tmp_path):
    rng, runs = np.random.default_rng(0), Runs(tmp_path, TINY, 1)
    skew = runs.measure(SkewStudy("mnist"))
    (path,) = tmp_path.glob("runs/*/measured.npz")
    content = path.read_bytes()
    for place in rng.integers(len(content), size=100):
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << rng.integers(8)
        path.write_bytes(spoilt)
        told = None
        try:
            np.testing.assert_array_equal(runs.found(SkewStudy("mnist")), skew)
        except ValueError as error:
            told = str(error)
        assert told is None or str(path) in told


@pytest.mark.usefixtures("_shrunk_settings")
def test_a_kill_leaves_no_file_half_written(tmp_path, monkeypatch):
    """All files of a report are there as they were, or as they become."""
    arguments = {"name": "clique-averaging-mnist", "scale": TINY, "out": tmp_path, "progress": False}
    paper.run(**arguments)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in before} >= {"figure.png", "figure.svg", "summary.csv", "config.json", "measured.npz"}

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)  # when everything is written, but not yet in its place
    for again in (lambda: paper.run(**arguments), lambda: paper.report(tmp_path)):
        with pytest.raises(KeyboardInterrupt):
            again()
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("_shrunk_settings")
def test_all_that_was_run_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(paper.SCALES, "quick", TINY)
    broken = main(["run", "clique-averaging-mnist", "skew-steps", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    # A part that is missing does not hide the rest.
    gone = Runs(tmp_path, TINY, 1).folder(paper.EXPERIMENTS["clique-averaging-mnist"].parts["without"])
    (gone / "measured.npz").unlink()
    assert main(["report", str(tmp_path)]) in (0, 1)
    report = capsys.readouterr().out
    assert "clique-averaging-mnist (Figure 6)" in told
    assert broken == ("DOES NOT HOLD" in told)
    assert "cannot be told: without was not run" in report
    assert "claims hold" in report
    page = (tmp_path / "report.md").read_text()
    assert "![MNIST: Clique Averaging" in page
    assert "| ? |  | without was not run |" in page


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_figure_is_drawn(name, tmp_path_factory):
    import matplotlib.pyplot as plt

    experiment = EXPERIMENTS[name]
    if isinstance(experiment, Experiment):
        result = drawn_result(tmp_path_factory.getbasetemp())
        figure = paper.figures.draw(experiment, dict.fromkeys(experiment.parts, result))
        lines = [len(ax.get_legend_handles_labels()[1]) for ax in figure.axes] if figure else []
        assert lines == [len(curves) for curves in experiment.panels.values()]
        assert all(ax.get_ylim()[0] < ax.get_ylim()[1] for ax in (figure.axes if figure else []))
    else:
        figure = paper.figures.draw(experiment, dict.fromkeys(experiment.parts, np.linspace(1, 0, 2002).reshape(2, -1)))
        assert all(ax.get_legend() for ax in figure.axes)
    plt.close("all")


@functools.cache
def drawn_result(folder):
    return Runs(folder, TINY, 1, until=1).measure(shrunk(SETTINGS["mnist-shards-100-ring-dsgd"]))


def test_the_stated_numbers_are_met(tmp_path):
    outcome = paper.run("numbers", out=tmp_path)
    assert all(verdict.holds for verdict in outcome.verdicts.values())
    assert len(outcome.verdicts) == 7


@pytest.fixture
def gallery(tmp_path):
    """A function that puts folders of results into a gallery, and the gallery."""
    folder = tmp_path / "gallery"
    folder.mkdir()
    (folder / "report.md").write_text("## skew-steps\n\nKept.\n\n## numbers\n\nOld.\n\n## iid-vs-skew\n\nKept, too.\n")
    return functools.partial(runpy.run_path(str(GALLERY))["main"], gallery=folder), folder


def test_the_gallery_keeps_what_was_not_run_again(tmp_path, gallery):
    put, folder = gallery
    runs = Runs(tmp_path, TINY, 1)
    runs.measure(SkewStudy("mnist"))
    put([tmp_path])
    report = (folder / "report.md").read_text()
    headings = re.findall("^## (.*)$", report, re.MULTILINE)
    assert headings == ["numbers", "iid-vs-skew", "skew-histogram", "skew-steps"]  # as in the paper
    assert "Old." not in report  # it needs no runs
    assert report.endswith("## skew-steps\n\nKept.\n")  # CIFAR-10's curve is missing
    assert "\n\n## iid-vs-skew\n\nKept, too.\n\n" in report
    assert "](skew-histogram.png)" in report
    assert [path.name for path in folder.glob("*.png")] == ["skew-histogram.png"]
    runs.measure(SkewStudy("cifar10"))
    put([tmp_path])
    assert "Kept.\n" not in (folder / "report.md").read_text()
    assert sorted(path.name for path in folder.glob("*.png")) == ["skew-histogram.png", "skew-steps.png"]


@pytest.mark.usefixtures("_shrunk_settings")
def test_the_gallery_holds_what_its_report_needs(tmp_path, gallery):
    put, folder = gallery
    scale = TINY._replace(eval_examples={"mnist": 30})
    outcome = paper.run("clique-averaging-mnist", scale=scale, seeds=2, out=tmp_path / "results", progress=False)
    put([tmp_path / "results"])
    page = outcome.markdown().replace("clique-averaging-mnist/figure.png", "clique-averaging-mnist.png")
    assert page.strip() in (folder / "report.md").read_text()
    final = outcome.measured["without"].provenance["final"]
    last = " | ".join(f"{100 * final[name][1]:.1f}" for name in ("accuracy", "accuracy_min", "mean_model_accuracy"))
    assert f"| without | 1 | 2 | {last} |" in page
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    put([])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("_shrunk_settings")
def test_the_gallery_keeps_runs_that_went_on_for_longer(tmp_path, gallery):
    put, folder = gallery
    for name, until in (("whole", None), ("part", 1)):
        paper.run("clique-averaging-mnist", scale=TINY, out=tmp_path / name, progress=False, until=until)
        put([tmp_path / name])
    assert "Epochs run: 1 of 2; " not in (folder / "report.md").read_text()


@pytest.mark.usefixtures("_shrunk_settings")
def test_runs_that_are_reported_are_told_apart(tmp_path):
    scale = TINY._replace(eval_examples={"mnist": 30})
    with_averaging, without = paper.EXPERIMENTS["clique-averaging-mnist"].parts.values()
    for setting, seed, init in [(with_averaging, 0, "shared"), (with_averaging, 1, "averaged"), (without, 0, "shared")]:
        Runs(tmp_path, scale, 1, first_seed=seed, init=init).measure(setting)
    Runs(tmp_path, scale._replace(epochs={"mnist": 1}), 1).measure(without)
    (outcome,) = (found for found in paper.report(tmp_path) if found.name == "clique-averaging-mnist")
    page = outcome.markdown()
    assert "seeds: 1, 2; " in page
    assert "some initial models: averaged; runs left out, which were shorter or evaluated otherwise: 1." in page
    rows = re.findall(r"^\| (with[a-zA-Z ]*) \| ([a-z0-9, ]*) \| 2 \|", page, re.MULTILINE)
    assert rows == [("with Clique Averaging", "0"), ("with Clique Averaging", "1, averaged"), ("without", "0")]
    assert page.count(" of 1 seed)") == 2


def test_the_published_report_is_that_of_the_published_results(tmp_path, monkeypatch):
    monkeypatch.undo()
    shutil.copytree(GALLERY.parent / "paper" / "results", tmp_path / "results")
    published = (GALLERY.parent / "paper" / "report.md").read_text()
    whole = runpy.run_path(str(GALLERY))["whole"]
    outcomes = [outcome for outcome in paper.report(tmp_path / "results") if whole(outcome)]
    assert {outcome.name for outcome in outcomes} >= {name for name in EXPERIMENTS if "cifar10" not in name}
    for outcome in outcomes:
        page = outcome.markdown().replace(f"({outcome.name}/figure.png)", f"({outcome.name}.png)")
        assert page.strip() in published


def test_skews_are_studied_in_many_experiments(tmp_path):
    skews = Runs(tmp_path, TINY, 1).measure(SkewStudy("mnist"))
    assert skews.shape == (2, 1001)
    assert (skews[:, -1] < skews[:, 0]).all()


def test_all_experiments_are_listed(capsys):
    assert main(["list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(EXPERIMENTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "numbers", "figure-99"], "NAME='figure-99' is unknown"),
        (["run", "numbers", "--seeds", "0"], "seeds=0"),
        (["run", "numbers", "--until", "0"], "until=0"),
        (["run", "numbers", "--eval-every", "0"], "eval_every=0"),
        (["run", "numbers", "--eval-examples", "0"], "eval_examples=0"),
        (["report", "nowhere"], "nowhere holds no results"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# What paired comparisons need


def test_finished_runs_are_evaluated_on_all_test_examples(tmp_path):
    setting, scale = Setting("mnist", num_nodes=10), TINY._replace(eval_examples={"mnist": 7})
    runs = Runs(tmp_path, scale, 2, first_seed=3, init="averaged")
    result = runs.measure(setting)
    assert result.provenance["seeds"] == [3, 4]
    assert result.provenance["init"] == "averaged"
    with np.load(runs.folder(setting) / "final.npz") as final:
        assert final["nodes_right"].shape == (2, 40)
        np.testing.assert_allclose(final["nodes_right"].sum(axis=1) / 400, final["accuracy"].mean(axis=1), rtol=1e-6)
        seen = np.take_along_axis(final["nodes_right"], result.history.eval_examples, axis=1)
    np.testing.assert_array_equal(seen, result.history.nodes_right[:, -1])


def test_runs_of_other_initial_models_are_kept_apart(tmp_path):
    shared, averaged = (Runs(tmp_path, TINY, 1, init=init) for init in ("shared", "averaged"))
    assert shared.folder(Setting("mnist")) != averaged.folder(Setting("mnist"))


def test_seeds_run_one_by_one_are_reported_together(tmp_path):
    apart, at_once, setting = tmp_path / "apart", tmp_path / "at once", Setting("mnist", num_nodes=10)
    Runs(at_once, TINY, 2).measure(setting)
    Runs(apart, TINY, 1).measure(setting)
    Runs(apart, TINY, 1, first_seed=1).measure(setting)
    one, other = (all_found(folder)[setting.name] for folder in (at_once, apart))
    assert runs_of(one) == runs_of(other) == [(0, "shared"), (1, "shared")]
    np.testing.assert_allclose(one.history.accuracy, other.history.accuracy, atol=1e-6)
    np.testing.assert_array_equal(one.history.eval_examples, other.history.eval_examples)
    assert other.provenance["seconds"] > 0


def test_the_longest_runs_are_reported_and_no_seed_twice(tmp_path):
    setting = Setting("mnist", num_nodes=10)
    long, sampled = TINY._replace(epochs={"mnist": 3}), TINY._replace(eval_examples={"mnist": 7})
    for scale, seed, init in [(TINY, 0, "shared"), (TINY, 1, "shared"), (long, 0, "averaged"), (long, 0, "shared")]:
        Runs(tmp_path, scale, 1, first_seed=seed, init=init).measure(setting)
    Runs(tmp_path, sampled, 1, first_seed=2).measure(setting)
    found = all_found(tmp_path)[setting.name]
    assert found.history.epoch[-1] == 3
    assert runs_of(found) == [(0, "averaged"), (0, "shared")]
    assert found.provenance["left_out"] == 3
    other = datasets.synthetic(num_train=2000, num_test=40, input_shape=(5,), seed=2)
    Runs(tmp_path / "other", long, 1, first_seed=3, datasets={"mnist": other}).measure(setting)
    shutil.copytree(tmp_path / "other", tmp_path, dirs_exist_ok=True)
    Runs(tmp_path, long, 2).measure(setting)
    assert runs_of(all_found(tmp_path)[setting.name]) == [(0, "averaged"), (0, "shared"), (1, "shared")]
