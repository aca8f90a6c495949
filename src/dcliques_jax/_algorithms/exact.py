"""Methods whose models end at the optimum of all data, however much nodes differ: gradient tracking and D2."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dcliques_jax import mixing
from dcliques_jax._algorithms.contract import (
    Algorithm,
    Network,
    Params,
    Round,
    State,
    Traits,
    check_optimizer,
    model_bytes,
    over_topology,
    sends,
    updated,
)
from dcliques_jax._mixing.growth import d2_growth
from dcliques_jax.topologies import Topology

_STABLE = 1 + 1e-9


def gradient_tracking(
    optimizer: optax.GradientTransformation = optax.sgd(0.1),
    *,
    clique_averaging: bool | None = False,
    weights: Any = None,
) -> Algorithm:
    """Gradient tracking: every node estimates the mean gradient of all nodes and follows it.

        Y = S + G - G_prev,   X <- W (X + u),   S <- W Y,   G_prev <- G      u = optimizer(Y), S = G_prev = 0 at first

    This is the form that adapts, then combines the models (Xu et al., 2015; Di Lorenzo and Scutari, 2016). The mean of
    Y is the mean of the gradients in every round if columns of W sum to 1, also if W changes from round to round. X and
    Y travel in one message, twice the size of a model.

    Clique Averaging must keep the mean of the gradients, too. It does so in whole cliques if nothing fails.

    Args:
      optimizer: any optax transformation of the tracked gradient Y. `optax.adam` has no bias here.
      clique_averaging: whether to average gradients over cliques before they are tracked, see `over_topology`.
      weights: gossip matrix W, doubly stochastic. Default: `topology.weights()`.

    >>> from dcliques_jax import datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> result = simulate(topologies.ring(10), data, algorithm=gradient_tracking(), epochs=1, progress=False)
    >>> float(result.history.bytes[-1] / result.history.messages[-1])  # 2 x 4 bytes x 170 parameters
    1360.0
    """
    check_optimizer(optimizer)

    def init(params: Params, network: Network) -> State:
        del network
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.vmap(optimizer.init)(params), zeros, zeros

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> tuple[Params, State]:
        del round
        gradients = mixing.mix(network.gradients, gradients)
        of_optimizer, mixed, before = state
        tracked = jax.tree.map(lambda s, new, old: s + (new - old), mixed, gradients, before)
        params, of_optimizer = updated(optimizer, params, tracked, of_optimizer)
        params, mixed = mixing.mix(network.gossip, (params, tracked))
        return params, (of_optimizer, mixed, gradients)

    network = over_topology(clique_averaging=clique_averaging, weights=weights)
    traits = Traits(
        "columns", _stood(clique_averaging), sends(lambda params: 2 * model_bytes(params)), check=_check_gradients
    )
    return Algorithm(network, init, step, traits)


def d2(
    optimizer: optax.GradientTransformation = optax.sgd(0.1),
    *,
    lazy: bool | None = None,
    clique_averaging: bool | None = False,
    weights: Any = None,
) -> Algorithm:
    """D2 (Tang et al., 2018), also known as exact diffusion and NIDS: corrects each model by its last gossip error.

        Z = X + u + C,   X+ = V Z,   C+ = C + V Z - Z      u = optimizer(G), C = 0 at first; V = W or (I + W) / 2

    Clique Averaging must keep the mean of gradients, as in `gradient_tracking`.

    It is unstable on a symmetric W with an eigenvalue below -1/3, and on most sequences of matrices. Before anything is
    compiled, the growth of differences is computed: on one symmetric matrix of any size, else up to 2000 nodes.

    Args:
      optimizer: SGD with or without momentum. The updates of optimisers that scale gradients per node, such as Adam,
        leave a bias; use `gradient_tracking` for these.
      lazy: whether to use V = (I + W) / 2, which is more stable and mixes more slowly. Default: only if W is unstable.
      clique_averaging: whether to average gradients over cliques, see `over_topology`.
      weights: gossip matrix W, doubly stochastic. Default: `topology.weights()`.

    >>> from dcliques_jax import topologies
    >>> for topology in (topologies.ring(16), topologies.torus(4, 4)):  # the smallest eigenvalues are -1/3 and -0.6
    ...     print(d2().network(topology).gossip.to_dense()[0, 0].round(3))
    0.333
    0.6
    """
    check_optimizer(optimizer)
    if lazy not in (None, True, False):
        raise ValueError(f"lazy={lazy!r} must be True, False or None")

    def init(params: Params, network: Network) -> State:
        del network
        return jax.vmap(optimizer.init)(params), jax.tree.map(jnp.zeros_like, params)

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> tuple[Params, State]:
        del round
        gradients = mixing.mix(network.gradients, gradients)
        of_optimizer, correction = state
        local, of_optimizer = updated(optimizer, params, gradients, of_optimizer)
        corrected = jax.tree.map(jnp.add, local, correction)
        # Not X+ - X - u: rounding errors of X+ would have another mean than 0, and add up in C.
        change = jax.tree.map(network.gossip.change, corrected)
        return jax.tree.map(jnp.add, corrected, change), (of_optimizer, jax.tree.map(jnp.add, correction, change))

    of_topology = over_topology(clique_averaging=clique_averaging, weights=weights)

    def network(topology: Topology) -> Network:
        found = of_topology(topology)
        if lazy or (lazy is None and d2_growth(found.gossip) > _STABLE):
            return found._replace(gossip=mixing.lazy(found.gossip))
        return found

    traits = Traits("columns", _stood(clique_averaging), sends(), check=_check_stable)
    return Algorithm(network, init, step, traits)


def _stood(clique_averaging: bool | None) -> frozenset[str]:
    """Returns the faults to stand: averages over what arrives have another mean than the gradients."""
    return Traits().stands if clique_averaging is False else frozenset()


def _check_gradients(network: Network) -> None:
    if mixing.meets(network.gradients) == "rows":
        raise ValueError(
            "the averages of gradients have another mean than the gradients, since columns of G do not sum to 1, as in "
            "cliques without some of their edges: models would end beside the optimum; pass clique_averaging=False"
        )


def _check_stable(network: Network) -> None:
    _check_gradients(network)
    growth = d2_growth(network.gossip)
    if growth > _STABLE:
        raise ValueError(
            f"D2 is unstable on these gossip matrices: differences between nodes grow by {growth:.3g} per round; use "
            "algorithms.gradient_tracking, or d2 with lazy=True if it was not"
        )
