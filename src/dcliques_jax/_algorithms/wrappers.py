"""Algorithms made of algorithms: fewer or more gossips per round, and gradients elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax import _checks, mixing
from dcliques_jax._algorithms.contract import Algorithm, Network, Params, Round, State
from dcliques_jax._mixing.paced import chebyshev_omegas, paced
from dcliques_jax.topologies import Topology


def local_steps(algorithm: Algorithm, k: int) -> Algorithm:
    """Lets nodes communicate after every k-th round only; in the others, they train on their own.

        W_t = W and G_t = G if t + 1 is divisible by k, else both are the identity

    A sequence of matrices advances by one per k rounds.

    >>> from dcliques_jax import algorithms, datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> algorithm = local_steps(algorithms.dsgd(), 2)
    >>> simulate(topologies.ring(10), data, algorithm=algorithm, epochs=1, progress=False).history.messages
    array([0., 4.])
    """
    _check(algorithm)
    k = _checks.integer("k", k, 1)

    def network(topology: Topology) -> Network:
        return Network(*(_less_often(weights, k) for weights in algorithm.network(topology)))

    return algorithm if k == 1 else algorithm._replace(network=network)


def repeated_gossip(algorithm: Algorithm, times: int, chebyshev: bool = False) -> Algorithm:
    """Lets nodes gossip several times per round, one after the other: W^m, or a Chebyshev polynomial of W.

        y_0 = x,  y_1 = W x,  y_(j+1) = omega_(j+1) (W y_j - y_(j-1)) + y_(j-1)
        omega_1 = 2,  omega_(j+1) = 1 / (1 - lambda2^2 omega_j / 4)

    The polynomial shrinks differences by `1 / T_m(1 / |lambda2|)` instead of `|lambda2|^m` (Scaman et al., ICML 2017).
    It needs one symmetric matrix and no faults. A sequence of matrices advances with every gossip; Clique Averaging
    still happens once per round.

    >>> from dcliques_jax import algorithms, datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> algorithm = repeated_gossip(algorithms.dsgd(), 3)
    >>> simulate(topologies.ring(10), data, algorithm=algorithm, epochs=1, progress=False).history.messages
    array([ 0., 24.])
    """
    _check(algorithm)
    times = _checks.integer("times", times, 1)
    if not isinstance(chebyshev, bool):
        raise ValueError(f"chebyshev={chebyshev!r} must be True or False")

    def network(topology: Topology) -> Network:
        found = algorithm.network(topology)
        gossip = paced(found.gossip, times=times)
        return found._replace(gossip=_with_omegas(gossip) if chebyshev else gossip)

    traits = algorithm.traits
    if chebyshev:
        traits = traits._replace(requires="symmetric", stands=frozenset())
    return algorithm if times == 1 else algorithm._replace(network=network, traits=traits)


def sam(algorithm: Algorithm, radius: float | jax.Array) -> Algorithm:
    """Sharpness-aware minimisation (Foret et al., ICLR 2021): gradients where the loss of each node is worst nearby.

        g = grad F(x + radius grad F(x) / |grad F(x)|)

    Every node computes two gradients per round. It wraps algorithms that start from gradients.

    >>> from dcliques_jax import algorithms, datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> algorithm = sam(algorithms.dsgd(), 0.05)
    >>> simulate(topologies.ring(10), data, algorithm=algorithm, epochs=1, progress=False).history.round
    array([0, 4])
    """
    _check(algorithm)
    if not isinstance(radius, jax.core.Tracer):
        _checks.real("radius", radius, 0)

    def ascended(params: Params, gradients: Params) -> Params:
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
        return jax.tree.map(lambda x, g: x + radius * g / jnp.where(norm > 0, norm, 1), params, gradients)

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> Any:
        def gradient(at: Params) -> Params:
            return round.gradient(jax.vmap(ascended)(at, round.gradient(at)))

        worst = round.gradient(jax.vmap(ascended)(params, gradients))
        return algorithm.step(params, worst, state, network, round._replace(gradient=gradient))

    return algorithm._replace(step=step)


def _less_often(weights: mixing.Weights, k: int) -> mixing.Weights:
    return weights if isinstance(weights, mixing.Identity) else paced(weights, every=k)


def _with_omegas(weights: Any) -> mixing.Weights:
    if isinstance(weights.base, mixing.Moving):
        raise ValueError("Chebyshev gossip needs one matrix, but these change from round to round: omit chebyshev")
    omegas = chebyshev_omegas(mixing.second_eigenvalue(weights.base), weights.times)
    every = np.tile(omegas, (weights.num_nodes, 1))
    return mixing.Paced(weights.base, every, weights.every, weights.times)


def _check(algorithm: Any) -> None:
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm={algorithm!r} is not an algorithm: pass for example algorithms.dsgd()")
