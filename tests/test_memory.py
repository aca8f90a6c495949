"""What is told of memory before a run."""

import re
import tracemalloc

import numpy as np
import optax
import pytest

from dcliques_jax import (
    _layouts,
    _memory,
    _plans,
    algorithms,
    datasets,
    metrics,
    models,
    partitions,
    simulate,
    topologies,
)

DATA = datasets.synthetic(num_train=4000, num_test=10, input_shape=(300,))
SHARDS = partitions.shards(DATA, 200)
CLIQUES = topologies.d_cliques(SHARDS.label_distribution, max_steps=0)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
def test_the_forecast_is_about_what_the_compiler_finds(optimizer):
    runs = _plans.make_runs(CLIQUES, SHARDS, 0, None)
    parts = _plans.Parts(
        models.as_model(models.logistic_regression()), "", algorithms.dsgd(optimizer), metrics.cross_entropy, "shared"
    )
    forecast = _memory.forecast(runs[0], parts, _plans.check_fit(runs[0], parts))
    rounds = _layouts.prepare(_layouts.make_layout(runs, parts, None), _plans.make_plan(runs, rounds=2))
    assert forecast.total == pytest.approx(rounds.memory(), rel=0.25)
    assert forecast.models == 200 * 4 * 3010


def peak(model, input_shape, num_nodes):
    """Bytes of rounds of a model, and those of its parameters."""
    dataset = datasets.synthetic(num_train=10 * num_nodes, num_test=10, input_shape=input_shape)
    data = partitions.iid(dataset, num_nodes)
    runs = _plans.make_runs(topologies.ring(num_nodes), data, 0, None)
    parts = _plans.Parts(models.as_model(model), "", algorithms.dsgd(), metrics.cross_entropy, "shared")
    rounds = _layouts.prepare(_layouts.make_layout(runs, parts, None), _plans.make_plan(runs, rounds=1, batch_size=10))
    return rounds.memory(), _memory.num_bytes(rounds.state.params)


def test_networks_take_the_memory_of_their_parameters_however_many_there_are():
    """What a convolution needs on its way, megabytes a node, is needed for a chunk of nodes at a time."""
    (few, few_params), (many, many_params) = (peak(models.gn_lenet(), (16, 16, 3), n) for n in (20, 60))
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
    monkeypatch.setattr(_memory, "available", lambda mesh: 10_000_000)
    message = r"200 nodes take \d+\.\d GB .* models, .* about (\d+) nodes of this model would fit"
    with pytest.raises(ValueError, match=message) as error:
        simulate(CLIQUES, SHARDS, epochs=1)

    fitting = int(re.search(r"about (\d+) nodes", str(error.value))[1])
    assert 0 < fitting < 200
    fewer = partitions.shards(
        datasets.synthetic(num_train=4000, num_test=10, input_shape=(300,)), fitting // 10 * 10, unequal=True
    )
    assert simulate(topologies.ring(fewer.num_nodes), fewer, rounds=1, progress=False).history.round.tolist() == [0, 1]
    monkeypatch.setattr(_memory, "available", lambda mesh: 1_000_000)
    with pytest.raises(ValueError, match="no number of nodes would fit"):
        simulate(CLIQUES, SHARDS, epochs=1)
