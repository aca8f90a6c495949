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

from dcliques_jax import _random, metrics
from dcliques_jax._engine import cache_key
from dcliques_jax._engine.chunks import largest_result, over_nodes
from dcliques_jax._engine.layout import EvaluatedSlots, Layout, evaluated_slots
from dcliques_jax._engine.plan import Plan, evaluation_set
from dcliques_jax._engine.program import (
    IN_PARTS,
    REPLICATED,
    Carry,
    Params,
    in_turn,
    on_devices,
    over_runs,
    replicated,
)
from dcliques_jax._mesh import transfer
from dcliques_jax._mesh.transfer import AXIS
from dcliques_jax._models.contract import parts_of
from dcliques_jax.metrics import Metric

_MOST_BYTES = 2**24  # of the largest intermediate result when one node is evaluated
_MOST_EXAMPLES = 1000  # per chunk


class Models(NamedTuple):
    """Models, of all nodes or one."""

    params: Params
    state: Any  # without leaves if they have none


class Summary(NamedTuple):
    """Measurements of the models alone."""

    consensus_distance: Any  # [runs]
    finite: Any  # [runs, slots] whether all parameters of the node are finite
    mean_model: Models  # [runs, ...] the mean of all models


class Score(NamedTuple):
    """How a model does on a chunk of examples."""

    right: Any  # [] number of labels that it predicts
    loss: Any  # [] sum of the losses
    of_examples: Any  # [chunk] whether it predicts all labels of an example
    right_labels: Any  # [chunk] number of labels of an example that it predicts
    extra: Any  # (values, weights) by name of the metric


class OfChunk(NamedTuple):
    """Measurements on a chunk of examples."""

    right: Any  # [runs, evaluated slots] number of correctly classified examples
    loss: Any  # [runs, evaluated slots] sum of the losses
    mean_model: Any  # ([runs], [runs]) both for the mean model
    nodes_right: Any  # [runs, chunk] number of evaluated nodes that classify each example correctly
    local_right: Any  # [runs, evaluated slots] number of right labels of the node's own test examples; None without
    extra: Any  # (values, weights) by name of the metric, [runs, evaluated slots, ...] or [runs, ...]


class Functions(NamedTuple):
    """The functions that measure a chunk."""

    apply: Any  # None: measure the metrics only
    loss_fn: Any
    metrics: dict[str, Metric]


def summarise(apply: Any, models: Models, nodes: jax.Array, calibration: Any, mesh: Mesh | None) -> Summary:
    """Measures models `[runs, slots, ...]`. Batches `calibration`, if any, estimate the state of the mean model."""

    def all_runs(models: Models, nodes: jax.Array, calibration: Any) -> Summary:
        def one_run(models: Models, nodes: jax.Array, calibration: Any) -> Summary:
            # Without a mesh no slot is empty, and masking is not needed.
            where: Any = () if mesh is None else (nodes >= 0, AXIS)
            distance, mean = metrics.consensus_distance(models.params, *where), metrics.mean_model(models, *where)
            mean = mean if calibration is None else _calibrated(apply, mean, calibration)
            return Summary(distance, metrics.finite_nodes(models.params), mean)

        return over_runs(one_run)(models, nodes, calibration)

    in_specs = (jax.tree.map(lambda _: IN_PARTS, models), IN_PARTS, REPLICATED)
    out_specs = Summary(REPLICATED, IN_PARTS, jax.tree.map(lambda _: REPLICATED, models))
    return replicated(on_devices(all_runs, mesh, in_specs, out_specs)(models, nodes, calibration), mesh)


def _calibrated(apply: Any, mean: Models, batches: jax.Array) -> Models:
    """Lets the mean model see batches `[batches, batch, ...]` in training, and returns it with its state after them."""

    def one(state: Any, numbered: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        number, inputs = numbered
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), number)
        return apply(mean.params, state, inputs, train=True, key=key)[1], None

    return mean._replace(state=jax.lax.scan(one, mean.state, (jnp.arange(len(batches)), batches))[0])


def measure(
    functions: Functions,
    models: Models,
    mean_model: Models,
    nodes: jax.Array,
    evaluated: jax.Array | None,
    own_tests: jax.Array | None,
    chosen: jax.Array,
    inputs: jax.Array,
    labels: jax.Array,
    *,
    mesh: Mesh | None,
) -> OfChunk:
    """Evaluates all slots, or the slots `evaluated` `[runs, ..]` of each device, on the examples `chosen` of each run.

    `evaluated` is padded with -1 to equal length on all devices, `nodes` is from `Data`, `chosen` is `[runs, chunk]`.
    `own_tests`, `[runs, evaluated slots, chunk]`, tells which examples are a node's own.
    """

    def one_run(test: Any, models: Models, mean: Models, nodes: Any, evaluated: Any, own: Any, chosen: Any) -> OfChunk:
        inputs, labels = (array[chosen] for array in test)
        rows = models if evaluated is None else jax.tree.map(lambda leaf: leaf[evaluated], models)
        each: Score = over_nodes(lambda *model: _score(functions, Models(*model), inputs, labels, False))(*rows)
        counted = nodes >= 0 if evaluated is None else evaluated >= 0
        right = each.of_examples
        nodes_right = None if right is None else jnp.where(counted[:, None], right, False).sum(axis=0)
        if mesh is not None and nodes_right is not None:
            nodes_right = jax.lax.psum(nodes_right, AXIS)
        local = None if own is None or right is None else jnp.where(own, each.right_labels, 0).sum(axis=1)
        of_mean = _score(functions, mean, inputs, labels, True)
        return OfChunk(each.right, each.loss, of_mean[:2], nodes_right, local, each.extra | of_mean.extra)

    def all_runs(*args: Any) -> OfChunk:
        *of_runs, test = args
        # Measured with 3 runs of 100 nodes: 0.36 s per run in turn, 0.45 to 0.56 together, 0.32 alone.
        return over_runs(functools.partial(one_run, test), in_turn)(*of_runs)

    everywhere = jax.tree.map(lambda _: REPLICATED, mean_model)
    of_slots = jax.tree.map(lambda _: IN_PARTS, models)
    in_specs = (of_slots, everywhere, IN_PARTS, IN_PARTS, IN_PARTS, REPLICATED, REPLICATED)
    of_metrics: Any = {name: REPLICATED if m.of_mean_model else IN_PARTS for name, m in functions.metrics.items()}
    out_specs = OfChunk(IN_PARTS, IN_PARTS, REPLICATED, REPLICATED, IN_PARTS, of_metrics)
    lifted = on_devices(all_runs, mesh, in_specs, out_specs)
    return replicated(lifted(models, mean_model, nodes, evaluated, own_tests, chosen, (inputs, labels)), mesh)


def _score(functions: Functions, model: Models, inputs: jax.Array, labels: jax.Array, of_mean_model: bool) -> Score:
    """Evaluates one model on a chunk of examples."""
    wanted = {name: metric for name, metric in functions.metrics.items() if metric.of_mean_model == of_mean_model}
    extra = {name: _weighted(metric, model, inputs, labels) for name, metric in wanted.items()}
    if functions.apply is None:
        return Score(None, None, None, None, extra)
    outputs, _ = functions.apply(*model, inputs, train=False, key=None)
    losses = functions.loss_fn(outputs, labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        none = jnp.zeros(len(labels), bool)
        return Score(jnp.zeros((), jnp.int32), losses.sum(), none, none, extra)
    right = metrics.predictions(outputs) == labels
    if labels.ndim == 1:
        return Score(right.sum(), losses.sum(), right, right, extra)
    padding = labels < 0
    loss = jnp.where(padding, 0, losses).sum()
    return Score(right.sum(), loss, (right | padding).all(axis=1), right.sum(axis=1), extra)


def _weighted(metric: Metric, model: Models, inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the values of a metric for one model, and their weights in the mean over chunks."""
    found = metric.fn(*parts_of(*model), inputs, labels)
    value, weight = found if metric.weighted else (found, len(labels))
    return jnp.asarray(value), jnp.broadcast_to(weight, jnp.shape(value))


def evaluate(
    functions: Functions, models: Models, calibration: Any, nodes: jax.Array, *others: Any, mesh: Mesh | None
) -> tuple[Summary, OfChunk]:
    """Measures parameters, and all models on the first chunk; `others` are the last arguments of `measure`."""
    summary = summarise(functions.apply, models, nodes, calibration, mesh)
    return summary, measure(functions, models, summary.mean_model, nodes, *others, mesh=mesh)


class Evaluation:
    """The compiled evaluation of all runs of a layout."""

    def __init__(self, layout: Layout, plan: Plan, carry: Carry, nodes: jax.Array) -> None:
        self._layout, self._nodes = layout, nodes
        self._slots: EvaluatedSlots = evaluated_slots(layout, plan)
        recipe, mesh = layout.recipe, layout.mesh
        inputs, labels = evaluation_set(layout.runs[0].data.dataset, plan.evaluate_on)
        examples = np.stack([plan.examples(run) for run in layout.runs])
        needed, chosen = np.unique(examples, return_inverse=True)
        self._chosen = chosen.reshape(len(layout.runs), -1).astype(np.int32)
        self._test = tuple(transfer.put_replicated(array[needed], mesh) for array in (inputs, labels))
        # [runs, examples] number of labels of each: one, or positions of sequences without padding
        self._lengths = np.ones(self._chosen.shape, np.int64)
        if labels.dtype.kind == "i":
            self._lengths = (labels[examples].reshape(*self._chosen.shape, -1) >= 0).sum(axis=2)
        self._own_tests = own_tests(layout, plan, self._slots, examples)
        models = Models(carry.params, carry.model)
        batches = calibration(layout, plan) if jax.tree.leaves(models.state) else None
        self._calibration = None if batches is None else transfer.put_replicated(batches, mesh)
        one_node = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), models)
        with cache_key.fresh_traces():
            largest = largest_result(
                functools.partial(recipe.model.apply, train=False, key=None), *one_node, inputs[:1]
            )
        most = int(np.clip(_MOST_BYTES // largest, 1, _MOST_EXAMPLES))
        self._chunks = [slice(*bounds) for bounds in _chunks(self._chosen.shape[1], most)]
        self._in_chunks = {name: metric for name, metric in recipe.metrics.items() if not metric.whole}
        self._whole = {name: metric for name, metric in recipe.metrics.items() if metric.whole}
        where = None if mesh is None else NamedSharding(mesh, REPLICATED)
        mean = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0], *leaf.shape[2:]), leaf.dtype, sharding=where), models
        )
        functions = Functions(recipe.model.apply, recipe.loss_fn, self._in_chunks)
        first, *others = self._chunks
        self._first = self._compiled(evaluate, functions, first, models, self._calibration)
        sizes = {chunk.stop - chunk.start: chunk for chunk in others}
        programs = {size: self._compiled(measure, functions, chunk, models, mean) for size, chunk in sizes.items()}
        self._others = [(programs[chunk.stop - chunk.start], chunk) for chunk in others]
        if self._whole:
            only = Functions(None, None, self._whole)
            everything = slice(0, self._chosen.shape[1])
            self._others.append((self._compiled(measure, only, everything, models, mean), everything))

    def _compiled(self, function: Any, functions: Functions, chunk: slice, *models: Any) -> Any:
        mesh = self._layout.mesh
        lowered = cache_key.lower(function, functions, *models, *self._arguments(chunk), mesh=mesh)
        return lowered.compile(mesh)

    def _arguments(self, chunk: slice) -> tuple[Any, ...]:
        """The arguments of programs after the models."""
        own = None if self._own_tests is None else self._own_tests[:, :, chunk]
        return self._nodes, self._slots.chosen, own, self._chosen[:, chunk], *self._test

    def __call__(self, carry: Carry, interrupted: Callable[[], bool]) -> dict[str, Any] | None:
        """Measures all models; returns None if interrupted. All arrays have the runs on their first axis."""
        models = Models(carry.params, carry.model)
        summary, chunk = self._first(models, self._calibration, *self._arguments(self._chunks[0]))
        found = [jax.device_get(chunk)]
        for program, chosen in self._others:
            if transfer.of_first_process(interrupted()):
                return None
            found.append(jax.device_get(program(models, summary.mean_model, *self._arguments(chosen))))
        chunks = found[: len(self._chunks)]
        extra = {name: self._average([c.extra[name] for c in chunks], m) for name, m in self._in_chunks.items()}
        extra |= {name: self._average([found[-1].extra[name]], m) for name, m in self._whole.items()}
        return self._scores(chunks) | {
            "consensus_distance": _as_type(
                np.asarray(jax.device_get(summary.consensus_distance)), chunks[0].loss.dtype
            ),
            "extra": {name: extra[name] for name in self._layout.recipe.metrics},
            "finite": self._layout.of_nodes(np.asarray(jax.device_get(summary.finite))),
        }

    def _scores(self, chunks: list[OfChunk]) -> dict[str, Any]:
        """Returns losses and accuracies; there are no accuracies of real numbers."""
        count, kind = self._lengths.sum(axis=1, keepdims=True), chunks[0].loss.dtype
        right, loss = (self._of_nodes(_total(c[field] for c in chunks)) for field in (0, 1))
        mean_right, mean_loss = (_total(c.mean_model[part] for c in chunks) for part in (0, 1))
        one_each = np.reshape(count, -1)
        has_accuracy = np.float32(1 if self._test[1].dtype == np.int32 else np.nan)
        local = np.full(right.shape, np.nan)
        if self._own_tests is not None:
            held = self._of_nodes(np.einsum("rse,re->rs", self._own_tests, self._lengths, dtype=np.float64))
            local = np.divide(self._of_nodes(_total(c.local_right for c in chunks)), held, out=local, where=held > 0)
        return {
            # Divide on the host: XLA multiplies by a rounded inverse, and 97 of 97 would not be 1.
            "accuracy": (right / count).astype(np.float32) * has_accuracy,
            "loss": _as_type(loss / count, kind),
            "local_accuracy": local.astype(np.float32) * has_accuracy,
            "mean_model_accuracy": (mean_right / one_each).astype(np.float32) * has_accuracy,
            "mean_model_loss": _as_type(mean_loss / one_each, kind),
            "nodes_right": np.concatenate([c.nodes_right for c in chunks], axis=1),
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


def own_tests(layout: Layout, plan: Plan, slots: EvaluatedSlots, examples: np.ndarray) -> np.ndarray | None:
    """Returns which evaluated examples `[runs, examples]` are a node's own, `[runs, evaluated slots, examples]`."""
    if plan.evaluate_on != "test" or layout.runs[0].data.test_indices is None:
        return None
    width = layout.num_slots if slots.chosen is None else slots.chosen.shape[1]
    found = np.zeros((len(layout.runs), width, examples.shape[1]), bool)
    for run, evaluated, chosen, own in zip(layout.runs, slots.found, examples, found, strict=True):
        assert run.data.test_indices is not None
        for slot, node in zip(evaluated, plan.nodes(run), strict=True):
            own[slot] = np.isin(chosen, run.data.test_indices[node])
    return found


def calibration(layout: Layout, plan: Plan) -> np.ndarray | None:
    """Returns the batches that calibrate the mean model, `[runs, batches, batch, ...]`; None if nothing does."""
    count = layout.recipe.model.calibration_batches
    if not count:
        return None
    dataset, size = layout.runs[0].data.dataset, plan.batch_size
    rows = [
        _random.generator(run.seed, 3).permutation(np.unique(run.data.indices[run.data.indices >= 0]))
        for run in layout.runs
    ]
    return np.stack([dataset.train_inputs[np.resize(each, count * size)] for each in rows]).reshape(
        len(rows), count, size, *dataset.train_inputs.shape[1:]
    )


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
