"""The published files of MNIST and CIFAR-10, checked byte by byte."""

import gzip
import hashlib
import io
import math
import os
import pathlib
import pickle
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dcliques_jax._sources import tfds

MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR10_BIN_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR10_PY_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
# MD5 of all bytes in the order of the published files: training images and labels, test images and labels; channels
# last.
MNIST_BYTES_MD5 = "bd3808b2414328cf71cc2764408ae4c5"
CIFAR10_BYTES_MD5 = "b6210169ef9681aaf316a55b4c99253a"
_RECORD = 1 + 3 * 32 * 32  # bytes of a label and an image of CIFAR-10


def mnist(data_dir: str | os.PathLike[str] | None) -> tfds.Arrays:
    """Loads all images of MNIST, in the order of the files."""
    return _load("MNIST", data_dir, {"mnist": MNIST_MD5}, _read_mnist, "mnist", MNIST_BYTES_MD5)


def cifar10(data_dir: str | os.PathLike[str] | None) -> tfds.Arrays:
    """Loads all images of CIFAR-10, in the order of the files."""
    choices = {"cifar-10-batches-bin": CIFAR10_BIN_MD5, "cifar-10-batches-py": CIFAR10_PY_MD5}
    return _load("CIFAR-10", data_dir, choices, _read_cifar10, "cifar10", CIFAR10_BYTES_MD5)


def _load(
    title: str,
    data_dir: str | os.PathLike[str] | None,
    choices: Mapping[str, Mapping[str, str]],
    read: Callable[[Mapping[str, bytes]], tfds.Arrays],
    name: str,
    md5: str,
) -> tfds.Arrays:
    """Loads examples in the order of the published files, from these or from data that tfds has prepared."""
    if folder := data_dir or os.environ.get("DCLIQUES_DATA_DIR"):
        return read(_contents(title, folder, choices))
    try:
        return tfds.load_in_file_order(name, md5)
    except (ImportError, OSError) as error:
        raise FileNotFoundError(
            f"{title} needs its published files, and data_dir is None. {_advice(choices)}. It cannot come from "
            f"tensorflow-datasets either: {error}"
        ) from error


def _advice(choices: Mapping[str, Mapping[str, str]]) -> str:
    folders = " or ".join(f"{folder}/ ({', '.join(names)})" for folder, names in choices.items())
    return (
        f"Put the published files into a folder as {folders} and pass it as data_dir or in the environment "
        "variable DCLIQUES_DATA_DIR, or use datasets.mnist_5k(), which needs no files"
    )


def _contents(
    title: str, data_dir: str | os.PathLike[str], choices: Mapping[str, Mapping[str, str]]
) -> dict[str, bytes]:
    """Reads and verifies all files of the first folder in `choices` that exists."""
    for folder, checksums in choices.items():
        path = pathlib.Path(data_dir) / folder
        if not path.is_dir():
            continue
        if missing := [name for name in checksums if not (path / name).is_file()]:
            raise FileNotFoundError(f"{path} lacks {', '.join(missing)}. {_advice(choices)}.")
        return {name: verified(path / name, md5) for name, md5 in checksums.items()}
    raise FileNotFoundError(f"{data_dir} holds no {title} files. {_advice(choices)}.")


def verified(path: pathlib.Path, md5: str) -> bytes:
    """Reads a file and verifies its checksum."""
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(
            f"{path} is corrupt or truncated: {len(content)} bytes with MD5 {found}, the published file "
            f"has {md5}. Get it again."
        )
    return content


def _read_mnist(files: Mapping[str, bytes]) -> tfds.Arrays:
    train_pixels, train_labels, test_pixels, test_labels = (read_idx(files[name]) for name in MNIST_MD5)
    return tfds.Arrays(train_pixels[..., None], train_labels, test_pixels[..., None], test_labels)


def _read_cifar10(files: Mapping[str, bytes]) -> tfds.Arrays:
    batches = [(read_cifar_bin if name.endswith(".bin") else read_cifar_py)(files[name]) for name in files]
    # The last file is the test batch. A row is 3 planes of 32 x 32; flax wants channels last.
    images = [np.moveaxis(rows.reshape(-1, 3, 32, 32), 1, -1) for rows, _ in batches]
    labels = [labels for _, labels in batches]
    return tfds.Arrays(np.concatenate(images[:-1]), np.concatenate(labels[:-1]), images[-1], labels[-1])


def read_idx(content: bytes) -> np.ndarray:
    """Parses an idx file of bytes: two zeros, the type (8), the number of dimensions, big-endian sizes, the values."""
    try:
        content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"not a gzip file, or a damaged one: {error}") from error
    start = 4 + 4 * content[3] if len(content) > 4 else 4
    shape = [int.from_bytes(content[at : at + 4]) for at in range(4, start, 4)]
    if content[:3] != b"\0\0\x08" or not shape or start + math.prod(shape) != len(content):
        raise ValueError(f"not an idx file of bytes: {len(content)} bytes that start with {content[:4]!r}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_cifar_bin(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Parses a batch of CIFAR-10's binary version into pixels and labels: records of a label and 3,072 pixels."""
    if not content or len(content) % (_RECORD):
        raise ValueError(f"not a CIFAR-10 batch: its {len(content)} bytes are not records of {_RECORD}")
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:], records[:, 0]


def read_cifar_py(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Parses a batch of CIFAR-10's Python version, a pickle, into pixels and labels."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        shape, _, fortran_order, pixels = batch[b"data"].state[-4:]
        rows = np.frombuffer(pixels, np.uint8).reshape(shape, order="F" if fortran_order else "C")
        return rows.reshape(-1, 3 * 32 * 32), np.array(batch[b"labels"], np.uint8)
    except Exception as error:  # other pickles fail anywhere
        raise ValueError(f"not a CIFAR-10 batch: {error!r}") from error


class _Unpickler(pickle.Unpickler):
    """Reads NumPy arrays from a pickle. It never calls what the pickle names, so no content can run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, encoding: text.encode("latin1")
        return _Unpickled


class _Unpickled:
    """Stands in for any object and keeps its state: (version, shape, dtype, fortran_order, bytes) of an array."""

    state: tuple[Any, ...]

    def __init__(self, *_: Any) -> None:
        self.state = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state
