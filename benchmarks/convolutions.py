"""How long does a round of GN-LeNet take, against a loop over nodes in PyTorch and against plain `jax.vmap`?

CIFAR-10 shape, momentum 0.9: 100 nodes with batches of 20 (C100), 1000 nodes with batches of 2 (C1000). In PyTorch
every node has a model, autograd and SGD of its own, and models are averaged by a dense W. Plain JAX is `jax.vmap` of
the network written with flax's own layers. Both are checked to compute the same models; none averages gradients.
"""

import importlib.util
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import workloads
from harness import Line, per_round

import dcliques_jax as dc

RATE, MOMENTUM = 0.002, 0.9


class FlaxGNLeNet(nn.Module):
    """`dcliques_jax.models.gn_lenet` with flax's own layers."""

    @nn.compact
    def __call__(self, x):
        def normalise(x):
            return nn.GroupNorm(num_groups=2, epsilon=1e-5)(x)

        def pool(x):
            return nn.max_pool(x, (3, 3), (2, 2))

        x = nn.relu(normalise(pool(nn.Conv(32, (5, 5), padding=2)(x))))
        x = nn.relu(pool(normalise(nn.Conv(32, (5, 5), padding=2)(x))))
        x = nn.relu(pool(normalise(nn.Conv(64, (5, 5), padding=2)(x))))
        return nn.Dense(10)(x.reshape(len(x), -1))


def ours(topology, data, batch_size, start):
    return workloads.rounds(
        topology,
        data,
        batch_size,
        optax.sgd(RATE, momentum=MOMENTUM),
        model=dc.models.gn_lenet(),
        init=start,
        clique_averaging=False,
    )


def batches(data):
    """The examples of every node, `[nodes, batch, ...]` and `[nodes, batch]`: a batch is all that a node has."""
    return data.dataset.train_inputs[data.indices], data.dataset.train_labels[data.indices]


def with_vmap(topology, data, start, rounds):
    """Plain JAX: a jitted round of vmapped gradients and a dense W, called in a loop."""
    inputs, labels = map(jnp.asarray, batches(data))
    w = jnp.asarray(dc.mixing.metropolis_hastings(topology).to_dense(), jnp.float32)
    optimizer = optax.sgd(RATE, momentum=MOMENTUM)
    params = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(w), *leaf.shape)), start)
    state = jax.vmap(optimizer.init)(params)

    def loss(params, inputs, labels):
        logits = FlaxGNLeNet().apply({"params": params}, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step(params, state):
        gradients = jax.vmap(jax.grad(loss))(params, inputs, labels)
        updates, state = jax.vmap(optimizer.update)(gradients, state)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda leaf: jnp.tensordot(w, leaf, 1, precision="highest"), params), state

    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        params, state = jax.block_until_ready(step(params, state))
        seconds.append(time.perf_counter() - begin)
    return params, seconds


def gn_lenet_of_torch(start):
    """GN-LeNet in PyTorch, for kernels of these shapes."""
    from torch import nn as tnn

    layers = []
    for channels, units, pool_first in ((3, 32, True), (32, 32, False), (32, 64, False)):
        after = [tnn.MaxPool2d(3, 2), tnn.GroupNorm(2, units)]
        layers += [tnn.Conv2d(channels, units, 5, padding=2), *after[:: 1 if pool_first else -1], tnn.ReLU()]
    linear = start["Dense_0"]["kernel"].shape[0]
    return tnn.Sequential(*layers, tnn.Flatten(), tnn.Linear(linear, 10))


class WithTorch:
    """One model, one optimiser a node, in a loop. `values` are the initial parameters in the order of PyTorch."""

    def __init__(self, topology, data, make, values):
        import torch

        self.torch = torch
        self.w = torch.from_numpy(dc.mixing.metropolis_hastings(topology).to_dense()).float()
        inputs, labels = batches(data)
        self.inputs = torch.from_numpy(np.moveaxis(inputs, -1, 2).copy())
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.models = [make() for _ in self.w]
        with torch.no_grad():
            for model in self.models:
                for parameter, value in zip(model.parameters(), values, strict=True):
                    parameter.copy_(torch.tensor(value))
        self.optimizers = [torch.optim.SGD(m.parameters(), RATE, momentum=MOMENTUM) for m in self.models]

    def run(self, rounds):
        torch = self.torch
        for _ in range(rounds):
            for model, optimizer, x, y in zip(self.models, self.optimizers, self.inputs, self.labels, strict=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in self.models), strict=True):
                    mixed = (self.w @ torch.stack(same).reshape(len(same), -1)).reshape(len(same), *same[0].shape)
                    for parameter, value in zip(same, mixed, strict=True):
                        parameter.copy_(value)


def as_torch(params):
    """One node's parameters in PyTorch's order and layout: channels first, in images and in kernels."""
    for index in range(3):
        yield np.moveaxis(np.asarray(params[f"Conv_{index}"]["kernel"]), (0, 1), (2, 3)).swapaxes(0, 1).copy()
        yield np.asarray(params[f"Conv_{index}"]["bias"])
        yield np.asarray(params[f"GroupNorm_{index}"]["scale"])
        yield np.asarray(params[f"GroupNorm_{index}"]["bias"])
    kernel = np.asarray(params["Dense_0"]["kernel"])
    side = int((len(kernel) // 64) ** 0.5)
    yield kernel.reshape(side, side, 64, 10).transpose(3, 2, 0, 1).reshape(10, -1).copy()
    yield np.asarray(params["Dense_0"]["bias"])


def measure(quick):
    shape = (16, 16, 3) if quick else (32, 32, 3)
    sizes = [("quick", 20, 4, True)] if quick else [("C100", 100, 20, True), ("C1000", 1000, 2, False)]
    for name, num_nodes, batch_size, vmap in sizes:
        data = workloads.images(num_nodes, batch_size, shape)
        yield from compared(name, workloads.d_cliques(data), data, batch_size, vmap, repeats=1 if quick else 7)


def compared(name, topology, data, batch_size, vmap, repeats):
    start = dc.models.gn_lenet().init(jax.random.key(0), data.dataset.train_inputs[:1])["params"]
    begin = time.perf_counter()
    mine = ours(topology, data, batch_size, start)
    mine.run(1)
    notes = {"dcliques_jax": f"first call {time.perf_counter() - begin:.0f} s"}
    subjects = {"dcliques_jax": mine.run}
    if importlib.util.find_spec("torch"):
        other = WithTorch(topology, data, lambda: gn_lenet_of_torch(start), list(as_torch(start)))
        other.run(1)
        check(mine.params, other)
        subjects["PyTorch, a loop over nodes"] = other.run
    times = per_round(subjects, repeats, 1)
    if vmap:
        params, (first, *seconds) = with_vmap(topology, data, start, 2)
        again = ours(topology, data, batch_size, start)
        again.run(2)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, again.params)
        times["jax.vmap of flax"] = min(seconds), float(np.median(seconds))
        notes["jax.vmap of flax"] = f"first call {first:.0f} s"
    for against, goal in (("PyTorch, a loop over nodes", ">= 1"), ("jax.vmap of flax", ">= 8")):
        if against in times:
            held = (against, times[against][0], goal, notes["dcliques_jax"])
            yield Line("a round of GN-LeNet", name, "dcliques_jax", *times["dcliques_jax"], *held)
            yield Line("a round of GN-LeNet", name, against, *times[against], note=notes.get(against, ""))


def check(params, other):
    """First and last node hold the same model on both sides."""
    for node in (0, -1):
        one = jax.tree.map(lambda leaf, node=node: leaf[node], params)
        for found, expected in zip(as_torch(one), other.models[node].parameters(), strict=True):
            np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)
