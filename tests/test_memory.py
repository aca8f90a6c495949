"""What is told of memory before a run."""

import re

import optax
import pytest

from dcliques_jax import (
    _layouts,
    _memory,
    _plans,
    _simulate,
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
    assert forecast.total == pytest.approx(_simulate.peak_bytes(rounds.lower(2)), rel=0.25)
    assert forecast.models == 200 * 4 * 3010


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
