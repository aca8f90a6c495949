"""What is measured."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Params = Any


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each example, `[batch]`: -log softmax(logits)[label].

    >>> cross_entropy(jnp.zeros((1, 4)), jnp.array([2])).round(4)
    Array([1.3863], dtype=float32)
    """
    # Picked by a mask, and not by an index, whose gradient would be a scatter.
    chosen = labels[:, None] == jnp.arange(logits.shape[1])[None]
    return jax.nn.logsumexp(logits, axis=1) - jnp.where(chosen, logits, 0).sum(axis=1)


def consensus_distance(params: Params) -> jax.Array:
    """How far the models are apart: sqrt( 1/n sum_i || theta_i - mean theta ||^2 ).

    >>> float(consensus_distance({"w": jnp.array([[1.0, 0.0], [-1.0, 0.0]])}))
    1.0
    """

    def mean_square(leaf: jax.Array) -> jax.Array:
        from_first = leaf - leaf[:1]  # so that equal models are at distance 0, not at that of a rounded mean
        return jnp.sum(jnp.square(from_first - from_first.mean(axis=0, keepdims=True))) / len(leaf)

    return jnp.sqrt(sum(map(mean_square, jax.tree.leaves(params)), start=jnp.zeros(())))


def finite_nodes(params: Params) -> jax.Array:
    """Whether all parameters of a node are finite, `[nodes]`."""
    leaves = [jnp.isfinite(leaf).reshape(len(leaf), -1).all(axis=1) for leaf in jax.tree.leaves(params)]
    return jnp.stack(leaves).all(axis=0)


def evaluate(
    apply: Callable[[Params, jax.Array], jax.Array],
    params: Params,
    inputs: jax.Array,
    labels: jax.Array,
    chunks: jax.Array,
    *,
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array] = cross_entropy,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Evaluates one node's model on examples `chunks` `[chunks, chunk]` of `inputs` and `labels`.

    They are streamed a chunk at a time to bound memory. Numbers below 0 only fill up the last chunk. Returns the number
    of examples on which the model is right, its mean loss, and whether it is right on each example, `[chunks, chunk]`.
    """

    def on_chunk(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, expected = apply(params, inputs[chosen]), labels[chosen]
        correct, losses = _first_of_largest(logits) == expected, loss_fn(logits, expected)
        return jnp.where(chosen < 0, False, correct), jnp.where(chosen < 0, 0, losses).sum()

    correct, losses = jax.lax.map(on_chunk, chunks)
    count = (chunks >= 0).sum()
    return correct.sum(), losses.sum() / count, correct


def _first_of_largest(logits: jax.Array) -> jax.Array:
    """`logits.argmax(axis=1)`, as reductions that XLA:CPU vectorises."""
    classes = jnp.arange(logits.shape[1])[None]
    return jnp.where(logits >= logits.max(axis=1, keepdims=True), classes, logits.shape[1]).min(axis=1)
