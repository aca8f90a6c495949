"""How long do gossip and Clique Averaging take, against copying all parameters once?

D-Cliques with fully connected cliques on 1000 nodes of 7,850 parameters. Everything runs in a `lax.scan`, as in a
round, and its time is what it adds to that of writing the parameters once. Then the forms in which W can be multiplied.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import workloads
from harness import Line, interleaved
from jax.experimental import sparse
from jax.experimental.xla_metadata import set_xla_metadata

import dcliques_jax as dc

STEPS = 10


@jax.jit
def product(x):
    return x * 1.0001


def scaled(x):
    """Writes the parameters once, unfused with what reads them; stands in for the update of a round."""
    with set_xla_metadata(inlineable="false"):
        return product(x)


def repeated(step):
    """A compiled function that runs a step some times, each on what the one before wrote."""
    run = jax.jit(lambda x: jax.lax.scan(lambda x, _: (step(x), None), x, None, length=STEPS)[0])
    return lambda x: jax.block_until_ready(run(x))


def measure(quick):
    num_nodes, parameters = (40, 50) if quick else (1000, 7850)
    topology = workloads.d_cliques(workloads.images(num_nodes, 10, (2, 2, 1)))
    w, g = dc.mixing.metropolis_hastings(topology), dc.mixing.clique_average(topology)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((num_nodes, parameters)), jnp.float32)
    bcoo = sparse.BCOO.from_scipy_sparse(w.to_sparse().astype(np.float32).tocoo())
    forms = {
        "lists of neighbours": dc.mixing.Neighbours.from_sparse(w.to_sparse()).apply,
        "dense": dc.mixing.Dense.from_sparse(w.to_sparse()).apply,
        "BCOO": lambda x: bcoo @ x,
    }
    for form in forms.values():
        np.testing.assert_allclose(jax.jit(form)(x), w.to_dense() @ np.asarray(x), atol=1e-5)

    def both(x):
        gradients = x  # as large as any
        return w.apply(scaled(x) - 1e-3 * g.apply(gradients))

    steps = {"copy": scaled, "gossip and Clique Averaging": both}
    steps |= {name: functools.partial(lambda form, x: form(scaled(x)), form) for name, form in forms.items()}
    times = interleaved({name: functools.partial(repeated(step), x) for name, step in steps.items()}, 1 if quick else 7)
    spent = {name: (min(seconds) / STEPS, float(np.median(seconds)) / STEPS) for name, seconds in times.items()}
    copy = spent.pop("copy")
    yield Line("mixing", f"{num_nodes} nodes", "copying all parameters", *copy)
    for name, (best, median) in spent.items():
        goal = ">= 0.17" if name.startswith("gossip") else ""
        subject = name if goal else f"gossip, {name}"
        yield Line("mixing", f"{num_nodes} nodes", subject, best - copy[0], median - copy[1], "a copy", copy[0], goal)
