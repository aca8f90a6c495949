"""Images and labels from tensorflow-datasets, as bytes.

Data prepared as array_record is read without TensorFlow. Preparing data and reading tfrecord need TensorFlow.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import pathlib
import threading
import urllib.parse
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from dcliques_jax import _arrays
from dcliques_jax._store import files

_INSTALL = "pip install 'dcliques_jax[tfds]'"
_SPLITS = ("train", "test")
_PATIENCE = 5  # seconds to wait for a host; tfds itself tries for minutes


class Arrays(NamedTuple):
    """The two splits of a data set, in storage order."""

    train_images: np.ndarray  # [train, height, width, channels] uint8
    train_labels: np.ndarray  # [train] integers
    test_images: np.ndarray  # [test, height, width, channels] uint8
    test_labels: np.ndarray  # [test] integers


def load(
    name: str, data_dir: str | os.PathLike[str] | None = None, manual_dir: str | os.PathLike[str] | None = None
) -> tuple[Arrays, int]:
    """Loads images, labels and the number of classes. Prepares the data set first if needed."""
    tfds = _imported("tensorflow_datasets", f"{name} from tensorflow-datasets")
    _imported("PIL", f"{name} from tensorflow-datasets")
    builder = _builder(tfds, name, data_dir)
    shape, num_classes = _format(tfds, name, builder)
    if not _is_readable(builder):
        _prepare(tfds, name, builder, manual_dir)
    if not builder.is_prepared():  # mocked: nothing to cache
        return _decoded(tfds, builder, shape), num_classes
    if missing := [split for split in _SPLITS if split not in builder.info.splits]:
        known = ", ".join(builder.info.splits)
        raise ValueError(f"name={name!r} has no split {' and '.join(missing)}, only {known}: use datasets.from_arrays")
    cache = pathlib.Path(builder.data_dir_root, "dcliques_cache", builder.info.full_name.replace("/", "-") + ".npz")
    key = _fingerprint(pathlib.Path(builder.data_dir))
    try:
        arrays = read_cache(cache, key)
    except (OSError, ValueError):
        arrays = _decoded(tfds, builder, shape)
        write_cache(cache, key, arrays)
    return arrays, num_classes


def load_in_file_order(name: str, md5: str) -> Arrays:
    """Loads a data set in the order of its published files. `md5` is the checksum of all bytes in this order."""
    stored, _ = load(name)
    train, test = file_order("train", len(stored.train_labels)), file_order("test", len(stored.test_labels))
    parts = (stored.train_images[train], stored.train_labels[train], stored.test_images[test], stored.test_labels[test])
    found = hashlib.md5(b"".join(part.astype(np.uint8).tobytes() for part in parts), usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(
            f"what tensorflow-datasets has prepared as {name} does not hold what was published, or not in the order "
            f"of tfds: the MD5 of all bytes is {found}, not {md5}. Delete it and prepare it again."
        )
    return Arrays(*parts)


def file_order(split: str, size: int) -> np.ndarray:
    """Where tfds stores examples 0 .. size - 1: it sorts them by the MD5 of split and number.

    >>> file_order("train", 4)
    array([0, 2, 3, 1])
    """
    digests = [hashlib.md5(f"{split}{number}".encode(), usedforsecurity=False).digest() for number in range(size)]
    return np.argsort(sorted(range(size), key=digests.__getitem__))


def read_cache(path: pathlib.Path, key: bytes) -> Arrays:
    """Reads what `write_cache` wrote with this key. Raises a `ValueError` if there is anything else."""
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as stored:
                arrays = Arrays(*(stored[field] for field in Arrays._fields))
                found = str(stored["checksum"])
        except Exception as error:  # zipfile, zlib and NumPy fail on damaged files in a dozen ways
            raise ValueError(f"{path} is not a cache of images, or it is damaged: {error!r}. Delete it.") from error
    if found != _arrays.checksum(key, *arrays):
        raise ValueError(f"{path} is damaged, or belongs to data that has changed since. Delete it.")
    return arrays


def write_cache(path: pathlib.Path, key: bytes, arrays: Arrays) -> None:
    """Caches decoded arrays if the folder is writeable. The file appears as a whole."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        with files.replacing(path) as file:
            np.savez(file, allow_pickle=False, checksum=_arrays.checksum(key, *arrays), **arrays._asdict())


def _imported(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs the module {module} ({error}): {_INSTALL}") from error


def _builder(tfds: Any, name: str, data_dir: str | os.PathLike[str] | None) -> Any:
    try:
        return tfds.builder(name, data_dir=None if data_dir is None else pathlib.Path(data_dir).expanduser())
    except (ValueError, AssertionError) as error:  # unknown names and configs, and unknown versions
        raise ValueError(
            f"name={name!r} is not a data set of tensorflow-datasets {tfds.__version__}: {error}"
        ) from error


def _format(tfds: Any, name: str, builder: Any) -> tuple[tuple[int, int, int], int]:
    """Finds the shape of the images and the number of classes."""
    features, keys = builder.info.features, builder.info.supervised_keys
    if keys != ("image", "label") or not isinstance(features["label"], tfds.features.ClassLabel):
        raise ValueError(
            f"name={name!r} is not one image and one integer label per example; it maps {keys} among "
            f"{', '.join(features)}: read it with tfds and use datasets.from_arrays"
        )
    image = features["image"]
    if None in image.shape or image.np_dtype != np.uint8:
        raise ValueError(
            f"name={name!r} has images of shape {image.shape} and type {np.dtype(image.np_dtype)}, but only bytes of "
            "one shape can be stacked: read it with tfds, resize the images and use datasets.from_arrays"
        )
    return image.shape, features["label"].num_classes


def _is_readable(builder: Any) -> bool:
    """Whether there are examples to read, prepared or from tfds.testing.mock_data, which has no files."""
    if builder.is_prepared():
        return True
    try:
        builder.as_data_source("train")
    except NotImplementedError:
        return False
    return True


def _decoded(tfds: Any, builder: Any, shape: tuple[int, int, int]) -> Arrays:
    train, test = (_decoded_split(tfds, builder, split, shape) for split in _SPLITS)
    return Arrays(*train, *test)


def _decoded_split(tfds: Any, builder: Any, split: str, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    try:
        source = builder.as_data_source(split)
    except NotImplementedError:  # tfrecord
        _imported("tensorflow", f"{builder.info.full_name} is prepared as tfrecord, and reading that")
        in_order = tfds.ReadConfig(interleave_cycle_length=1)  # one file after the other
        batches = tfds.as_numpy(builder.as_dataset(split=split, batch_size=1000, read_config=in_order))
        images, labels = zip(*((batch["image"], batch["label"]) for batch in batches), strict=True)
        return np.concatenate(images), np.concatenate(labels)
    pixels, classes = np.empty((len(source), *shape), np.uint8), np.empty(len(source), np.int64)
    for index in range(len(source)):
        example = source[index]
        pixels[index], classes[index] = example["image"], example["label"]
    return pixels, classes


def _fingerprint(folder: pathlib.Path) -> bytes:
    """Identifies prepared data by its description and the name, size and date of every file."""
    files = sorted(folder.iterdir())
    dates = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return repr(dates).encode() + b"".join(file.read_bytes() for file in files if file.suffix == ".json")


def _prepare(tfds: Any, name: str, builder: Any, manual_dir: str | os.PathLike[str] | None) -> None:
    full_name, root = builder.info.full_name, pathlib.Path(builder.data_dir_root)
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            f"{full_name} is not prepared in {root}, and preparing it needs TensorFlow: {_INSTALL}. Data "
            "prepared elsewhere as array_record needs no TensorFlow."
        )
    # tfds finds unpacked files by their bare names. Data sets with files of one name, such as mnist and fashion_mnist,
    # need separate folders.
    downloads = root / "downloads" / builder.name
    manual = None if manual_dir is None else pathlib.Path(manual_dir).expanduser()
    if manual and not manual.is_dir():
        raise FileNotFoundError(
            f"manual_dir={os.fspath(manual)!r} is not a folder: pass the one with the published files"
        )
    missing = [
        url for url in builder.url_infos or {} if not _is_at_hand(url, builder.url_infos[url], manual, downloads)
    ]
    if silent := _silent_hosts(missing):
        files = ", ".join(builder.url_infos[url].filename or url for url in missing)
        raise FileNotFoundError(
            f"{full_name} is not prepared in {root}, and {', '.join(silent)} cannot be reached to get its files "
            f"({files}). Either prepare it where there is a network, tfds.builder({name!r}).download_and_prepare("
            "file_format='array_record'), and copy the folder into data_dir; or put the published files into a folder "
            "and pass that as manual_dir, which becomes the download_config of tfds. The published files of MNIST and "
            "CIFAR-10 are also read without tfds: datasets.mnist(), datasets.cifar10() and DCLIQUES_DATA_DIR."
        )
    builder.download_and_prepare(
        file_format="array_record",
        download_dir=downloads,
        download_config=tfds.download.DownloadConfig(manual_dir=manual),
    )


def _is_at_hand(url: str, info: Any, manual: pathlib.Path | None, downloads: pathlib.Path) -> bool:
    """Whether a file is available without a download. One in `manual` must be the published file."""
    if manual and info.filename and (file := manual / info.filename).is_file():
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != info.checksum:
            raise ValueError(
                f"{file} is corrupt, or a file of that name of another data set: its SHA-256 is {found}, that of {url} "
                f"is {info.checksum}. Get it again."
            )
        return True
    return any(url in note.read_text() for note in downloads.rglob("*.INFO"))  # tfds records where files come from


def _silent_hosts(urls: Iterable[str]) -> list[str]:
    """The hosts that do not deliver within seconds."""
    by_host = {urllib.parse.urlsplit(url).netloc: url for url in urls if url.startswith("http")}
    return [host for host, url in by_host.items() if not _delivers(url)]


def _delivers(url: str) -> bool:
    requests = _imported("requests", "downloading")  # as tfds does, with the same proxies and certificates
    answers = []

    def ask() -> None:
        with (
            contextlib.suppress(requests.RequestException),
            requests.get(url, stream=True, timeout=_PATIENCE) as answer,
        ):
            answers.append(answer.ok)

    asking = threading.Thread(target=ask, daemon=True)  # looking up a host's name has no timeout
    asking.start()
    asking.join(2 * _PATIENCE)
    return answers == [True]
