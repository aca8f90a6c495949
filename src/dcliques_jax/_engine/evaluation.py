"""Evaluates all models, in chunks of examples.

Chunks bound the memory per node and the delay of Ctrl-C. They are not padded, so that models that couple examples, for
example by batch statistics, see real examples only.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dcliques_jax import metrics
from dcliques_jax._engine import cache_key
from dcliques_jax._engine.chunks import largest_result, over_nodes
from dcliques_jax._engine.layout import EvaluatedSlots, Layout, evaluated_slots
from dcliques_jax._engine.plan import Plan, evaluation_set
from dcliques_jax._engine.program import IN_PARTS, REPLICATED, Carry, Params, on_devices, over_runs, replicated
from dcliques_jax._mesh import transfer
from dcliques_jax._mesh.transfer import AXIS
from dcliques_jax.metrics import Metric

_MOST_BYTES = 2**24  # of the largest intermediate result when one node is evaluated
_MOST_EXAMPLES = 1000  # per chunk


class Summary(NamedTuple):
    """Measurements of the parameters alone."""

    consensus_distance: Any  # [runs]
    finite: Any  # [runs, slots] whether all parameters of the node are finite
    mean_model: Any  # [runs, ...] the mean of all models


class OfChunk(NamedTuple):
    """Measurements on a chunk of examples."""

    right: Any  # [runs, evaluated slots] number of correctly classified examples
    loss: Any  # [runs, evaluated slots] sum of the losses
    mean_model: Any  # ([runs], [runs]) both for the mean model
    nodes_right: Any  # [runs, chunk] number of evaluated nodes that classify each example correctly
    extra: Any  # (values, weights) by name of the metric, [runs, evaluated slots, ...] or [runs, ...]


class Functions(NamedTuple):
    """The functions that measure a chunk."""

    apply: Any  # None: measure the metrics only
    loss_fn: Any
    metrics: dict[str, Metric]


def summarise(params: Params, nodes: jax.Array, mesh: Mesh | None) -> Summary:
    """Measures parameters `[runs, slots, ...]`."""

    def all_runs(params: Params, nodes: jax.Array) -> Summary:
        def one_run(params: Params, nodes: jax.Array) -> Summary:
            # Without a mesh no slot is empty, and masking is not needed.
            where: Any = () if mesh is None else (nodes >= 0, AXIS)
            distance, mean = metrics.consensus_distance(params, *where), metrics.mean_model(params, *where)
            return Summary(distance, metrics.finite_nodes(params), mean)

        return over_runs(one_run)(params, nodes)

    in_specs = (jax.tree.map(lambda _: IN_PARTS, params), IN_PARTS)
    out_specs = Summary(REPLICATED, IN_PARTS, jax.tree.map(lambda _: REPLICATED, params))
    return replicated(on_devices(all_runs, mesh, in_specs, out_specs)(params, nodes), mesh)


def measure(
    functions: Functions,
    params: Params,
    mean_model: Params,
    nodes: jax.Array,
    evaluated: jax.Array | None,
    chosen: jax.Array,
    inputs: jax.Array,
    labels: jax.Array,
    *,
    mesh: Mesh | None,
) -> OfChunk:
    """Evaluates all slots, or the slots `evaluated` `[runs, ..]` of each device, on the examples `chosen` of each run.

    `evaluated` is padded with -1 to equal length on all devices, `nodes` is from `Data`, `chosen` is `[runs, chunk]`.
    """

    def one_run(test: Any, params: Params, mean_model: Params, nodes: Any, evaluated: Any, chosen: Any) -> OfChunk:
        inputs, labels = (array[chosen] for array in test)

        def measured(params: Params, of_mean_model: bool) -> Any:
            own = {name: m for name, m in functions.metrics.items() if m.of_mean_model == of_mean_model}
            extra = {name: _weighted(metric, params, inputs, labels) for name, metric in own.items()}
            if functions.apply is None:
                return None, None, None, extra
            logits = functions.apply(params, inputs)
            right, losses = metrics.predictions(logits) == labels, functions.loss_fn(logits, labels)
            return right.sum(), losses.sum(), right, extra

        rows = params if evaluated is None else jax.tree.map(lambda leaf: leaf[evaluated], params)
        count, loss, right, extra = over_nodes(lambda params: measured(params, False))(rows)
        counted = nodes >= 0 if evaluated is None else evaluated >= 0
        nodes_right = None if right is None else jnp.where(counted[:, None], right, False).sum(axis=0)
        if mesh is not None and nodes_right is not None:
            nodes_right = jax.lax.psum(nodes_right, AXIS)
        *of_mean, _, extra_of_mean = measured(mean_model, True)
        return OfChunk(count, loss, tuple(of_mean), nodes_right, extra | extra_of_mean)

    def all_runs(params: Params, mean_model: Params, nodes: Any, evaluated: Any, chosen: Any, test: Any) -> OfChunk:
        return over_runs(functools.partial(one_run, test))(params, mean_model, nodes, evaluated, chosen)

    everywhere = jax.tree.map(lambda _: REPLICATED, mean_model)
    in_specs = (jax.tree.map(lambda _: IN_PARTS, params), everywhere, IN_PARTS, IN_PARTS, REPLICATED, REPLICATED)
    of_metrics: Any = {name: REPLICATED if m.of_mean_model else IN_PARTS for name, m in functions.metrics.items()}
    out_specs = OfChunk(IN_PARTS, IN_PARTS, REPLICATED, REPLICATED, of_metrics)
    lifted = on_devices(all_runs, mesh, in_specs, out_specs)
    return replicated(lifted(params, mean_model, nodes, evaluated, chosen, (inputs, labels)), mesh)


def _weighted(metric: Metric, params: Params, inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the values of a metric for one model, and their weights in the mean over chunks."""
    found = metric.fn(params, inputs, labels)
    value, weight = found if metric.weighted else (found, len(labels))
    return jnp.asarray(value), jnp.broadcast_to(weight, jnp.shape(value))


def evaluate(
    functions: Functions, params: Params, nodes: jax.Array, *others: Any, mesh: Mesh | None
) -> tuple[Summary, OfChunk]:
    """Measures parameters, and all models on the first chunk; `others` are the last arguments of `measure`."""
    summary = summarise(params, nodes, mesh)
    return summary, measure(functions, params, summary.mean_model, nodes, *others, mesh=mesh)


class Evaluation:
    """The compiled evaluation of all runs of a layout."""

    def __init__(self, layout: Layout, plan: Plan, carry: Carry, nodes: jax.Array) -> None:
        self._layout, self._nodes = layout, nodes
        self._slots: EvaluatedSlots = evaluated_slots(layout, plan)
        recipe, mesh = layout.recipe, layout.mesh
        inputs, labels = evaluation_set(layout.runs[0].data.dataset, plan.evaluate_on)
        needed, chosen = np.unique(np.stack([plan.examples(run) for run in layout.runs]), return_inverse=True)
        self._chosen = chosen.reshape(len(layout.runs), -1).astype(np.int32)
        self._test = tuple(transfer.put_replicated(array[needed], mesh) for array in (inputs, labels))
        one_node = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), carry.params)
        with cache_key.fresh_traces():
            largest = largest_result(recipe.model.apply, one_node, inputs[:1])
        most = int(np.clip(_MOST_BYTES // largest, 1, _MOST_EXAMPLES))
        self._chunks = [self._chosen[:, a:b] for a, b in _chunks(self._chosen.shape[1], most)]
        self._in_chunks = {name: metric for name, metric in recipe.metrics.items() if not metric.whole}
        self._whole = {name: metric for name, metric in recipe.metrics.items() if metric.whole}
        where = None if mesh is None else NamedSharding(mesh, REPLICATED)
        mean = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0], *leaf.shape[2:]), leaf.dtype, sharding=where),
            carry.params,
        )
        functions = Functions(recipe.model.apply, recipe.loss_fn, self._in_chunks)
        first, *others = self._chunks
        self._first = self._compiled(evaluate, functions, first, carry.params)
        sizes = {chunk.shape[1]: chunk for chunk in others}
        programs = {
            size: self._compiled(measure, functions, chunk, carry.params, mean) for size, chunk in sizes.items()
        }
        self._others = [(programs[chunk.shape[1]], chunk) for chunk in others]
        if self._whole:
            only = Functions(None, None, self._whole)
            self._others.append((self._compiled(measure, only, self._chosen, carry.params, mean), self._chosen))

    def _compiled(self, function: Any, functions: Functions, chosen: np.ndarray, *models: Params) -> Any:
        mesh = self._layout.mesh
        lowered = cache_key.lower(function, functions, *models, *self._arguments(chosen), mesh=mesh)
        return lowered.compile(mesh)

    def _arguments(self, chosen: np.ndarray) -> tuple[Any, ...]:
        """The arguments of programs after the models."""
        return self._nodes, self._slots.chosen, chosen, *self._test

    def __call__(self, params: Params, interrupted: Callable[[], bool]) -> dict[str, Any] | None:
        """Measures all models; returns None if interrupted. All arrays have the runs on their first axis."""
        summary, chunk = self._first(params, *self._arguments(self._chunks[0]))
        found = [jax.device_get(chunk)]
        for program, chosen in self._others:
            if transfer.of_first_process(interrupted()):
                return None
            found.append(jax.device_get(program(params, summary.mean_model, *self._arguments(chosen))))
        chunks = found[: len(self._chunks)]
        count = self._chosen.shape[1]
        right, loss = (self._of_nodes(_total(c[field] for c in chunks)) for field in (0, 1))
        mean_right, mean_loss = (_total(c.mean_model[part] for c in chunks) for part in (0, 1))
        kind = chunks[0].loss.dtype
        extra = {name: self._average([c.extra[name] for c in chunks], m) for name, m in self._in_chunks.items()}
        extra |= {name: self._average([found[-1].extra[name]], m) for name, m in self._whole.items()}
        return {
            # Divide on the host: XLA multiplies by a rounded inverse, and 97 of 97 would not be 1.
            "accuracy": (right / count).astype(np.float32),
            "loss": _as_type(loss / count, kind),
            "consensus_distance": _as_type(np.asarray(jax.device_get(summary.consensus_distance)), kind),
            "mean_model_accuracy": (mean_right / count).astype(np.float32),
            "mean_model_loss": _as_type(mean_loss / count, kind),
            "nodes_right": np.concatenate([c.nodes_right for c in chunks], axis=1),
            "extra": {name: extra[name] for name in self._layout.recipe.metrics},
            "finite": self._layout.of_nodes(np.asarray(jax.device_get(summary.finite))),
        }

    def _of_nodes(self, values: np.ndarray) -> np.ndarray:
        """Selects the values of evaluated nodes from those of evaluated slots `[runs, slots, ...]`."""
        return np.stack([run[found] for run, found in zip(values, self._slots.found, strict=True)])

    def _average(self, chunks: list[Any], metric: Metric) -> np.ndarray:
        """Returns the weighted mean over chunks; NaN where the weights are 0."""
        kind = chunks[0][0].dtype
        weights = _total(weights for _, weights in chunks)
        # A value of weight 0 may be NaN, for example the accuracy of a class without examples in a chunk.
        total = _total(np.where(weights > 0, _double(values), 0) * weights for values, weights in chunks)
        mean = np.divide(total, weights, out=np.full(np.shape(total), np.nan), where=weights > 0)
        mean = _double(chunks[0][0]) if metric.whole and not metric.weighted else mean
        mean = _as_type(mean, kind if kind.kind == "f" else np.dtype(np.float32))
        return mean if metric.of_mean_model else self._of_nodes(mean)


def _chunks(count: int, most: int) -> list[tuple[int, int]]:
    """Returns the bounds of chunks of at most `most` examples; equal chunks if a size above `most / 2` divides `count`.

    >>> _chunks(10, 4), _chunks(6, 3)
    ([(0, 4), (4, 8), (8, 10)], [(0, 3), (3, 6)])
    """
    most = min(most, count)
    divisors = [size for size in range(most, most // 2, -1) if count % size == 0]
    size = divisors[0] if divisors else most
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _double(values: Any) -> np.ndarray:
    return np.asarray(values, np.float64)


def _total(values: Iterable[Any]) -> np.ndarray:
    return functools.reduce(np.add, map(_double, values))


def _as_type(values: np.ndarray, kind: np.dtype[Any]) -> np.ndarray:
    """Converts values to a type that NumPy can save; half precision becomes float32."""
    return np.asarray(values, np.promote_types(kind, np.float32) if kind.kind == "f" else np.float32)
