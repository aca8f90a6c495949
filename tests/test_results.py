import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex

from dcliques_jax import datasets, partitions, plotting, simulate, topologies


@pytest.fixture(scope="module")
def result():
    data = partitions.shards(datasets.synthetic(num_train=200), 10)
    topology = topologies.d_cliques(data.label_distribution, clique_size=5)
    # NumPy integers are integers.
    return simulate(topology, data, epochs=np.int64(3), eval_nodes=np.int32(4), seed=np.int64(0), progress=False)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_plot_draws_the_mean_bold_and_the_extremes_thin(result):
    axes = result.plot(label="ours")
    mean, least, most = axes.lines
    percent = 100 * result.history.accuracy
    np.testing.assert_allclose(mean.get_ydata(), percent.mean(axis=1))
    np.testing.assert_allclose(least.get_ydata(), percent.min(axis=1))
    np.testing.assert_allclose(most.get_ydata(), percent.max(axis=1))
    np.testing.assert_allclose(mean.get_xdata(), [0, 1, 2, 3])
    assert mean.get_linewidth() > 3 * least.get_linewidth() == 3 * most.get_linewidth()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ours"]


def test_results_are_compared_in_one_picture(result):
    axes = plotting.plot_accuracy({"one": result, "two": result})
    assert result.plot(axes, label="three") is axes
    colours = [to_hex(line.get_color()).upper() for line in axes.lines]
    assert colours == [colour.upper() for colour in plotting.COLOURS[:3] for _ in range(3)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "two", "three"]
    with pytest.raises(ValueError, match="no result to draw"):
        plotting.plot_accuracy({})


def test_to_pandas_has_a_row_for_every_evaluation_and_node(result):
    frame = result.to_pandas()
    assert len(frame) == 4 * 4
    assert set(frame["node"]) == set(result.history.eval_nodes)
    row = frame[(frame["epoch"] == 2) & (frame["node"] == result.history.eval_nodes[3])].iloc[0]
    assert row["accuracy"] == result.history.accuracy[2, 3]
    assert row["loss"] == result.history.loss[2, 3]
    assert row["train_loss"] == result.history.train_loss[2, result.history.eval_nodes[3]]
    assert row["consensus_distance"] == result.history.consensus_distance[2]


def test_save_writes_everything_without_pickle(result, tmp_path):
    path = tmp_path / "run.npz"
    result.save(path)
    with np.load(path, allow_pickle=False) as saved:
        np.testing.assert_array_equal(saved["history/accuracy"], result.history.accuracy)
        np.testing.assert_array_equal(saved["params/Dense_0/kernel"], result.params["Dense_0"]["kernel"])
        np.testing.assert_array_equal(saved["topology/edges"], result.topology.edges)
        np.testing.assert_array_equal(saved["topology/clique_ids"], result.topology.clique_ids)
        np.testing.assert_array_equal(saved["topology/gradient_edges"], result.topology.gradient_edges)
        settings = json.loads(str(saved["settings"]))
    assert settings["topology"] == "D-Cliques (fully connected)"
    assert settings["rounds"] == 12
    assert settings["seed"] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]


def test_save_leaves_nothing_half_written(result, tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    path.write_bytes(b"before")

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        result.save(path)
    assert path.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 1


def test_it_prints_what_happened(result):
    assert repr(result).startswith("Result('D-Cliques (fully connected)', num_nodes=10, rounds=12, accuracy=0.")
    assert repr(result.history) == "History(evaluations=4, rounds=12, nodes=4, examples=200)"
