"""What is told of memory before a run."""

import re
import tracemalloc
import weakref

import flax.linen as nn
import numpy as np
import optax
import pytest

from dcliques_jax import algorithms, datasets, layers, partitions, prepare, simulate, topologies
from dcliques_jax._engine import memory, setup

DATA = datasets.synthetic(num_train=4000, num_test=10, input_shape=(300,))
SHARDS = partitions.shards(DATA, 200)
CLIQUES = topologies.d_cliques(SHARDS.label_distribution, max_steps=0)


@pytest.mark.optimised
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
def test_the_forecast_is_about_what_the_compiler_finds(optimizer):
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup.memory, "check", lambda run, needed, mesh: found.append(needed))
        simulation = prepare(CLIQUES, SHARDS, algorithm=algorithms.dsgd(optimizer))
    (forecast,) = found
    assert forecast.total == pytest.approx(simulation.memory(), rel=0.25)
    assert forecast.models == 200 * 4 * 3010


def peak(model, input_shape, num_nodes):
    """Bytes of rounds of a model, and those of its parameters."""
    dataset = datasets.synthetic(num_train=10 * num_nodes, num_test=10, input_shape=input_shape)
    data = partitions.iid(dataset, num_nodes)
    simulation = prepare(topologies.ring(num_nodes), data, model=model, batch_size=10)
    return simulation.memory(), memory.num_bytes(simulation.params)


class Small(nn.Module):
    """The layers of GN-LeNet, each once: it compiles in less time."""

    @nn.compact
    def __call__(self, x):
        x = layers.GroupNorm(num_groups=2)(layers.Conv(32, (5, 5), padding=2)(x))
        return layers.Dense(10)(nn.relu(layers.max_pool(x, (3, 3), (2, 2))).reshape(len(x), -1))


@pytest.mark.optimised
def test_convolutions_take_the_memory_of_their_parameters_however_many_there_are():
    """What a convolution needs on its way, megabytes a node, is needed for a chunk of nodes at a time."""
    (few, few_params), (many, many_params) = (peak(Small(), (16, 16, 3), n) for n in (20, 60))
    inputs = 40 * 10 * 16 * 16 * 3 * 4
    assert many - few < 3.5 * (many_params - few_params) + inputs


def test_nothing_is_as_large_as_all_pairs_of_nodes():
    n = 20_000
    p = np.eye(10)[np.arange(n) % 10]
    tracemalloc.start()
    for topology in (topologies.d_cliques(p, inter="small_world", max_steps=100), topologies.ring(n)):
        topology.report(p, num_devices=8)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < n * n  # bytes: a matrix of a byte for every pair


def test_a_run_that_cannot_fit_is_refused_with_what_would(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda mesh: 10_000_000)
    message = r"200 nodes need \d+\.\d GB .* models, .* about (\d+) nodes of this model would fit"
    with pytest.raises(ValueError, match=message) as error:
        simulate(CLIQUES, SHARDS, epochs=1)

    fitting = int(re.search(r"about (\d+) nodes", str(error.value))[1])
    assert 0 < fitting < 200
    fewer = partitions.shards(
        datasets.synthetic(num_train=4000, num_test=10, input_shape=(300,)), fitting // 10 * 10, unequal=True
    )
    assert simulate(topologies.ring(fewer.num_nodes), fewer, rounds=1, progress=False).history.round.tolist() == [0, 1]
    monkeypatch.setattr(memory, "available", lambda mesh: 1_000_000)
    with pytest.raises(ValueError, match="no number of nodes would fit"):
        simulate(CLIQUES, SHARDS, epochs=1)


def test_groups_of_seeds_are_freed_before_the_next(monkeypatch):
    made, alive = [], []
    simulation = setup.Setup.simulation

    def noted(self, *part):
        alive.append(sum(reference() is not None for reference in made))
        found = simulation(self, *part)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(setup.Setup, "simulation", noted)
    monkeypatch.setattr(setup.Setup, "runs_at_once", lambda self: 1)
    simulate(CLIQUES, SHARDS, rounds=2, seeds=[0, 1, 2], progress=False)
    assert alive == [0, 0, 0]
