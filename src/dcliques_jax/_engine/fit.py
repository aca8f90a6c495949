"""Checks that the parts of a run fit together, by tracing them. Nothing is compiled."""

import contextlib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax import _checks, mixing
from dcliques_jax._arrays import checksum
from dcliques_jax._engine import cache_key, outages
from dcliques_jax._engine.plan import Plan, Recipe, Run, evaluation_set
from dcliques_jax._mesh.transfer import is_key
from dcliques_jax._mixing.forms import is_weights
from dcliques_jax._models.contract import parts_of
from dcliques_jax.algorithms import Algorithm, Network, Round
from dcliques_jax.metrics import Metric, as_metric
from dcliques_jax.results import MEASURED, State

INITS = ("shared", "averaged", "independent")

_SLOW_CONVOLUTION = (
    "the model has convolutions that XLA runs many times slower on CPUs than dcliques_jax.layers.Conv, which "
    "replaces flax's nn.Conv and has the same parameters"
)
_CONTRACT = (
    "pass Algorithm(network(topology), init(params, network), step(params, gradients, state, network, round)), for "
    "example algorithms.dsgd(optax.sgd(0.1))"
)


def check_algorithm(algorithm: Any) -> None:
    """Raises a `ValueError` unless the value is an `Algorithm` whose functions take the right arguments."""
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm={algorithm!r} is not an algorithm: {_CONTRACT}")
    for name, count in (("network", 1), ("init", 2), ("step", 5)):
        function = getattr(algorithm, name)
        if not callable(function):
            raise ValueError(f"algorithm.{name}={function!r} is not a function: {_CONTRACT}")
        try:
            inspect.signature(function).bind(*[None] * count)
        except TypeError as error:
            raise ValueError(f"algorithm.{name} does not take {count} arguments ({error}): {_CONTRACT}") from None
        except ValueError:  # a function without a signature
            continue


class RefusedError(ValueError):
    """An algorithm does not allow a topology or faults."""


def make_network(run: Run, recipe: Recipe) -> Network:
    """Builds the network of a run and checks that it meets the requirements of the algorithm, also under faults."""
    try:
        return _network(run, recipe)
    except ValueError as error:
        raise RefusedError(*error.args) from error


def _network(run: Run, recipe: Recipe) -> Network:
    algorithm = recipe.algorithm_of(run)
    network = algorithm.network(run.topology)
    if not isinstance(network, Network) or not all(isinstance(weights, mixing.Weights) for weights in network):
        raise ValueError(f"algorithm.network returns {network!r}: it must return algorithms.Network(gossip, gradients)")
    mixing.check_gossip(network.gossip, run.topology, algorithm.traits.requires)
    if network.gradients.num_nodes != run.topology.num_nodes:
        raise ValueError(
            f"gradient_weights are for {network.gradients.num_nodes} nodes, but the topology has "
            f"{run.topology.num_nodes}"
        )
    if algorithm.traits.check is not None:
        algorithm.traits.check(network)
    outages.check(recipe.faults, run.topology, network, algorithm.traits)
    return network


def check_metrics(given: Any) -> dict[str, Metric]:
    """Returns the metrics by name, after checking the functions and the names."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"metrics={given!r} must be a dictionary, metrics={{'name': fn}}")
    found = {}
    for name, metric in (given or {}).items():
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"names of metrics must be strings without '/', not {name!r}")
        if name in (*MEASURED, "round", "epoch", "seed", "node"):
            raise ValueError(f"metrics={{{name!r}: ...}} is measured already: choose another name")
        found[name] = as_metric(metric)
        if not callable(found[name].fn):
            raise ValueError(f"metrics[{name!r}]={metric!r} is not a function of (params, inputs, labels)")
    return found


def check_fit(run: Run, plan: Plan, recipe: Recipe, network: Network) -> Any:
    """Raises a `ValueError` if the parts of a run do not fit together.

    Returns the shapes of one node's parameters and state of the model, and of the algorithm's state; None for a state
    that depends on values.
    """
    params, model_state = _check_model(run, recipe)
    _check_batches(run, plan, recipe, model_state)
    _check_gossip_of_state(recipe.algorithm_of(run), network, recipe, model_state)
    _check_init(recipe.init, params, run.data.num_nodes)
    _check_metrics(run, plan, recipe, parts_of(params, model_state))
    _check_augment(run, recipe)
    with contextlib.suppress(jax.errors.JAXTypeError):  # an algorithm that depends on values is checked later
        num_nodes = run.data.num_nodes
        stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_nodes, *leaf.shape), leaf.dtype), params)
        algorithm = recipe.algorithm_of(run)
        state = jax.eval_shape(lambda params: as_arrays(algorithm.init(params, network)), stacked)
        check_state(state, num_nodes)
        _check_step(algorithm, stacked, state, network)
        return params, model_state, state
    return params, model_state, None


def as_arrays(state: Any) -> Any:
    """Converts Python numbers in the state of an algorithm to arrays."""
    return jax.tree.map(jnp.asarray, state)


def check_state(state: Any, num_nodes: int) -> None:
    """Raises a `ValueError` unless every leaf of an algorithm's state has one row per node or is a scalar."""
    if any(map(is_weights, jax.tree.leaves(state, is_leaf=is_weights))):  # their indices would not follow the slots
        raise ValueError("algorithm.init returns Weights: step gets them as its argument network, leave them out")
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if leaf.shape[:1] not in ((), (num_nodes,)):
            raise ValueError(
                f"algorithm.init returns state{jax.tree_util.keystr(path)} of shape {list(leaf.shape)}: it must have "
                f"the {num_nodes} nodes on its first axis, or be a scalar"
            )


def _check_model(run: Run, recipe: Recipe) -> Any:
    """Checks that model and loss fit the data; returns the shapes of one node's parameters and state of the model."""
    model, dataset = recipe.model, run.data.dataset
    inputs, labels = (array[:1].repeat(2, axis=0) for array in (dataset.train_inputs, dataset.train_labels))
    made = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), inputs)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"the model's init returns {type(made).__name__}: it must return (params, state)")
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")) if model.draws else None
    outputs = _check_apply(recipe, made, inputs, True, key)
    if shapes(_check_apply(recipe, made, inputs, False, None)) != shapes(outputs):
        raise ValueError("the model returns outputs of other shapes in evaluation than in training")
    evaluated = functools.partial(model.apply, train=False, key=None)
    if jax.default_backend() == "cpu" and "conv_general_dilated" in str(jax.make_jaxpr(evaluated)(*made, inputs)):
        _checks.warn(_SLOW_CONVOLUTION)
    expected = (*labels.shape, dataset.num_classes)
    if dataset.num_classes and (shape := getattr(outputs, "shape", None)) != expected:
        raise ValueError(
            f"the model returns logits of shape {shape} for two examples of {dataset.num_classes} classes: "
            f"it must return {expected}"
        )
    losses = jax.eval_shape(recipe.loss_fn, outputs, labels)
    each = labels.shape if dataset.num_classes else (2,)
    if getattr(losses, "shape", None) != each:
        per = "label" if len(each) > 1 else "example"
        raise ValueError(f"loss_fn returns {losses} for two examples: it must return one loss per {per}, not a mean")
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise ValueError(f"loss_fn returns {losses.dtype} losses: they must be real numbers to have a gradient")
    return made


def _check_apply(recipe: Recipe, made: Any, inputs: Any, train: bool, key: Any) -> Any:
    """Returns the shapes of outputs, after checking that the state keeps its structure."""
    found = jax.eval_shape(functools.partial(recipe.model.apply, train=train), *made, inputs, key=key)
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"the model's apply returns {type(found).__name__}: it must return (outputs, state)")
    before, after = (shapes(state, exactly=True) for state in (made[1], found[1]))
    if before != after:
        raise ValueError(f"the model's apply returns a state {after}, but takes {before}: it must return what it takes")
    return found[0]


def _check_batches(run: Run, plan: Plan, recipe: Recipe, state: Any) -> None:
    """Raises a `ValueError` if examples of a short batch would be normalised together with its padding."""
    if not (recipe.model.couples_examples or jax.tree.leaves(state)):
        return
    lengths = np.diff(plan.bounds(run), axis=1)
    if (lengths < plan.batch_size).any():
        raise ValueError(
            f"the model computes statistics of batches, but some have fewer than batch_size={plan.batch_size} examples "
            f"(node {(lengths < plan.batch_size).any(axis=1).argmax()}, of {run.data.sizes.min()} to "
            f"{run.data.sizes.max()} examples): pass dataset.sampled('full_batches'), or a batch_size that divides"
        )


def _check_gossip_of_state(algorithm: Algorithm, network: Network, recipe: Recipe, state: Any) -> None:
    if not recipe.model.gossip_state:
        return
    if algorithm.traits.requires == "mass":
        raise ValueError("this algorithm sends shares of mass, not averages: omit models.with_statistics(gossip=True)")
    if isinstance(network.gossip, mixing.Paced) and network.gossip.omegas is not None:
        raise ValueError(
            "Chebyshev gossip has negative weights, which can make a running variance negative: pass "
            "repeated_gossip(chebyshev=False), or omit models.with_statistics(gossip=True)"
        )
    if not jax.tree.leaves(state):
        raise ValueError("models.with_statistics(gossip=True) needs a model with a state, such as batch statistics")
    for place, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            name = jax.tree_util.keystr(place)
            raise ValueError(f"the model's state{name} has type {leaf.dtype}, and only real numbers can be averaged")


def _check_init(init: Any, params: Any, num_nodes: int) -> None:
    if isinstance(init, State):
        return  # checked by `state.start`, which knows the algorithm's state
    if isinstance(init, str):
        return _checks.choice("init", init, INITS)
    given, one = shapes(init), shapes(params)
    of_all = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_nodes, *leaf.shape), leaf.dtype), params)
    if given not in (one, shapes(of_all)):
        raise ValueError(
            f"init has leaves {given}, but one node's parameters are {one}: pass those, or the stacked parameters of "
            f"all {num_nodes} nodes, or result.state"
        )
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(init)):
        raise ValueError("init holds NaN or infinite values: pass finite parameters")


def _check_metrics(run: Run, plan: Plan, recipe: Recipe, model: tuple[Any, ...]) -> None:
    two = [array[:1].repeat(2, axis=0) for array in evaluation_set(run.data.dataset, plan.evaluate_on)]
    for name, metric in recipe.metrics.items():
        found = jax.eval_shape(metric.fn, *model, *two)
        parts, expected = (found, "two arrays (values, weights)") if metric.weighted else ((found,), "one array")
        if not isinstance(parts, tuple) or not all(isinstance(part, jax.ShapeDtypeStruct) for part in parts):
            raise ValueError(f"metrics[{name!r}] returns {found}: it must return {expected}, for one node")
        if metric.weighted and (len(parts) != 2 or parts[1].shape not in ((), parts[0].shape)):
            told = [list(part.shape) for part in parts]
            raise ValueError(f"metrics[{name!r}] returns arrays of shapes {told}: every value must have one weight")
        if any(jnp.issubdtype(part.dtype, jnp.complexfloating) or is_key(part) for part in parts):
            raise ValueError(f"metrics[{name!r}] returns {parts[0].dtype}: it must return real numbers")


def _check_augment(run: Run, recipe: Recipe) -> None:
    if recipe.augment is None:
        return
    inputs = run.data.dataset.train_inputs[:1].repeat(2, axis=0)
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    found, kind = jax.eval_shape(recipe.augment, key, inputs), jax.dtypes.canonicalize_dtype(inputs.dtype)
    if getattr(found, "shape", None) != inputs.shape or found.dtype != kind:
        raise ValueError(
            f"augment returns {found} for a batch of shape {inputs.shape} and type {kind}: it must return such a batch"
        )


def metric_checksums(run: Run, plan: Plan, recipe: Recipe, model: tuple[Any, ...]) -> dict[str, str]:
    """Returns checksums of the lowered metrics by name, for one node with a model of these shapes."""
    inputs, labels = evaluation_set(run.data.dataset, plan.evaluate_on)
    with cache_key.fresh_traces():
        texts = {
            name: jax.jit(functools.partial(metric.fn)).lower(*model, inputs[:2], labels[:2]).as_text()
            for name, metric in recipe.metrics.items()
        }
    return {name: checksum(text.encode(), repr(recipe.metrics[name][1:]).encode()) for name, text in texts.items()}


def _check_step(algorithm: Algorithm, params: Any, state: Any, network: Network) -> None:
    """Raises a `ValueError` unless a step returns parameters and state of the same structure and shapes as it takes."""

    def step(params: Any, gradients: Any, state: Any, nodes: Any, key: Any) -> Any:
        round = Round(jnp.zeros((), jnp.int32), key, nodes, lambda other: other)
        return algorithm.step(params, gradients, state, network.at(round), round)

    nodes = jax.ShapeDtypeStruct(jax.tree.leaves(params)[0].shape[:1], jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))  # as in rounds
    after = jax.eval_shape(step, params, params, state, nodes, key)
    if not isinstance(after, tuple) or len(after) != 2:
        raise ValueError(f"algorithm.step returns {type(after).__name__}: it must return (params, state)")
    for name, before, returned in zip(("params", "state"), (params, state), after, strict=True):
        structures: list[Any] = [jax.tree.structure(tree) for tree in (before, returned)]
        if structures[0] != structures[1]:
            raise ValueError(
                f"algorithm.step returns {name} of structure {structures[1]}, but takes {structures[0]}: it must "
                "return what the next round takes"
            )
        takes, gives = shapes(before, exactly=True), shapes(returned, exactly=True)
        wrong = [place for place in takes if takes[place] != gives[place]]
        if wrong:
            raise ValueError(
                f"algorithm.step returns {name}{wrong[0]} as {gives[wrong[0]]}, but takes {takes[wrong[0]]}: it must "
                "return what the next round takes"
            )


def shapes(tree: Any, *, exactly: bool = False) -> dict[str, str]:
    """Returns type and shape of every leaf by path. Floating-point types count as equal unless `exactly`."""

    def described(leaf: Any) -> str:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        floating = not exactly and jnp.issubdtype(array.dtype, jnp.floating)
        return f"{'float' if floating else array.dtype}{list(array.shape)}"

    return {jax.tree_util.keystr(place): described(leaf) for place, leaf in jax.tree_util.tree_leaves_with_path(tree)}
