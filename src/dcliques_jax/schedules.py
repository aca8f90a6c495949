"""Learning rates and weight decay as papers state them: in epochs, and without biases and norms."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dcliques_jax import _checks
from dcliques_jax.partitions import PartitionedDataset

Schedule = Callable[[Any], jax.Array]


def rounds_per_epoch(data: PartitionedDataset, batch_size: int) -> int:
    """Returns the number of rounds per epoch of a run: until the largest node has seen all its examples once.

    With `data.sampled("full_batches")`, until the smallest node has none left for a batch.

    >>> from dcliques_jax import datasets, partitions
    >>> rounds_per_epoch(partitions.shards(datasets.synthetic(num_train=1000), 10), 32)
    4
    """
    batch_size = _checks.integer("batch_size", batch_size, 1)
    if data.sampling == "full_batches":
        return int(data.sizes.min()) // batch_size
    return -(-int(data.sizes.max()) // batch_size)


def in_epochs(
    peak: float | jax.Array,
    rounds_per_epoch: int,
    *,
    epochs: float,
    warm_up: float = 0,
    start: float | jax.Array = 0.0,
    drops: Sequence[float] = (),
    factor: float = 0.1,
    cosine: bool = False,
    end: float | jax.Array = 0.0,
) -> Schedule:
    """Makes a schedule of optax, a function of rounds, from one in epochs.

    The rate grows linearly from `start` to `peak` during the warm-up. Afterwards it is multiplied by `factor` at every
    epoch in `drops`, or it falls as half a cosine from `peak` to `end` at the last epoch.

    Args:
      peak: the rate after the warm-up.
      rounds_per_epoch: number of rounds per epoch, see `rounds_per_epoch`.
      epochs: length of the run.
      warm_up: length of the warm-up.
      start: the rate at the start of the warm-up.
      drops: epochs at which the rate drops.
      factor: factor of each drop.
      cosine: whether the rate falls as a cosine. Pass either `drops` or `cosine`, not both.
      end: the rate at the end of a cosine.

    >>> schedule = in_epochs(0.8, 10, epochs=300, warm_up=5, start=0.1, drops=[150, 225])
    >>> [round(float(schedule(10 * epoch)), 4) for epoch in (0, 2.5, 5, 149, 150, 225)]
    [0.1, 0.45, 0.8, 0.8, 0.08, 0.008]
    """
    peak, start, end = (_number(name, value) for name, value in (("peak", peak), ("start", start), ("end", end)))
    per_epoch = _checks.integer("rounds_per_epoch", rounds_per_epoch, 1)
    epochs, warm_up = _checks.real("epochs", epochs, 0), _checks.real("warm_up", warm_up, 0)
    at = np.array([_checks.real("drops", drop, 0) for drop in drops])
    if cosine and len(at):
        raise ValueError(f"drops={drops} and cosine=True: pass either, not both")
    if warm_up > epochs:
        raise ValueError(f"warm_up={warm_up:g} is longer than epochs={epochs:g}")

    def schedule(count: Any) -> jax.Array:
        epoch = jnp.asarray(count) / per_epoch
        if cosine:
            passed = jnp.clip((epoch - warm_up) / max(epochs - warm_up, 1e-9), 0, 1)
            after = end + (peak - end) * (1 + jnp.cos(jnp.pi * passed)) / 2
        else:
            after = peak * factor ** (epoch[..., None] >= at).sum(axis=-1)
        growing = start + (peak - start) * epoch / max(warm_up, 1e-9)
        return jnp.where(epoch < warm_up, growing, after)

    return schedule


def sgd(
    learning_rate: Any,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    weight_decay: float | jax.Array = 0.0,
    decay_all: bool = False,
) -> optax.GradientTransformation:
    """Makes SGD with coupled weight decay, as PyTorch has it: the decay is added to the gradient before the momentum.

        g = grad + weight_decay x,   m = b m + g,   x <- x - lr (g + b m  or  m)

    Args:
      learning_rate: a number or a schedule.
      momentum: the factor b of momentum. Default: none.
      nesterov: whether to use Nesterov momentum.
      weight_decay: the factor of the decay.
      decay_all: whether biases and the scales of norms decay, too. Default: only arrays of two or more dimensions.

    >>> optimizer = sgd(0.1, momentum=0.9, weight_decay=1e-4)
    >>> callable(optimizer.update)
    True
    """
    weight_decay = _number("weight_decay", weight_decay)

    def kernels(params: Any) -> Any:
        return jax.tree.map(lambda leaf: decay_all or jnp.ndim(leaf) > 1, params)

    decays = isinstance(weight_decay, jax.core.Tracer) or weight_decay > 0
    decay = optax.add_decayed_weights(weight_decay) if decays else optax.identity()
    # Masked in any case, so that all runs of a sweep have states of the same structure.
    decay = optax.masked(decay, kernels)
    return optax.chain(decay, optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov))


def _number(name: str, value: Any) -> Any:
    """Returns a number of at least 0. A value of a sweep is traced and cannot be compared."""
    return value if isinstance(value, jax.core.Tracer) else _checks.real(name, value, 0)
