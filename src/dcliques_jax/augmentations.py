"""Random changes of training inputs, drawn anew in every round.

`simulate(augment=fn)` takes a function `(key, inputs) -> inputs` of one node's batch `[batch, ...]`. It runs inside the
round, on inputs as the model sees them, and never in evaluation. Keys depend on the run, the round and the node.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dcliques_jax import _checks

Augmentation = Callable[[jax.Array, jax.Array], jax.Array]


def crop_and_flip(padding: int = 4, fill: npt.ArrayLike = 0.0, *, flip: bool = True) -> Augmentation:
    """Moves each image by up to `padding` pixels in both directions, and flips it left to right half of the time.

    An image is padded on all sides and cropped to its size at a uniform offset, as in most papers on CIFAR-10.

    Args:
      padding: number of pixels on each side.
      fill: the value of these pixels, a number or one per channel. Papers pad before they normalise, with black: pass
        `dataset.black`.
      flip: whether to flip.

    >>> images = jnp.ones((2, 32, 32, 3))
    >>> crop_and_flip()(jax.random.key(0), images).shape
    (2, 32, 32, 3)
    """
    padding = _checks.integer("padding", padding, 0)
    if not isinstance(flip, bool):
        raise ValueError(f"flip={flip!r} must be True or False")

    def one(key: jax.Array, image: jax.Array) -> jax.Array:
        of_offset, of_flip = jax.random.split(key)
        height, width = image.shape[:2]
        shape = (height + 2 * padding, width + 2 * padding, image.shape[2])
        border = jnp.broadcast_to(jnp.asarray(fill, image.dtype), shape)
        padded = border.at[padding : padding + height, padding : padding + width].set(image)
        row, column = jax.random.randint(of_offset, (2,), 0, 2 * padding + 1)
        cropped = jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
        return jnp.where(jax.random.bernoulli(of_flip), cropped[:, ::-1], cropped) if flip else cropped

    return _of_images(one)


def random_erasing(
    probability: float = 0.5,
    area: tuple[float, float] = (0.02, 0.33),
    aspect: tuple[float, float] = (0.3, 3.3),
    value: npt.ArrayLike = 0.0,
) -> Augmentation:
    """Overwrites a random rectangle of some images (Zhong et al., AAAI 2020).

    Args:
      probability: share of the images that lose a rectangle.
      area: the smallest and the largest area, as a share of the image; uniform.
      aspect: the smallest and the largest ratio of height to width; uniform on a logarithmic scale. Of ten draws, the
        first that fits into the image counts; if none does, the image stays.
      value: what to write, a number or one per channel.

    >>> erased = random_erasing(1.0)(jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> bool(0.6 < erased.mean() < 1)
    True
    """
    probability = _checks.share("probability", probability)
    low_area, high_area = _interval("area", area, 1)
    low_aspect, high_aspect = _interval("aspect", aspect, np.inf)

    def one(key: jax.Array, image: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 4)
        height, width = image.shape[:2]
        areas = jax.random.uniform(keys[0], (10,), minval=low_area, maxval=high_area) * height * width
        low, high = float(np.log(low_aspect)), float(np.log(high_aspect))
        aspects = jnp.exp(jax.random.uniform(keys[1], (10,), minval=low, maxval=high))
        heights, widths = jnp.round(jnp.sqrt(areas * aspects)), jnp.round(jnp.sqrt(areas / aspects))
        fits = (heights < height) & (widths < width)
        chosen = jnp.argmax(fits)
        position = jax.random.uniform(keys[2], (2,))
        top, left = (
            jnp.floor(part * (size - of_box + 1))
            for part, size, of_box in zip(position, (height, width), (heights[chosen], widths[chosen]), strict=True)
        )
        rows, columns = jnp.arange(height)[:, None], jnp.arange(width)[None]
        inside = (rows >= top) & (rows < top + heights[chosen]) & (columns >= left) & (columns < left + widths[chosen])
        erases = fits.any() & (jax.random.uniform(keys[3]) < probability)
        return jnp.where((inside & erases)[:, :, None], jnp.asarray(value, image.dtype), image)

    return _of_images(one)


def compose(*augmentations: Augmentation) -> Augmentation:
    """Applies several augmentations, the first one first.

    >>> both = compose(crop_and_flip(), random_erasing())
    >>> both(jax.random.key(0), jnp.ones((2, 32, 32, 3))).shape
    (2, 32, 32, 3)
    """
    for augmentation in augmentations:
        if not callable(augmentation):
            raise ValueError(f"{augmentation!r} is not an augmentation: pass functions (key, inputs) -> inputs")

    def all_of_them(key: jax.Array, inputs: jax.Array) -> jax.Array:
        for number, augmentation in enumerate(augmentations):
            inputs = augmentation(jax.random.fold_in(key, number), inputs)
        return inputs

    return all_of_them


def _of_images(one: Augmentation) -> Augmentation:
    """Lifts an augmentation of one image to a batch."""

    def of_batch(key: jax.Array, inputs: jax.Array) -> jax.Array:
        if inputs.ndim != 4:
            raise ValueError(f"augment takes images [batch, height, width, channels], not shape {inputs.shape}")
        return jax.vmap(one)(jax.random.split(key, len(inputs)), inputs)

    return of_batch


def _interval(name: str, given: Any, most: float) -> tuple[float, float]:
    try:
        low, high = (float(end) for end in given)
    except (TypeError, ValueError):
        low = high = np.nan
    if not 0 < low <= high <= most:
        raise ValueError(f"{name}={given!r} must be two positive numbers, the smaller first, of at most {most:g}")
    return low, high
