import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcliques_jax._engine import sampling

shuffle = jax.jit(sampling.shuffle, static_argnums=2)
batches = jax.jit(sampling.batches, static_argnums=4)


@settings(max_examples=30)
@given(
    st.data(),
    st.sampled_from([1, 5]),
    st.sampled_from([(1, 1), (3, 2), (9, 4), (12, 5), (12, 12)]),  # few shapes to compile for
    st.integers(0, 99),
)
def test_every_example_is_seen_exactly_once_an_epoch(data, num_nodes, shape, seed):
    largest, batch_size = shape
    smaller = data.draw(st.lists(st.integers(1, largest), min_size=num_nodes - 1, max_size=num_nodes - 1))
    sizes = np.array(data.draw(st.permutations([largest, *smaller])))
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
        numbers = jnp.arange(len(sizes))
        order = shuffle(jax.random.key(seed), epoch, int(sizes.max()), jnp.asarray(sizes), numbers)
        seen = [[] for _ in sizes]
        for turn in range(sampling.rounds_per_epoch(sizes, batch_size)):
            lists = jnp.asarray(examples)
            found, taken = batches(lists, order, jnp.asarray(bounds), turn, batch_size)
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
        sampling.batches(examples, examples, jnp.asarray(sampling.bounds(sizes, batch_size)), turn, batch_size)[1].sum(
            axis=1
        )
        for turn in range(sampling.rounds_per_epoch(sizes, batch_size))
    ]
    assert np.array(counts)[:, 0].tolist() == expected


def test_orders_are_uniform():
    """Each of the six orders of three examples comes up equally often."""
    orders = np.asarray(sampling.shuffle(jax.random.key(0), 0, 3, jnp.full(6000, 3), jnp.arange(6000)))
    counts = np.unique(orders @ [9, 3, 1], return_counts=True)[1]
    assert counts == pytest.approx([1000] * 6, rel=0.1)


def test_the_order_of_a_node_does_not_depend_on_the_others():
    key, sizes = jax.random.key(7), jnp.array([9, 4, 9, 1, 6])
    together = sampling.shuffle(key, 3, 9, sizes, jnp.arange(5))
    some = jnp.array([4, 0, 2])
    np.testing.assert_array_equal(sampling.shuffle(key, 3, 9, sizes[some], some), together[some])


def test_random_rows_are_those_of_the_whole_matrix():
    key, rows = jax.random.key(5), jnp.array([3, 0, 6])
    np.testing.assert_array_equal(sampling.random_rows(key, rows, 13), jax.random.bits(key, (7, 13), jnp.uint32)[rows])


def test_long_lists_are_shuffled_as_well_as_short_ones():
    """Of 50,000 examples half of all neighbours ascend; with few random bits it would be more."""
    nodes, sizes = jnp.arange(2), jnp.array([50_000, 40_000])
    order = np.asarray(sampling.shuffle(jax.random.key(0), jnp.int32(3), 50_000, sizes, nodes))
    for row, size in zip(order, sizes, strict=True):
        assert sorted(row[:size]) == list(range(size))
        assert np.mean(np.diff(row[:size]) > 0) == pytest.approx(0.5, abs=0.01)
