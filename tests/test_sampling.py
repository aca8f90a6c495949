import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcliques_jax import sampling


@settings(max_examples=30)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 12), st.integers(0, 99))
def test_every_example_is_seen_exactly_once_an_epoch(sizes, batch_size, seed):
    sizes = np.array(sizes)
    batch_size = min(batch_size, sizes.max())
    nodes = [np.arange(size) + 100 * node for node, size in enumerate(sizes)]
    examples = np.full((len(sizes), sizes.max()), -1)
    for node, own in enumerate(nodes):
        examples[node, : len(own)] = own
    bounds = sampling.bounds(sizes, batch_size)
    own = np.diff(bounds, axis=1)  # [nodes, rounds]
    assert own.max() <= batch_size
    assert (np.abs(own[:, :-1] - batch_size * sizes[:, None] / sizes.max()) < 1).all()  # in proportion to the size
    assert (own[sizes >= own.shape[1]] > 0).all()  # no node that has an example for every round sits one out
    orders = []
    for epoch in range(2):
        shuffled = sampling.shuffle(jax.random.key(seed), epoch, jnp.asarray(examples), jnp.asarray(sizes))
        seen = [[] for _ in sizes]
        for turn in range(sampling.rounds_per_epoch(sizes, batch_size)):
            found, taken = sampling.batches(shuffled, jnp.asarray(bounds), turn, batch_size)
            assert found.shape == (len(sizes), batch_size)
            for node in range(len(sizes)):
                seen[node] += np.asarray(found)[node][np.asarray(taken)[node]].tolist()
        for node, own in enumerate(nodes):
            assert sorted(seen[node]) == own.tolist()
        orders.append(seen)
    if max(sizes) > 8:
        assert orders[0] != orders[1]


@pytest.mark.parametrize(
    ("size", "batch_size", "expected"),
    [(500, 128, [128, 128, 128, 116]), (50, 13, [13, 13, 13, 11]), (500, 20, [20] * 25)],
)
def test_rounds_per_epoch_and_short_last_batches(size, batch_size, expected):
    sizes = np.array([size, size])
    examples = jnp.tile(jnp.arange(size)[None], (2, 1))
    counts = [
        sampling.batches(examples, jnp.asarray(sampling.bounds(sizes, batch_size)), turn, batch_size)[1].sum(axis=1)
        for turn in range(sampling.rounds_per_epoch(sizes, batch_size))
    ]
    assert np.array(counts)[:, 0].tolist() == expected


def test_orders_are_uniform():
    """Each of the six orders of three examples comes up equally often."""
    examples = jnp.tile(jnp.arange(3)[None], (6000, 1))
    orders = np.asarray(sampling.shuffle(jax.random.key(0), 0, examples, jnp.full(6000, 3)))
    counts = np.unique(orders @ [9, 3, 1], return_counts=True)[1]
    assert counts == pytest.approx([1000] * 6, rel=0.1)
