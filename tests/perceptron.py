"""A perceptron with batch normalisation and dropout: as the library takes it, and in plain NumPy with its gradient."""

import jax
import jax.numpy as jnp
import numpy as np

import reference

EPSILON, MOMENTUM, KEPT = 1e-5, 0.9, 0.5
MODEL_DRAWS = 2**32 - 5  # folded into the key of a round


def start(rng, inputs, hidden, classes):
    return {
        "a": rng.normal(size=(inputs, hidden)),
        "scale": rng.uniform(0.5, 1.5, hidden),
        "shift": rng.normal(size=hidden),
        "b": rng.normal(size=(hidden, classes)),
    }


def model(params):
    """The pair of functions that starts from these parameters."""

    def init(key, inputs):
        del key, inputs
        hidden = params["scale"].shape
        return jax.tree.map(jnp.asarray, params), {"mean": jnp.zeros(hidden), "var": jnp.ones(hidden)}

    def apply(params, state, inputs, *, train, key):
        h = inputs @ params["a"]
        mean, var = (h.mean(axis=0), h.var(axis=0)) if train else (state["mean"], state["var"])
        x = (h - mean[None]) / jnp.sqrt(var + EPSILON)[None] * params["scale"][None] + params["shift"][None]
        x = jnp.maximum(x, 0)
        if train:
            x = jnp.where(jax.random.bernoulli(key, KEPT, x.shape), x / KEPT, 0)
            new = {"mean": mean, "var": var * len(h) / (len(h) - 1)}
            state = {name: MOMENTUM * state[name] + (1 - MOMENTUM) * new[name] for name in state}
        return x @ params["b"], state

    return init, apply


def mask(run_key, number, node, shape):
    """The mask that a node draws in a round."""
    key = reference.folded(run_key, reference.Fates.STEPS, number, MODEL_DRAWS, node)
    data = jnp.array(key, jnp.uint32)
    return np.asarray(jax.random.bernoulli(jax.random.wrap_key_data(data, impl="threefry2x32"), KEPT, shape))


def gradient(params, state, inputs, labels, kept):
    """The gradient of the mean cross-entropy in training, by hand, and the state after the batch."""
    count = len(labels)
    h = inputs @ params["a"]
    mean, var = h.mean(axis=0), h.var(axis=0)
    normal = (h - mean) / np.sqrt(var + EPSILON)
    before = normal * params["scale"] + params["shift"]
    x = np.where(kept, np.maximum(before, 0) / KEPT, 0)
    error = np.exp(reference.log_softmax(x @ params["b"]))
    error[np.arange(count), labels] -= 1
    error /= count
    of_x = np.where(kept & (before > 0), error @ params["b"].T / KEPT, 0)
    of_normal = of_x * params["scale"]
    centred = of_normal - of_normal.mean(axis=0) - normal * (of_normal * normal).mean(axis=0)
    found = {
        "a": inputs.T @ (centred / np.sqrt(var + EPSILON)),
        "scale": (of_x * normal).sum(axis=0),
        "shift": of_x.sum(axis=0),
        "b": x.T @ error,
    }
    new = {"mean": mean, "var": var * count / (count - 1)}
    return found, {name: MOMENTUM * state[name] + (1 - MOMENTUM) * new[name] for name in state}


def evaluate(params, state, inputs, labels):
    """Accuracy of one node, with its running statistics."""
    normal = (inputs @ params["a"] - state["mean"]) / np.sqrt(state["var"] + EPSILON)
    logits = np.maximum(normal * params["scale"] + params["shift"], 0) @ params["b"]
    return (logits.argmax(axis=1) == labels).mean()


def dsgd(params, batches, w, rate, run_key, fates, gossiped):
    """D-SGD for this perceptron with loops over nodes, under faults: parameters and states of all nodes."""
    n = len(w)
    models = [{name: value.copy() for name, value in params.items()} for _ in range(n)]
    hidden = len(params["scale"])
    states = [{"mean": np.zeros(hidden), "var": np.ones(hidden)} for _ in range(n)]
    for number, batch in enumerate(batches):
        fates.start_round(number)
        stepped, seen = [], []
        for node, (inputs, labels) in enumerate(batch):
            kept = mask(run_key, number, node, (len(labels), hidden))
            found, state = gradient(models[node], states[node], inputs.astype(np.float64), labels, kept)
            stepped.append({name: models[node][name] - rate * found[name] for name in params})
            seen.append(state)
        for node in range(n):
            if not fates.online[node]:
                continue
            heard = [j for j in range(n) if j != node and w[node, j] != 0 and fates.online[j]]
            heard = [j for j in heard if fates.link_works(node, j)]
            models[node] = _mixed(stepped, node, heard, w)
            states[node] = _mixed(seen, node, heard, w) if gossiped else seen[node]
    return models, states


def _mixed(trees, node, heard, w):
    own = trees[node]
    return {name: own[name] + sum(w[node, j] * (trees[j][name] - own[name]) for j in heard) for name in own}
