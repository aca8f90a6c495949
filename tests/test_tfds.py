"""tensorflow-datasets: mocked in all, and MNIST for real where its published files are at hand."""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from dcliques_jax import datasets
from dcliques_jax._sources import published
from dcliques_jax._sources import tfds as tfds_source

ROOT = pathlib.Path(__file__).parents[1]

SETS = {
    "mnist": ((28, 28, 1), 10),
    "fashion_mnist": ((28, 28, 1), 10),
    "emnist": ((28, 28, 1), 62),
    "emnist/letters": ((28, 28, 1), 37),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
    "svhn_cropped": ((32, 32, 3), 10),
}


@pytest.fixture(scope="module")
def tfds():
    reason = "needs tensorflow-datasets: pip install 'dcliques_jax[tfds]'"
    return pytest.importorskip("tensorflow_datasets", reason=reason)


@pytest.fixture
def offline(tfds, monkeypatch):
    """With TensorFlow, and without a network."""
    import requests

    def refuse(url, **_):
        raise requests.ConnectionError(url)

    monkeypatch.setattr("requests.get", refuse)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def describe(folder, name="mnist", splits=("train", "test")):
    """Writes the description of prepared data, of which the examples are then mocked."""
    folder = folder / name / "3.0.1"
    folder.mkdir(parents=True)
    counts = [{"name": split, "numBytes": "9", "shardLengths": ["9"]} for split in splits]
    info = {"name": name, "version": "3.0.1", "fileFormat": "array_record", "splits": counts}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    image = {"pythonClassName": "tensorflow_datasets.core.features.image_feature.Image"}
    image["image"] = {"dtype": "uint8", "shape": {"dimensions": ["28", "28", "1"]}}
    label = {"pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel"}
    label["classLabel"] = {"numClasses": "10"}
    both = {"pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict"}
    both["featuresDict"] = {"features": {"image": image, "label": label}}
    (folder / "features.json").write_text(json.dumps(both))


def made_up(size, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(size, 28, 28, 1), dtype=np.uint8), np.arange(size) % 10


@pytest.mark.parametrize("name", SETS)
def test_image_classification_sets_are_read(tfds, name, tmp_path):
    shape, num_classes = SETS[name]
    with tfds.testing.mock_data(num_examples=23):
        data = datasets.from_tfds(name, tmp_path)
        example = tfds.data_source(name, split="test")[22]
    assert data.train_inputs.shape == data.test_inputs.shape == (23, *shape)
    assert data.train_inputs.dtype == np.float32
    assert (data.name, data.num_classes, data.byte_scale) == (name, num_classes, (1 / 255, 0.0))
    np.testing.assert_array_equal(data.test_inputs[22], example["image"] / np.float32(255))
    assert data.test_labels[22] == example["label"]
    assert data.train_bytes.dtype == np.uint8
    assert list(tmp_path.iterdir()) == []  # mocked images are not kept


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "name='nonsense' is not a data set of tensorflow-datasets"),
        ("emnist/nonsense", "name='emnist/nonsense' is not a data set"),
        ("mnist:0.0.1", r"name='mnist:0\.0\.1' is not a data set.*only: 3"),
        ("imdb_reviews", r"not one image and one integer label.*\('text', 'label'\)"),
        ("cats_vs_dogs", r"images of shape \(None, None, 3\).*from_arrays"),
    ],
)
def test_what_cannot_be_read_is_refused_before_any_download(tfds, offline, name, message, tmp_path):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        datasets.from_tfds(name, tmp_path)


def test_a_set_without_a_test_split_is_refused(tfds, tmp_path):
    describe(tmp_path, splits=("train", "extra"))
    message = "name='mnist' has no split test, only train, extra"
    with tfds.testing.mock_data(data_dir=tmp_path), pytest.raises(ValueError, match=message):
        datasets.from_tfds("mnist")


@pytest.mark.parametrize("missing", ["tensorflow_datasets", "PIL"])
def test_a_missing_package_names_the_extra(tfds, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"(?s){missing}.*dcliques_jax\[tfds\]"):
        datasets.from_tfds("mnist")


def test_preparing_names_the_extra_without_tensorflow(tfds, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"(?s)mnist/3.* is not prepared in .*TensorFlow.*dcliques_jax\[tfds\]"):
        datasets.from_tfds("mnist", tmp_path)


def test_without_a_network_the_error_says_how_to_prepare(offline, tmp_path):
    message = r"(?s)googleapis.*train-labels.*download_and_prepare.*manual_dir.*download_config.*DCLIQUES_DATA_DIR"
    with pytest.raises(FileNotFoundError, match=message):
        datasets.from_tfds("mnist", tmp_path)


def test_a_host_that_is_silent_for_ever_is_given_up(offline, monkeypatch, tmp_path):
    import requests

    released, refuse = threading.Event(), requests.get
    monkeypatch.setattr("requests.get", lambda url, **_: released.wait() and refuse(url))
    monkeypatch.setattr(tfds_source, "_PATIENCE", 0.01)
    with pytest.raises(FileNotFoundError, match=r"storage\.googleapis\.com cannot be reached"):
        datasets.from_tfds("mnist", tmp_path)
    released.set()


def test_manual_files_are_checked(offline, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"manual_dir='.*nowhere' is not a folder"):
        datasets.from_tfds("fashion_mnist", tmp_path, manual_dir=tmp_path / "nowhere")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"those of another set")
    with pytest.raises(ValueError, match=r"(?s)t10k-labels-idx1-ubyte\.gz is corrupt, or a file of that name.*67da17c"):
        datasets.from_tfds("fashion_mnist", tmp_path, manual_dir=tmp_path)


@pytest.mark.parametrize(("load", "title"), [(datasets.mnist, "MNIST"), (datasets.cifar10, "CIFAR-10")])
def test_without_files_and_network_both_ways_are_named(offline, load, title, monkeypatch, tmp_path):
    monkeypatch.delenv("DCLIQUES_DATA_DIR", raising=False)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(tmp_path))
    message = rf"(?s){title} needs.*DCLIQUES_DATA_DIR.*mnist_5k.*It cannot come from.*{tmp_path}.*download_and_prepare"
    with pytest.raises(FileNotFoundError, match=message):
        load()


def test_mnist_by_tfds_is_mnist_from_files(tfds, monkeypatch, tmp_path):
    """tfds stores examples sorted by a hash: the order of the files is found again, or the data is refused."""
    from tensorflow_datasets.core import hashing

    train, test = made_up(50, 0), made_up(30, 1)
    files = tfds_source.Arrays(*train, *test)

    def source(builder, split, **_):
        images, labels = train if split == "train" else test
        order = sorted(range(len(labels)), key=hashing.Hasher(split).hash_key)
        return [{"image": images[index], "label": labels[index]} for index in order]

    content = b"".join(part.astype(np.uint8).tobytes() for part in files)
    monkeypatch.setattr(published, "MNIST_BYTES_MD5", hashlib.md5(content).hexdigest())
    monkeypatch.setattr(published, "_contents", lambda *_: None)
    monkeypatch.setattr(published, "_read_mnist", lambda _: files)
    monkeypatch.delenv("DCLIQUES_DATA_DIR", raising=False)
    with tfds.testing.mock_data(as_data_source_fn=source):
        one, other = datasets.mnist(), datasets.mnist(tmp_path)
        np.testing.assert_array_equal(one.train_inputs, other.train_inputs)
        np.testing.assert_array_equal(one.validation_inputs, other.validation_inputs)
        assert one.checksum == other.checksum
        monkeypatch.setattr(published, "MNIST_BYTES_MD5", "0" * 32)
        with pytest.raises(ValueError, match="prepared as mnist does not hold what was published"):
            datasets.mnist()


def test_decoded_images_are_kept_until_the_data_changes(tfds, tmp_path):
    describe(tmp_path)
    decoded = []

    def source(builder, split, **_):
        decoded.append(split)
        return [{"image": image, "label": label} for image, label in zip(*made_up(20, 0), strict=True)]

    def load():
        decoded.clear()
        return datasets.from_tfds("mnist").checksum, bool(decoded)

    with tfds.testing.mock_data(as_data_source_fn=source, data_dir=tmp_path):
        first, decodes = load()
        assert decodes
        (cache,) = (tmp_path / "dcliques_cache").iterdir()
        assert cache.name == "mnist-3.0.1.npz"
        assert load() == (first, False)
        cache.write_bytes(cache.read_bytes()[:-100])
        assert load() == (first, True)
        assert load() == (first, False)
        info = tmp_path / "mnist" / "3.0.1" / "dataset_info.json"
        info.write_text(info.read_text().replace('"9"', '"8"'))
        assert load() == (first, True)
        assert [path.name for path in cache.parent.iterdir()] == [cache.name]
        cache.unlink()
        cache.parent.rmdir()
        cache.parent.write_text("a folder that cannot be written to")
        assert load() == (first, True)


ARRAYS = tfds_source.Arrays(*made_up(2, 0), *made_up(1, 1))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "file.npz"
    tfds_source.write_cache(path, b"key", ARRAYS)
    return path


def test_a_cache_is_read_back(cache):
    for found, expected in zip(tfds_source.read_cache(cache, b"key"), ARRAYS, strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    with pytest.raises(ValueError, match="damaged, or belongs to data that has changed"):
        tfds_source.read_cache(cache, b"another key")


@given(st.data())
def test_a_damaged_cache_is_refused(cache, data):
    """Random bytes, cut files and changed bytes: refused, or, where a byte does not matter, the same arrays."""
    content = bytearray(cache.read_bytes())
    position = st.integers(0, len(content) - 1) | st.integers(len(content) - 700, len(content) - 1)
    match data.draw(st.sampled_from(["random", "cut", "changed", "shifted"])):
        case "random":
            content = data.draw(st.binary(max_size=300))
        case "cut":
            content = content[: data.draw(position)]
        case "changed":
            for at in data.draw(st.lists(position, min_size=1, max_size=4)):
                content[at] = data.draw(st.integers(0, 255))
        case "shifted":
            at = data.draw(position)
            content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    path = cache.with_name("damaged.npz")
    path.write_bytes(content)
    try:
        found = tfds_source.read_cache(path, b"key")
    except ValueError as error:
        assert "damaged" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert all(map(np.array_equal, found, ARRAYS))


def test_a_cache_runs_no_code(cache, tmp_path):
    class Malice:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was here"),)

    path = tmp_path / "file.npz"
    fields = dict.fromkeys(tfds_source.Arrays._fields, np.array([Malice()], object))
    np.savez(path, checksum="", **fields)
    with pytest.raises(ValueError, match="allow_pickle"):
        tfds_source.read_cache(path, b"key")
    np.save(buffer := io.BytesIO(), fields["test_labels"], allow_pickle=True)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="allow_pickle"):
        tfds_source.read_cache(path, b"key")
    assert not (tmp_path / "was here").exists()


REAL = """
import os, pathlib, sys
import numpy as np
from dcliques_jax import datasets

files = pathlib.Path(os.environ.pop("DCLIQUES_DATA_DIR"))
fields = [f"{split}_{what}" for split in ("train", "validation", "test") for what in ("inputs", "labels")]

if sys.argv[1:] == ["prepare"]:
    data = datasets.from_tfds("mnist", manual_dir=files / "mnist")
    assert data.train_inputs.shape == (60_000, 28, 28, 1)
    try:
        datasets.from_tfds("fashion_mnist", manual_dir=files / "mnist")
    except ValueError as error:
        assert "another data set" in str(error)
    else:
        raise AssertionError("fashion_mnist was made of the files of mnist")
one, other = datasets.mnist(files), datasets.mnist()
for field in fields:
    np.testing.assert_array_equal(getattr(one, field), getattr(other, field), err_msg=field)
assert one.checksum == other.checksum
print("equal")
"""


def link_installed(requirement, folder, seen):
    """Links what a requirement needs into a folder, as far as this environment has it, and nothing else."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution(requirement.name)
        for extra in {"", *requirement.extras} - seen.setdefault(package.name, set()):
            seen[package.name].add(extra)
            for needed in map(Requirement, package.requires or ()):
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    link_installed(needed, folder, seen)
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if package.name != "dcliques_jax" and not (folder / name).exists():
                (folder / name).symlink_to(package.locate_file(name))


@pytest.mark.slow
def test_mnist_prepared_by_tfds_is_mnist_from_files(data_dir, tmp_path):
    """For real, in an environment that has nothing but the extra: with TensorFlow, then read without it."""
    python, prepared = tmp_path / "venv" / "bin" / "python", tmp_path / "tfds"
    environment = os.environ | {"DCLIQUES_DATA_DIR": str(data_dir), "TFDS_DATA_DIR": str(prepared)}
    environment.pop("PYTHONPATH", None)

    def call(*command):
        run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout

    call(sys.executable, "-m", "venv", tmp_path / "venv")
    # Packages that are here already are linked, not installed again; pip changes none of them, as they are elsewhere.
    (links := tmp_path / "links").mkdir()
    link_installed(Requirement("dcliques_jax[tfds]"), links, {})
    packages = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    pathlib.Path(packages, "links.pth").write_text(str(links))
    call(python, "-m", "pip", "install", "--quiet", "--no-compile", f"{ROOT}[tfds]")
    assert call(python, "-c", REAL, "prepare").endswith("equal\n")
    call(python, "-m", "pip", "uninstall", "--quiet", "--yes", "tensorflow-cpu")
    shutil.rmtree(prepared / "dcliques_cache")
    assert call(python, "-c", REAL).endswith("equal\n")
    shutil.rmtree(tmp_path / "venv")  # a gigabyte that pytest would keep
