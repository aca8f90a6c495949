"""How long does a round of ResNet-20 with group normalisation take, against a loop over nodes in PyTorch?

16 nodes on a ring with batches of 32 images of 32 x 32, momentum 0.9, as in many papers. In PyTorch every node has a
model, autograd and SGD of its own, with images in its usual layout and with channels last; the faster one counts. Both
sides are checked to compute the same models.
"""

import importlib.util
import time

import convolutions
import jax
import numpy as np
import optax
import workloads
from harness import Line, fastest, per_round

import dcliques_jax as dc


def resnet_of_torch(widths, blocks):
    """A function that makes the ResNet with shortcut B, whose parameters come in the order in which it uses them."""
    import torch
    from torch import nn as tnn

    class Block(tnn.Module):
        def __init__(self, channels, width, stride):
            super().__init__()
            self.first = tnn.Sequential(conv(channels, width, 3, stride), tnn.GroupNorm(2, width), tnn.ReLU())
            self.second = tnn.Sequential(conv(width, width, 3, 1), tnn.GroupNorm(2, width))
            self.short = tnn.Identity()
            if stride > 1:
                self.short = tnn.Sequential(conv(channels, width, 1, stride), tnn.GroupNorm(2, width))

        def forward(self, x):
            return torch.relu(self.second(self.first(x)) + self.short(x))

    def conv(channels, width, window, stride):
        return tnn.Conv2d(channels, width, window, stride, window // 2, bias=False)

    def make():
        layers, channels = [conv(3, widths[0], 3, 1), tnn.GroupNorm(2, widths[0]), tnn.ReLU()], widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(Block(channels, width, 2 if stage and not block else 1))
                channels = width
        return tnn.Sequential(*layers, tnn.AdaptiveAvgPool2d(1), tnn.Flatten(), tnn.Linear(channels, 10))

    return make


def as_torch(params):
    """One node's parameters in PyTorch's order and layout."""
    for index in range(sum(name.startswith("Conv") for name in params)):
        yield np.asarray(params[f"Conv_{index}"]["kernel"]).transpose(3, 2, 0, 1).copy()
        for name in ("scale", "bias"):
            yield np.asarray(params[f"GroupNorm_{index}"][name])
    yield np.asarray(params["Dense_0"]["kernel"]).T.copy()
    yield np.asarray(params["Dense_0"]["bias"])


class ChannelsLast(convolutions.WithTorch):
    """The same with images and kernels stored with their channels last."""

    def __init__(self, *args):
        super().__init__(*args)
        last = self.torch.channels_last
        self.models = [model.to(memory_format=last) for model in self.models]
        self.inputs = [inputs.contiguous(memory_format=last) for inputs in self.inputs]


def check(params, other):
    """First and last node hold the same model on both sides."""
    for node in (0, -1):
        one = jax.tree.map(lambda leaf, node=node: leaf[node], params)
        for found, expected in zip(as_torch(one), other.models[node].parameters(), strict=True):
            np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-4)


def measure(quick):
    model = dc.models.resnet20().clone(widths=(16, 32), blocks=1) if quick else dc.models.resnet20()
    num_nodes, batch_size = (4, 10) if quick else (16, 32)
    images = workloads.images(num_nodes, batch_size, (32, 32, 3)).dataset
    data = dc.partitions.iid(images, num_nodes)
    topology = dc.topologies.ring(num_nodes)
    start = model.init(jax.random.key(0), images.train_inputs[:1])["params"]
    begin = time.perf_counter()
    optimizer = optax.sgd(convolutions.RATE, momentum=convolutions.MOMENTUM)
    mine = workloads.rounds(topology, data, batch_size, optimizer, model=model, init=start, clique_averaging=False)
    mine.run(1)
    note = f"first call {time.perf_counter() - begin:.0f} s (goal: 40)"
    subjects = {"dcliques_jax": mine.run}
    if importlib.util.find_spec("torch"):
        make, values = resnet_of_torch(model.widths, model.blocks), list(as_torch(start))
        for name, kind in (("PyTorch", convolutions.WithTorch), ("PyTorch, channels last", ChannelsLast)):
            other = kind(topology, data, make, values)
            other.run(1)
            check(mine.params, other)
            subjects[name] = other.run
    times = per_round(subjects, 1 if quick else 7, 1)
    workload = f"{num_nodes} nodes, batches of {batch_size}"
    against = [name for name in times if name != "dcliques_jax"]
    best = (fastest(times, against), times[fastest(times, against)][0], ">= 1") if against else ("", None, "")
    yield Line("a round of ResNet-20", workload, "dcliques_jax", *times["dcliques_jax"], *best, note=note)
    for name in against:
        yield Line("a round of ResNet-20", workload, name, *times[name])
