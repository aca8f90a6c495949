"""What is measured."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = Any


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each example, `[batch]`."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


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
    apply: Callable[[Params, jax.Array], jax.Array], params: Params, inputs: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Accuracy and mean loss of every node, both `[nodes]`, on the same examples.

    Inputs `[chunks, chunk, ...]` are streamed a chunk at a time to bound memory. Labels `[chunks, chunk]` below 0 mark
    what only fills up the last chunk.
    """

    def on_chunk(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunk_inputs, chunk_labels = chunk

        def of_node(node_params: Params) -> tuple[jax.Array, jax.Array]:
            logits = apply(node_params, chunk_inputs)
            losses = cross_entropy(logits, jnp.maximum(chunk_labels, 0))
            return (logits.argmax(axis=1) == chunk_labels).sum(), jnp.where(chunk_labels < 0, 0, losses).sum()

        return jax.vmap(of_node)(params)

    correct, losses = jax.lax.map(on_chunk, (inputs, labels))
    count = (labels >= 0).sum()
    return correct.sum(axis=0) / count, losses.sum(axis=0) / count
