import contextlib
import dataclasses
import errno
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
import zipfile

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

import catalogue
from dcliques_jax import Result, algorithms, datasets, partitions, plotting, simulate, topologies


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
    assert mean.get_linewidth() > 2 * least.get_linewidth() == 2 * most.get_linewidth()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ours", "min and max over nodes"]


def test_results_are_compared_in_one_picture(result):
    axes = plotting.plot_accuracy({"one": result, "two": result})
    assert result.plot(axes, label="three") is axes
    colours = [to_hex(line.get_color()).upper() for line in axes.lines]
    assert colours == [colour.upper() for colour in plotting.COLOURS[:3] for _ in range(3)]
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["one", "two", "three", "min and max over nodes"]
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


def assert_same(one, two):
    assert one.provenance == two.provenance
    assert repr(one) == repr(two)
    for name, values in vars(one.history).items():
        np.testing.assert_array_equal(values, getattr(two.history, name), err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, one.params, two.params)


def test_saved_and_loaded_it_is_the_same(result, tmp_path):
    path = tmp_path / "run.npz"
    result.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["run.npz"]
    loaded = Result.load(path)
    assert_same(result, loaded)
    for name in ("num_nodes", "name", "edges", "clique_ids", "gradient_edges"):
        np.testing.assert_array_equal(getattr(loaded.topology, name), getattr(result.topology, name), err_msg=name)
    assert loaded.to_pandas().equals(result.to_pandas())
    assert loaded.state is None
    with np.load(path, allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["params/Dense_0/kernel"], result.params["Dense_0"]["kernel"])


@pytest.mark.parametrize("name", catalogue.WITH_MATRICES)
def test_matrices_directions_and_draws_are_saved_and_loaded(name, result, tmp_path):
    p = catalogue.PARTITIONS["shards"](catalogue.dataset(), catalogue.NODES).label_distribution
    topology = catalogue.TOPOLOGIES[name](p)
    about = result.provenance | {"num_nodes": catalogue.NODES}
    dataclasses.replace(result, topology=topology, provenance=about).save(tmp_path / "run.npz")
    loaded = Result.load(tmp_path / "run.npz").topology
    assert repr(loaded) == repr(topology)
    assert loaded.drawn == topology.drawn
    np.testing.assert_array_equal(loaded.edges, topology.edges)
    assert (loaded.arcs is None) == (topology.arcs is None)
    for one, other in zip(loaded.weights().matrices(), topology.weights().matrices(), strict=True):
        np.testing.assert_array_equal(one.toarray(), other.toarray())


def test_results_of_several_seeds_are_saved_and_loaded(tmp_path):
    data, graphs = datasets.synthetic(num_train=200), [topologies.ring(10), topologies.fully_connected(10)]
    result = simulate(graphs, data, seeds=[5, 6], eval_nodes=3, epochs=2, progress=False)
    result.save(tmp_path / "runs.npz")
    loaded = Result.load(tmp_path / "runs.npz")
    assert_same(result, loaded)
    assert [graph.name for graph in loaded.topology] == ["ring", "fully connected"]
    frame = loaded.to_pandas()
    assert len(frame) == 2 * 3 * 3
    row = frame[(frame["seed"] == 6) & (frame["epoch"] == 1)].iloc[2]
    assert row["node"] == result.history.eval_nodes[1, 2]
    assert row["accuracy"] == result.history.accuracy[1, 1, 2]
    assert row["train_loss"] == result.history.train_loss[1, 1, int(row["node"])]
    assert row["consensus_distance"] == result.history.consensus_distance[1, 1]
    assert repr(result.history) == "History(runs=2, evaluations=3, rounds=8, nodes=3, examples=200)"
    assert repr(result).startswith("Result('ring', num_nodes=10, seeds=2, rounds=8, accuracy=0.")


@given(st.binary(max_size=300), st.integers(0, 10_000), st.booleans())
def test_whatever_is_in_a_file_loading_it_gives_a_result_or_a_value_error(saved_bytes, junk, place, cut):
    place %= len(saved_bytes)
    content = saved_bytes[:place] + junk + (b"" if cut else saved_bytes[place + len(junk) :])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run.npz"
        path.write_bytes(content)
        with contextlib.suppress(ValueError):
            assert isinstance(Result.load(path), Result)


@pytest.fixture(scope="module")
def saved_bytes(result, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run.npz"
    result.save(path)
    return path.read_bytes()


def test_odd_parameters_are_saved_or_refused(result, tmp_path):
    path = tmp_path / "run.npz"
    half = dataclasses.replace(result, params=[jnp.ones(3, jnp.bfloat16), {"b": jnp.zeros(2)}])
    half.save(path)
    loaded = Result.load(path).params
    np.testing.assert_array_equal(loaded["0"], np.ones(3, np.float32))
    np.testing.assert_array_equal(loaded["1"]["b"], np.zeros(2))
    with pytest.raises(ValueError, match=r"names must not contain '/': \['a/b'\]"):
        dataclasses.replace(result, params={"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}).save(path)


class Burglar:
    def __reduce__(self):
        return (pytest.fail, ("code in a file was run",))


def test_loading_never_runs_code(tmp_path):
    for name, content in {"array.npz": {"about": np.array([Burglar()], object)}, "empty.npz": {}}.items():
        np.savez(tmp_path / name, **content)
        with pytest.raises(ValueError, match=r"is not what Result\.save writes, or it is corrupt"):
            Result.load(tmp_path / name)
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Burglar()))
    with pytest.raises(ValueError, match=r"is not what Result\.save writes, or it is corrupt"):
        Result.load(tmp_path / "pickle.npz")
    with pytest.raises(FileNotFoundError):
        Result.load(tmp_path / "missing.npz")


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


def test_no_flipped_bit_changes_a_number(result, saved_bytes, tmp_path):
    rng, path, refused = np.random.default_rng(0), tmp_path / "run.npz", 0
    places = [*rng.integers(len(saved_bytes), size=300), *rng.integers(1, 3000, size=300) * -1]  # many names are last
    for place in places:
        content = bytearray(saved_bytes)
        content[place] ^= 1 << rng.integers(8)
        path.write_bytes(content)
        try:
            loaded = Result.load(path)
        except ValueError as error:
            refused += str(path) in str(error)
        else:
            assert_same(loaded, result)
            refused += 1
    assert refused == len(places)


def test_bombs_are_refused_before_they_take_memory(result, saved_bytes, tmp_path):
    path, size = tmp_path / "bomb.npz", 400_000_000
    path.write_bytes(saved_bytes)
    header = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    header += f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}".encode().ljust(117) + b"\n"
    bombs = {
        "an array more": lambda archive: compress(archive, "params/bomb", header, size),
        "an array that is not there": lambda archive: archive.writestr("params/bomb.npy", header),
        "another table": lambda archive: compress(archive, "checksums", header, size),
    }
    for bomb in bombs.values():
        path.write_bytes(saved_bytes)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings(action="ignore"):
            bomb(archive)
        assert path.stat().st_size < 1e6
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"bomb\.npz is not what Result\.save writes, or it is corrupt"):
            Result.load(path)
        assert tracemalloc.get_traced_memory()[1] < size / 10
        tracemalloc.stop()


def compress(archive, name, header, size):
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        file.write(header)
        for _ in range(size // 10_000_000):
            file.write(bytes(10_000_000))


def test_sizes_that_the_file_or_the_machine_cannot_hold_are_refused(result, tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    zeros = dataclasses.replace(result, params={"w": np.zeros((10_000, 785), np.float32)})
    zeros.save(path)
    assert path.stat().st_size < zeros.params["w"].nbytes / 500
    np.testing.assert_array_equal(Result.load(path).params["w"], zeros.params["w"])  # however well it is compressed
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.get)
    with pytest.raises(ValueError, match=r"it holds 0\.0 GB, more than the 0\.0 GB of this machine"):
        Result.load(path)


def test_links_and_the_home_folder_are_followed(result, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.npz").symlink_to("there/run.npz")
    result.save(tmp_path / "link.npz")
    assert (tmp_path / "link.npz").is_symlink()
    assert_same(Result.load(tmp_path / "there" / "run.npz"), result)
    monkeypatch.setenv("HOME", str(tmp_path))
    result.save("~/home.npz")
    assert (tmp_path / "home.npz").exists()
    assert_same(Result.load("~/home.npz"), result)


HALF = """
import sys, time, numpy as np
from dcliques_jax._store import files
with files.replacing(sys.argv[1]) as file:
    file.write(bytes(100))
    file.flush()
    print("half", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_of_a_living_one(result, tmp_path):
    path = tmp_path / "run.npz"
    killed, living = (
        subprocess.Popen([sys.executable, "-c", HALF, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        for process in (killed, living):
            assert process.stdout.readline() == "half\n"
        assert len(list(tmp_path.iterdir())) == 2
        killed.kill()
        killed.wait()
        result.save(path)
        assert_same(Result.load(path), result)
        assert len(list(tmp_path.iterdir())) == 2  # the result, and what is being written
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()
    result.save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_with_the_name_of_the_file(result, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*run\.npz'"):
        result.save(tmp_path / "run.npz")
    assert not list(tmp_path.iterdir())


def test_it_prints_what_happened(result):
    assert repr(result).startswith("Result('D-Cliques (fully connected)', num_nodes=10, rounds=12, accuracy=0.")
    assert repr(result.history) == "History(evaluations=4, rounds=12, nodes=4, examples=200)"


def test_it_tells_where_its_numbers_come_from(result):
    told = result.provenance
    assert told["topology"] == "D-Cliques (fully connected)"
    assert told["model"] == "LogisticRegression(num_classes=10)"
    assert (told["rounds_run"], told["seeds"], told["init"], told["eval_nodes"]) == (12, [0], "shared", 4)
    assert told["versions"]["jax"] == jax.__version__
    assert told["device"] == "cpu"
    text = str(result)
    for line in ("  seeds: [0]", f"  dataset_checksum: {told['dataset_checksum']}", f"jax {jax.__version__}"):
        assert line in text
    assert text.startswith(repr(result))


def test_checksums_tell_data_and_programs_apart(result):
    def told(seed=0, **arguments):
        data = partitions.shards(datasets.synthetic(num_train=200, seed=seed), 10)
        return simulate(topologies.ring(10), data, rounds=1, progress=False, **arguments).provenance

    one, again, other = told(), told(), told(seed=1)
    assert one == again
    names = [name for name in one if one[name] != other[name]]
    assert names == ["dataset_checksum", "partition_checksum"]
    slower = told(algorithm=algorithms.dsgd(optax.sgd(0.05)))
    assert [name for name in one if one[name] != slower[name]] == ["algorithm", "program"]


def test_notebooks_show_a_small_table(result):
    named = dataclasses.replace(result, provenance=result.provenance | {"topology": "<b>", "model": "<i>"})
    page = named._repr_html_()
    assert "<b>" not in page
    assert "<i>" not in page
    accuracy = result.history.accuracy[-1]
    shown = f"{accuracy.mean():.1%} ({accuracy.min():.1%} to {accuracy.max():.1%} over nodes)"
    for text in ("&lt;b&gt;", "&lt;i&gt;", "synthetic", "10", "12 (3 epochs)", shown):
        assert f">{text}</" in page
    assert "seeds" not in page


def test_notebooks_show_all_seeds_in_one_table(result):
    arrays = {"accuracy": np.array([[[0.0]], [[1.0]]]), "loss": np.ones((2, 1, 1)), "round": np.array([7])}
    means = {"mean_model_accuracy": np.full((2, 1), 0.25), "consensus_distance": np.zeros((2, 1))}
    history = dataclasses.replace(result.history, **arrays, **means)
    page = dataclasses.replace(result, history=history)._repr_html_()
    for text in ("2", "50.0% (0.0% to 100.0% over nodes)", "1 (1 over nodes)", "25.0%", "0"):
        assert f">{text}</td>" in page


def test_tables_in_notebooks_are_readable_on_light_and_dark_pages(result):
    for page in (result._repr_html_(), result.topology._repr_html_(), result.topology.report()._repr_html_()):
        for outside in ("color", "background", "<style", "class=", "http"):
            assert outside not in page
