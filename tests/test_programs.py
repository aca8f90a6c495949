"""How programs are cut: chunks of nodes, parts compiled by themselves, and what is lowered for other devices."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcliques_jax import algorithms, datasets, models, partitions, prepare, topologies
from dcliques_jax._engine import chunks, program
from dcliques_jax._engine.xla import unfused


@pytest.mark.parametrize("most", [1, 100, 200, 10**9])
@pytest.mark.parametrize("num_nodes", [1, 7, 12])
def test_chunks_of_nodes_compute_what_vmap_does(monkeypatch, most, num_nodes):
    monkeypatch.setattr(chunks, "_CPU_BYTES", most)

    def of_node(x, scale):
        return {"product": jnp.outer(x, x) * scale, "sum": x.sum()}  # 36 and 4 bytes

    x, scale = jnp.arange(3.0 * num_nodes).reshape(num_nodes, 3), jnp.arange(1.0 * num_nodes)
    found = jax.jit(chunks.over_nodes(of_node))(x, scale)
    jax.tree.map(np.testing.assert_array_equal, found, jax.vmap(of_node)(x, scale))


def test_chunks_of_several_runs_share_the_cache(monkeypatch):
    """Three runs of two nodes at once hold as much as one run of six."""
    monkeypatch.setattr(chunks, "_CPU_BYTES", 6 * 36)
    x = jnp.arange(36.0).reshape(12, 3)

    def nodes_at_once(runs):
        lifted = chunks.over_nodes(lambda row: jnp.outer(row, row), runs)
        inner = re.findall(r"f32\[(\d+),3,3\]", str(jax.make_jaxpr(lifted)(x)))
        return {int(count) for count in inner} - {12}

    assert nodes_at_once(1) == {6}
    assert nodes_at_once(3) == {2}


@pytest.mark.optimised
@pytest.mark.parametrize("network", [models.logistic_regression, models.gn_lenet])
def test_seeds_in_smaller_chunks_have_the_bits_of_single_runs(network):
    images = datasets.synthetic(num_train=240, num_test=20, input_shape=(32, 32, 3))
    data = partitions.iid(images, 12)
    options = {"model": network(), "batch_size": 5}
    together = prepare(topologies.ring(12), data, seeds=[0, 1, 2], **options)
    together.run(3)
    for seed in range(3):
        alone = prepare(topologies.ring(12), data, seed=seed, **options)
        alone.run(3)
        of_seed = jax.tree.map(lambda leaf, seed=seed: leaf[seed], together.params)
        jax.tree.map(np.testing.assert_array_equal, of_seed, alone.params)


def test_the_largest_result_is_found_inside_of_calls_and_loops():
    def function(x):
        return jax.lax.map(jax.jit(lambda row: jnp.outer(row, jnp.ones(100)).sum()), x)

    assert chunks.largest_result(function, jnp.ones((5, 8), jnp.float32)) == 4 * 8 * 100


def test_what_all_nodes_share_does_not_count():
    shared = jnp.ones((100, 8), jnp.float32)

    def of_node(weights):
        return (shared * 2) @ weights

    assert chunks.largest_result_of_a_node(of_node, jnp.ones((5, 8), jnp.float32)) == 4 * 100


@pytest.mark.optimised
def test_a_function_apart_is_not_fused_with_what_uses_it():
    def computed(x, part):
        return sum(part(x)[jnp.arange(10)[::-1]] for _ in range(3))

    def loops(part):
        compiled = jax.jit(lambda x: computed(x, part)).lower(jnp.ones((10, 50))).compile().as_text()
        return len(re.findall(r" (?:fusion|tanh)\(", compiled[compiled.index("ENTRY") :])), " call(" in compiled

    assert loops(jnp.tanh) == (1, False)
    assert loops(unfused(jnp.tanh))[1]
    np.testing.assert_allclose(computed(jnp.ones((10, 50)), unfused(jnp.tanh)), computed(jnp.ones((10, 50)), jnp.tanh))


def rounds(model, input_shape, algorithm):
    """A compiled run of rounds on nodes of uneven size, and its arguments."""
    dataset = datasets.synthetic(num_train=120, num_test=10, input_shape=input_shape)
    data = partitions.dirichlet(dataset, 12, alpha=1.0)
    topology = topologies.d_cliques(data.label_distribution, clique_size=4)
    simulation = prepare(topology, data, model=model, algorithm=algorithm, batch_size=3)
    simulation.begin()
    recipe, per_epoch = simulation.layout.recipe, simulation.plan.rounds_per_epoch
    parts = program.Program(recipe.model.apply, recipe.loss_fn, lambda: algorithm.step, 3, per_epoch)
    arrays = (simulation._carry, *simulation._constants)
    return jax.jit(lambda *arrays: program.run(parts, *arrays, 4, most_rounds=4, mesh=None)), arrays


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize(
    ("model", "input_shape"), [(models.logistic_regression(), (6,)), (models.gn_lenet(), (16, 16, 3))]
)
def test_a_round_lowers_for_every_device_as_one_program_without_callbacks(platform, model, input_shape):
    run, arrays = rounds(model, input_shape, algorithms.dsgd(optax.sgd(0.1, momentum=0.9)))
    lowered = jax.export.export(run, platforms=[platform])(*arrays).mlir_module()
    assert "stablehlo.while" in lowered
    called = set(re.findall(r"custom_call @(\w+)", lowered))  # a callback to the host would be one of them
    assert called <= {"cu_threefry2x32_ffi"}, called


@pytest.mark.optimised
@pytest.mark.parametrize("algorithm", [algorithms.dsgd(optax.sgd(0.1)), algorithms.dsgd(optax.sgd(0.1, momentum=0.9))])
def test_the_gradient_of_a_linear_model_computes_none_of_its_inputs(algorithm):
    """Two products a round, forward and backward to the weights; a third would be the gradient of the inputs."""
    run, arrays = rounds(models.logistic_regression(), (6,), algorithm)
    compiled = run.lower(*arrays).compile().as_text()
    products = re.findall(r"= f32\[[\d,]+\]\S* dot\(", compiled)
    assert len(products) == 2, products
