"""How long does a round of D-Cliques take, against what an expert writes by hand?

MNIST shape, logistic regression, D-Cliques with fully connected cliques and Clique Averaging: 100 nodes with batches of
128 (M100), 1000 nodes with batches of 13 (M1000), with and without momentum. By hand means batched matrix products over
nodes and CSR matrices for both averages, in NumPy and SciPy or in PyTorch, each with batches gathered in every round or
sliced from rows that are shuffled once an epoch. The best of the four counts. All are first checked to compute the same
models.
"""

import importlib.util
import warnings

import numpy as np
import optax
import workloads
from harness import Line, fastest, per_round

import dcliques_jax as dc

RATE = 0.1


class ByHand:
    """The round that both versions by hand share; `step` differs."""

    def __init__(self, topology, data, batch_size, momentum, sliced):
        self.batch_size, self.momentum, self.sliced = batch_size, momentum, sliced
        self.inputs = data.dataset.train_inputs.reshape(len(data.dataset.train_labels), -1)
        self.labels, self.indices = data.dataset.train_labels.astype(np.int64), data.indices
        self.w = dc.mixing.metropolis_hastings(topology).to_sparse().astype(np.float32)
        self.g = dc.mixing.clique_average(topology).to_sparse().astype(np.float32)

    def run(self, rounds):
        """Runs rounds from models of zeros; returns the kernels `[nodes, features, classes]`."""
        rng, self.order = np.random.default_rng(0), None
        n, size = self.indices.shape
        self.start(n, self.inputs.shape[1])
        for number in range(rounds):
            turn = number % -(-size // self.batch_size)
            if turn == 0:
                order = rng.permuted(self.indices, axis=1)
                rows = (self.take(order) if self.sliced else None), self.labels[order]
            part = slice(turn * self.batch_size, (turn + 1) * self.batch_size)
            x = rows[0][:, part] if self.sliced else self.take(order[:, part])
            self.step(x, rows[1][:, part])
        return self.kernels()


class WithNumPy(ByHand):
    def take(self, examples):
        return self.inputs[examples]

    def start(self, n, features):
        self.kernel, self.bias = np.zeros((n, 10, features), np.float32), np.zeros((n, 10), np.float32)
        self.v_kernel, self.v_bias = np.zeros_like(self.kernel), np.zeros_like(self.bias)

    def step(self, x, y):
        n = len(x)
        error = x @ self.kernel.transpose(0, 2, 1) + self.bias[:, None]
        error -= error.max(axis=2, keepdims=True)
        np.exp(error, out=error)
        error /= error.sum(axis=2, keepdims=True)
        error[np.arange(n)[:, None], np.arange(y.shape[1]), y] -= 1
        error *= -RATE / y.shape[1]
        u_kernel = (self.g @ (error.transpose(0, 2, 1) @ x).reshape(n, -1)).reshape(self.kernel.shape)
        u_bias = self.g @ error.sum(axis=1)
        if self.momentum:
            self.v_kernel *= self.momentum
            self.v_bias *= self.momentum
            self.v_kernel += u_kernel
            self.v_bias += u_bias
            u_kernel, u_bias = self.v_kernel, self.v_bias
        self.kernel += u_kernel
        self.kernel = (self.w @ self.kernel.reshape(n, -1)).reshape(self.kernel.shape)
        self.bias = self.w @ (self.bias + u_bias)

    def kernels(self):
        return self.kernel.transpose(0, 2, 1)


class WithTorch(ByHand):
    def __init__(self, *args):
        import torch

        super().__init__(*args)
        self.torch = torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inputs are read-only, and CSR is called a beta feature
            self.inputs = torch.from_numpy(self.inputs)
            self.w, self.g = (
                torch.sparse_csr_tensor(*map(torch.from_numpy, (m.indptr, m.indices, m.data)), m.shape)
                for m in (self.w, self.g)
            )

    def take(self, examples):
        return self.inputs[self.torch.from_numpy(examples)]

    def start(self, n, features):
        zeros = self.torch.zeros
        self.kernel, self.bias = zeros(n, features, 10), zeros(n, 10)
        self.v_kernel, self.v_bias = zeros(n, features, 10), zeros(n, 10)

    def step(self, x, y):
        torch, n = self.torch, len(x)
        error = torch.softmax(torch.baddbmm(self.bias[:, None], x, self.kernel), 2)
        error.scatter_add_(2, torch.from_numpy(y)[..., None], torch.full((*y.shape, 1), -1.0))
        error *= -RATE / y.shape[1]
        u_kernel = (self.g @ torch.bmm(x.transpose(1, 2), error).reshape(n, -1)).reshape(self.kernel.shape)
        u_bias = self.g @ error.sum(1)
        if self.momentum:
            u_kernel = self.v_kernel = self.v_kernel.mul_(self.momentum).add_(u_kernel)
            u_bias = self.v_bias = self.v_bias.mul_(self.momentum).add_(u_bias)
        self.kernel = (self.w @ (self.kernel + u_kernel).reshape(n, -1)).reshape(self.kernel.shape)
        self.bias = self.w @ (self.bias + u_bias)

    def kernels(self):
        return self.kernel.numpy()


def ours(topology, data, batch_size, momentum):
    features = data.dataset.train_inputs[0].size
    start = {"Dense_0": {"kernel": np.zeros((features, 10), np.float32), "bias": np.zeros(10, np.float32)}}
    return workloads.rounds(topology, data, batch_size, optax.sgd(RATE, momentum=momentum or None), init=start)


def measure(quick):
    sizes = [("quick", 20, 40, 10)] if quick else [("M100", 100, 500, 128), ("M1000", 1000, 50, 13)]
    rounds, repeats = (4, 1) if quick else (12, 5)
    for name, num_nodes, size, batch_size in sizes:
        data = workloads.images(num_nodes, size, (28, 28, 1))
        topology = workloads.d_cliques(data)
        for momentum in (0.0, 0.9):
            yield from compared(f"{name}, momentum {momentum}", topology, data, batch_size, momentum, rounds, repeats)


def compared(workload, topology, data, batch_size, momentum, rounds, repeats):
    kinds = {"NumPy + SciPy": WithNumPy}
    if importlib.util.find_spec("torch"):
        kinds["PyTorch"] = WithTorch
    by_hand = {}
    for kind, make in kinds.items():
        check(topology, data, momentum, make)
        for sliced in (False, True):
            label = f"{kind}, {'slices' if sliced else 'gathers'}"
            by_hand[label] = make(topology, data, batch_size, momentum, sliced).run
    mine = ours(topology, data, batch_size, momentum)
    times = per_round({"dcliques_jax": mine.run} | by_hand, repeats, rounds)
    best = fastest(times, by_hand)
    against = (best, times[best][0], ">= 1.5, 2 the stretch")
    yield Line("a round", workload, "dcliques_jax", *times["dcliques_jax"], *against)
    for label in by_hand:
        yield Line("a round", workload, label, *times[label])
    parameters = sum(leaf.nbytes for leaf in mine.params["Dense_0"].values())
    least = (3 if momentum else 2) * parameters + data.dataset.train_inputs.size
    held = mine.memory()
    against = ("parameters, momentum, gradients, data", least, ">= 0.5")
    yield Line("memory of a round", workload, "dcliques_jax", held, held, *against, unit="B")


def check(topology, data, momentum, make):
    """With whole local data sets as batches, both sides see the same examples in every round."""
    size = data.indices.shape[1]
    expected = make(topology, data, size, momentum, False).run(3)
    mine = ours(topology, data, size, momentum)
    mine.run(3)
    np.testing.assert_allclose(mine.params["Dense_0"]["kernel"], expected, atol=1e-4)
