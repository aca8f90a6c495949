"""Metrics of models.

`simulate(metrics={"name": fn})` adds a metric `fn(params, inputs, labels)`, written for one node's model; if the model
has a state, such as batch statistics, it is `fn(params, state, inputs, labels)`. It is called per node on chunks of the
evaluated examples and returns a mean over a chunk. The means are averaged over chunks, weighted by the numbers of
examples. `whole` and `of_mean_model` change this, and can be combined.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dcliques_jax import models

Params = Any


class Metric(NamedTuple):
    """A metric, and how to measure it. A plain function `fn` stands for `Metric(fn)`."""

    fn: Callable[..., Any]  # (params, inputs [examples, ...], labels [examples, ...]) -> array
    of_mean_model: bool = False  # measure the mean of all models instead of each node's model
    whole: bool = False  # call `fn` once on all examples, not on chunks
    weighted: bool = False  # `fn` returns (values, weights) of one shape, or one weight; they average the chunks


def as_metric(metric: Metric | Callable[..., Any]) -> Metric:
    """Converts an entry of `simulate(metrics=...)` to a `Metric`."""
    return metric if isinstance(metric, Metric) else Metric(metric)


def whole(metric: Metric | Callable[..., Any]) -> Metric:
    """Measures on all examples in one call, for metrics that are not means over examples, such as a largest loss.

    Args:
      metric: function `(params, inputs, labels)`, or a `Metric`.

    >>> whole(lambda params, inputs, labels: labels.max()).whole
    True
    """
    return as_metric(metric)._replace(whole=True)


def of_mean_model(metric: Metric | Callable[..., Any]) -> Metric:
    """Measures the mean of all models instead of each node's model.

    Args:
      metric: function `(params, inputs, labels)`, or a `Metric`.

    >>> of_mean_model(lambda params, inputs, labels: params["bias"].sum()).of_mean_model
    True
    """
    return as_metric(metric)._replace(of_mean_model=True)


def per_class_accuracy(model: Any) -> Metric:
    """Measures the accuracy of each node per class, `[t, nodes, classes]`: it shows which nodes forget which classes.

    The accuracy of a class without examples is NaN. `plotting.plot_per_class` draws this metric.

    Args:
      model: the trained model, as passed to `simulate(model=...)`.

    >>> from dcliques_jax import datasets, simulate, topologies
    >>> model = models.logistic_regression()
    >>> measured = {"per_class": per_class_accuracy(model)}
    >>> arguments = {"model": model, "metrics": measured, "epochs": 1, "progress": False}
    >>> simulate(topologies.ring(4), datasets.synthetic(), **arguments).history.extra["per_class"].shape
    (2, 4, 10)
    """
    predict = models.predictor(model)

    def fn(params: Params, *others: Any) -> tuple[jax.Array, jax.Array]:
        *state, inputs, labels = others
        logits = predict(params, *state, inputs)
        if labels.ndim != 1 or not jnp.issubdtype(labels.dtype, jnp.integer):
            raise ValueError(
                f"per_class_accuracy needs one class per example, but labels are {labels.dtype} of shape "
                f"{labels.shape}: pass a metric of your own"
            )
        of_class = labels[:, None] == jnp.arange(logits.shape[1])[None]
        counts = of_class.sum(axis=0)
        right = (of_class & (predictions(logits) == labels)[:, None]).sum(axis=0)
        return right / jnp.maximum(counts, 1), counts

    return Metric(fn, weighted=True)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each label, `[batch]` or `[batch, length]`: -log softmax(logits)[label].

    >>> cross_entropy(jnp.zeros((1, 4)), jnp.array([2])).round(4)
    Array([1.3863], dtype=float32)
    """
    # Select by a mask: the gradient of indexing is a slow scatter.
    chosen = jnp.expand_dims(labels, -1) == _classes(logits)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(chosen, logits, 0).sum(axis=-1)


def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the squared error of each example, `[batch]`, as a mean over the entries of a target.

    >>> squared_error(jnp.zeros((1, 2)), jnp.array([[2.0, 4.0]]))
    Array([10.], dtype=float32)
    """
    if outputs.shape != targets.shape:
        raise ValueError(f"the model returns outputs of shape {outputs.shape} for targets of shape {targets.shape}")
    return jnp.square(outputs - targets).reshape(len(targets), -1).mean(axis=1)


def predictions(logits: jax.Array) -> jax.Array:
    """Returns the class with the largest logit per label, `[batch]` or `[batch, length]`; of equal logits, the first.

    >>> predictions(jnp.array([[0.0, 2.0, 2.0]]))
    Array([1], dtype=int32)
    """
    # `argmax` as reductions, which XLA:CPU vectorises.
    return jnp.where(logits >= logits.max(axis=-1, keepdims=True), _classes(logits), logits.shape[-1]).min(axis=-1)


def _classes(logits: jax.Array) -> jax.Array:
    return jnp.expand_dims(jnp.arange(logits.shape[-1]), tuple(range(logits.ndim - 1)))


def consensus_distance(params: Params, used: jax.Array | None = None, axis_name: str | None = None) -> jax.Array:
    """Returns the distance of the models from their mean, sqrt( 1/n sum_i || theta_i - mean theta ||^2 ).

    Args:
      params: stacked parameters, `[slots, ...]` in every leaf.
      used: which slots hold a node, `[slots]`. Default: all.
      axis_name: axis of the mesh that the slots are sharded over. Default: no mesh.

    >>> float(consensus_distance({"w": jnp.array([[1.0, 0.0], [-1.0, 0.0]])}))
    1.0
    """
    count = _count(params, used, axis_name)

    def mean_square(leaf: jax.Array) -> jax.Array:
        leaf = _wide(leaf)
        first = leaf[:1]
        if axis_name is not None:
            first = jax.lax.psum(jnp.where(jax.lax.axis_index(axis_name) == 0, first, 0), axis_name)
        # Relative to the first model, so that equal models have distance 0 despite rounding of the mean.
        from_first = _masked(leaf - first, used)
        mean = _total(from_first.sum(axis=0, keepdims=True), axis_name) / count
        return _total(jnp.sum(_masked(jnp.square(from_first - mean), used)), axis_name) / count

    return jnp.sqrt(sum(map(mean_square, jax.tree.leaves(params)), start=jnp.zeros(())))


def mean_model(params: Params, used: jax.Array | None = None, axis_name: str | None = None) -> Params:
    """Returns the mean of all models. The arguments are those of `consensus_distance`."""
    count = _count(params, used, axis_name)

    def mean(leaf: jax.Array) -> jax.Array:
        return (_total(_masked(_wide(leaf), used).sum(axis=0), axis_name) / count).astype(leaf.dtype)

    return jax.tree.map(mean, params)


def _wide(leaf: jax.Array) -> jax.Array:
    """Converts half precision to float32: the sum over many nodes would overflow."""
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _masked(leaf: jax.Array, used: jax.Array | None) -> jax.Array:
    return leaf if used is None else jnp.where(used.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)


def _total(value: jax.Array, axis_name: str | None) -> jax.Array:
    return value if axis_name is None else jax.lax.psum(value, axis_name)


def _count(params: Params, used: jax.Array | None, axis_name: str | None) -> Any:
    return len(jax.tree.leaves(params)[0]) if used is None else _total(used.sum(), axis_name)


def finite_nodes(params: Params) -> jax.Array:
    """Returns whether all parameters of each node are finite, `[nodes]`."""
    leaves = [jnp.isfinite(leaf).reshape(len(leaf), -1).all(axis=1) for leaf in jax.tree.leaves(params)]
    return jnp.stack(leaves).all(axis=0)
