import copy
import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcliques_jax import datasets, partitions

DATA = datasets.synthetic(num_train=1000, num_classes=10)


def classes_per_node(data):
    return np.bincount((data.label_distribution > 0).sum(axis=1), minlength=5)


@pytest.mark.parametrize(("num_nodes", "size"), [(100, 500), (1000, 50)])
def test_shards_of_mnist(mnist, num_nodes, size):
    data = partitions.shards(mnist, num_nodes, seed=1)
    assert (data.sizes == size).all()
    assert len(np.unique(data.indices)) == 50_000
    one, two, three, four = classes_per_node(data)[1:5] / num_nodes
    assert one + two + three + four == 1
    # By chance 9.5 % of the nodes get both shards from one class, less what straddles.
    assert 0.02 < one < 0.18
    assert two > 0.72
    assert three < 0.2


def test_a_shard_of_mnist_is_a_run_of_sorted_examples(mnist):
    data = partitions.shards(mnist, 100, seed=1)
    sums = np.cumsum(np.bincount(mnist.train_labels))
    # Shard k covers places 250 k .. 250 k + 249 of the sorted list; count in how many classes that is.
    straddling = sum(
        np.searchsorted(sums, 250 * k, "right") != np.searchsorted(sums, 250 * k + 249, "right") for k in range(200)
    )
    shards = mnist.train_labels[data.indices].reshape(200, 250)
    assert (np.diff(shards, axis=1) >= 0).all()
    assert (shards.min(axis=1) != shards.max(axis=1)).sum() == straddling == 9


def test_shards_are_shuffled_inside_a_class():
    one, two = (partitions.shards(DATA, 10, seed=seed) for seed in (1, 2))
    held = [{frozenset(shard) for shard in data.indices.reshape(20, 50).tolist()} for data in (one, two)]
    assert not held[0] & held[1]
    runs = np.diff(one.indices.reshape(20, 50), axis=1)
    assert 0.3 < (runs > 0).mean() < 0.7  # neither in the order of the data set nor against it


def test_shards_of_cifar10(cifar10):
    one, two, three, _ = classes_per_node(partitions.shards(cifar10, 100, seed=1))[1:5]
    assert one + two == 100  # classes divide into shards evenly: no third class
    assert three == 0
    assert 2 <= one <= 18


def test_shards_must_be_equal_unless_asked():
    with pytest.raises(ValueError, match=r"1000 examples do not divide into 30 x 2 = 60 equal shards.*unequal=True"):
        partitions.shards(DATA, 30)
    data = partitions.shards(DATA, 30, unequal=True)
    assert data.sizes.sum() == 1000
    assert np.ptp(data.sizes) <= 2


def test_one_class_is_balanced(mnist):
    for num_nodes, size in [(10, 4500), (100, 450), (1000, 45)]:
        data = partitions.one_class(mnist, num_nodes, seed=1)
        assert (data.sizes == size).all()
        np.testing.assert_array_equal(data.label_counts.sum(axis=0), 4500)
        np.testing.assert_array_equal((data.label_counts > 0).sum(axis=0), num_nodes // 10)
        assert classes_per_node(data)[1] == num_nodes


def test_one_class_rounds_only_where_that_leaves_enough():
    data = datasets.synthetic(num_train=398, num_classes=2)  # 199 a class
    assert (partitions.one_class(data, 4).sizes == 95).all()  # 190 of 199
    assert (partitions.one_class(data, 390).sizes == 1).all()  # 195 of 199


def test_one_class_takes_another_size_and_refuses_what_cannot_be():
    assert (partitions.one_class(DATA, 20, examples_per_class=60).sizes == 30).all()
    with pytest.raises(ValueError, match="num_nodes=25 must be a multiple of the 10 classes, such as 20"):
        partitions.one_class(DATA, 25)
    for wrong in (0, 61, 101):
        with pytest.raises(ValueError, match=f"examples_per_class={wrong} must be a positive multiple of 2"):
            partitions.one_class(DATA, 20, examples_per_class=wrong)


def test_iid_deals_evenly():
    data = partitions.iid(DATA, 30)
    assert set(data.sizes) == {33, 34}
    assert len(np.unique(data.indices[data.indices >= 0])) == 1000


def test_iid_nodes_look_like_the_whole(mnist):
    p = partitions.iid(mnist, 100).label_distribution
    assert np.abs(p - p.mean(axis=0)).sum(axis=1).mean() < 0.2  # against 1.6 for shards
    assert np.abs(p.mean(axis=0) - np.bincount(mnist.train_labels) / 50_000).max() < 1e-3


def test_dirichlet_grows_more_skewed_as_alpha_falls():
    def skew(alpha):
        p = partitions.dirichlet(DATA, 20, alpha=alpha, seed=1).label_distribution
        return np.abs(p - 0.1).sum(axis=1).mean()

    assert skew(0.05) > skew(0.5) > skew(5) > skew(1000)
    assert skew(0.05) > 1
    assert skew(1000) < 0.3


def test_dirichlet_proportions_have_the_right_spread():
    """Var of a share is (1/n)(1 - 1/n) / (n alpha + 1)."""
    data, n, alpha = datasets.synthetic(num_train=20_000, num_classes=2), 10, 2.0
    shares = np.concatenate(
        [partitions.dirichlet(data, n, alpha=alpha, seed=seed).label_counts.T / 10_000 for seed in range(50)]
    )
    assert shares.var() == pytest.approx((1 / n) * (1 - 1 / n) / (n * alpha + 1), rel=0.2)


@given(alpha=st.floats(1e-3, 1e3), num_nodes=st.integers(1, 40), min_size=st.integers(1, 25), seed=st.integers(0, 99))
def test_dirichlet_deals_every_example_and_tops_up(alpha, num_nodes, min_size, seed):
    data = partitions.dirichlet(DATA, num_nodes, alpha=alpha, min_size=min_size, seed=seed)
    assert data.sizes.min() >= min_size
    assert len(np.unique(data.indices[data.indices >= 0])) == data.sizes.sum() == 1000


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: partitions.iid(DATA, 0), r"num_nodes=0 must be an integer in 1\.\.1000"),
        (lambda: partitions.iid(DATA, 1001), r"num_nodes=1001 must be an integer in 1\.\.1000"),
        (lambda: partitions.shards(DATA, 501), r"num_nodes=501 must be an integer in 1\.\.500"),
        (lambda: partitions.shards(DATA, 10, shards_per_node=0), "shards_per_node=0"),
        (lambda: partitions.dirichlet(DATA, 10, alpha=0.0), r"alpha=0\.0 must be positive"),
        (lambda: partitions.dirichlet(DATA, 10, alpha=np.nan), "alpha=nan must be positive"),
        (lambda: partitions.lin_dirichlet(DATA, 10, alpha="x"), "alpha='x' must be positive"),
        (lambda: partitions.iid(DATA, 2).with_tests([[], []]), "node 0 has no test example"),
        (lambda: partitions.dirichlet(DATA, 10, alpha=1, min_size=0), "min_size=0"),
        (lambda: partitions.dirichlet(DATA, 10, alpha=1, min_size=101), r"num_nodes=10 must be an integer in 1\.\.9"),
        (lambda: partitions.from_indices(DATA, []), "at least one node"),
        (lambda: partitions.from_indices(DATA, [[1], []]), "node 1 holds no example"),
        (lambda: partitions.from_indices(DATA, [[1], [1000]]), "indices range from 1 to 1000"),
        (lambda: partitions.from_indices(DATA, [[0.5]]), r"indices\[0\] must be integers, not float64"),
        (lambda: partitions.from_indices(DATA, [np.ones(1000, bool)]), r"indices\[0\] must be integers, not bool"),
        (
            lambda: partitions.one_class(DATA, 2000),
            "has 100 training examples, too few for its 200 nodes",
        ),
        (lambda: partitions.iid(partitions.iid(DATA, 2), 2), "is not a Dataset: build one"),
        (lambda: partitions.iid(DATA, 2.5), r"num_nodes=2\.5 must be an integer"),
        (lambda: partitions.iid(DATA, 10, seed=-1), "seed=-1 must be an integer"),
        (lambda: partitions.iid(DATA, 10, seed=2**32), "seed=4294967296 must be an integer"),
        (lambda: partitions.dirichlet(DATA, 10, alpha=1e308), r"alpha=1e\+308 must be positive and at most"),
    ],
)
def test_impossible_partitions_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_notebooks_show_a_small_table():
    uneven = partitions.from_indices(dataclasses.replace(DATA, name="<b>"), [[0, 1, 2], [3, 4]])
    page = uneven._repr_html_()
    assert "<b>" not in page
    labels = sorted(len(set(DATA.train_labels[held])) for held in ([0, 1, 2], [3, 4]))
    span = f"{labels[0]}" if labels[0] == labels[1] else f"{labels[0]} to {labels[1]}"
    for text in ("&lt;b&gt;", "2 to 3", f"{span} of 10"):
        assert f">{text}</" in page
    assert ">10</td>" in partitions.iid(DATA, 100)._repr_html_()


INDICES, SIZES = np.array([[4, 5, 6], [7, 8, -1]]), np.array([3, 2])


def spoil(array):
    array += 1


def test_partitions_cannot_be_changed():
    made = partitions.PartitionedDataset(DATA, INDICES, SIZES)
    again = [copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), dataclasses.replace(made)]
    for data in (made, *again, partitions.from_indices(DATA, [[4, 5], [6]]), partitions.iid(DATA, 3)):
        for array in (data.indices, data.sizes, data.dataset.train_labels):
            with pytest.raises(ValueError, match="read-only"):
                spoil(array)
        for name in ("label_counts", "label_distribution"):  # computed anew each time
            before = getattr(data, name).copy()
            spoil(getattr(data, name))
            np.testing.assert_array_equal(getattr(data, name), before)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4"])
def test_partitions_do_not_follow_the_arrays_they_were_made_of(dtype):
    indices, sizes = INDICES.astype(dtype), SIZES.astype(dtype)
    data = partitions.PartitionedDataset(DATA, indices, sizes)
    rows = [indices[0], indices[1, :2]]
    also = partitions.from_indices(DATA, rows)
    spoil(indices)
    spoil(sizes)
    for made in (data, also):
        np.testing.assert_array_equal(made.indices, INDICES)
        np.testing.assert_array_equal(made.sizes, SIZES)
        assert made.indices.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": None}, "dataset=None is not a Dataset"),
        ({"indices": np.array([[4, 5, 1000], [7, 8, -1]])}, "indices range from 4 to 1000, but there are 1000"),
        ({"indices": np.array([[4, 5, 2**32], [7, 8, -1]])}, "indices range from 4 to 4294967296"),
        ({"indices": np.array([[4, 5, -1], [7, 8, -1]])}, "indices range from -1 to 8"),
        ({"indices": np.array([[4, 5, 6], [7, 8, 9]])}, r"indices\[1\] must be -1 past the 2 examples.*not \[9\]"),
        ({"indices": np.array([[4, 5, 6], [7, 8, -2]])}, r"indices\[1\] must be -1 past the 2 examples.*not \[-2\]"),
        ({"indices": np.array([4, 5, 6])}, r"indices of shape \(3,\) and sizes of shape \(2,\)"),
        ({"indices": INDICES.astype(float)}, "must be integers, not float64"),
        ({"sizes": SIZES.astype(float)}, "must be integers, not float64"),
        ({"sizes": np.array([3, 2, 1])}, r"indices of shape \(2, 3\) and sizes of shape \(3,\)"),
        ({"sizes": np.array([4, 2])}, r"sizes\[0\]=4 is more than the 3 columns"),
        ({"sizes": np.array([3, 0])}, "node 1 holds no example"),
        ({"sizes": np.array([-1, 2])}, "node 0 holds no example"),
        ({"indices": np.empty((0, 3), int), "sizes": np.empty(0, int)}, "at least one node"),
    ],
)
def test_partitions_made_by_hand_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        partitions.PartitionedDataset(**({"dataset": DATA, "indices": INDICES, "sizes": SIZES} | change))


@pytest.mark.parametrize("row", [np.array([True, False, True]), [0.0, 1.0]])
def test_a_mask_is_not_a_list_of_examples(row):
    with pytest.raises(ValueError, match=r"indices\[1\] must be integers, not"):
        partitions.from_indices(DATA, [[0, 1, 2], row])


@pytest.mark.parametrize(
    ("alpha", "largest", "distance", "seeds"),
    [(10, 0.155, 0.246, 4), (1, 0.315, 0.794, 4), (0.1, 0.509, 1.266, 4), (0.01, 0.751, 1.570, 1)],  # many redraws
)
def test_lin_dirichlet_has_the_known_skew_at_equal_sizes(alpha, largest, distance, seeds):
    labels = np.repeat(np.arange(10), 5000)
    dataset = datasets.from_arrays(np.zeros((50_000, 1), np.float32), labels, np.zeros((10, 1), np.float32), range(10))
    shares = []
    for seed in range(seeds):
        data = partitions.lin_dirichlet(dataset, 16, alpha=alpha, seed=seed)
        assert set(data.sizes) == {3125}
        assert len(np.unique(data.indices)) == 50_000
        shares.append(data.label_distribution)
    shares = np.stack(shares)
    # The known figures are of one draw.
    assert shares.max(axis=2).mean() == pytest.approx(largest, rel=0.15)
    assert np.abs(shares - 0.1).sum(axis=2).mean() == pytest.approx(distance, rel=0.15)


def test_lin_dirichlet_refuses_what_it_cannot_split():
    for alpha in (0, -1, np.nan):
        with pytest.raises(ValueError, match="alpha="):
            partitions.lin_dirichlet(datasets.synthetic(num_train=100), 10, alpha=alpha)


@pytest.mark.parametrize(("num_nodes", "k"), [(10, 1), (7, 3), (100, 2), (16, 10)])
def test_k_classes_are_k_classes_of_equal_shares(num_nodes, k):
    data = partitions.k_classes(datasets.synthetic(num_train=2000), num_nodes, k=k, seed=1)
    counts = data.label_counts
    assert ((counts > 0).sum(axis=1) == k).all()
    assert len(set(data.sizes)) == 1
    assert len(set(counts[counts > 0])) == 1
    assert np.ptp((counts > 0).sum(axis=0)) <= 1
    held = data.indices[data.indices >= 0]
    assert len(np.unique(held)) == len(held)
    for wrong in (0, 11):
        with pytest.raises(ValueError, match=f"k={wrong}"):
            partitions.k_classes(datasets.synthetic(num_train=2000), num_nodes, k=wrong)


def test_local_tests_are_counted_without_rounding_errors():
    """A node with 7 of 100 examples in a class gets 7 of its 100 tests in that class; one with 7 of 90 gets 8."""
    labels, inputs = np.arange(10_000) % 2, np.zeros((10_000, 1), np.float32)
    dataset = datasets.from_arrays(inputs, labels, inputs, labels)
    shares = [(ones, 100) for ones in range(1, 100)] + [(7, 90)]
    held = [[*range(1, 2 * ones, 2), *range(0, 2 * (size - ones), 2)] for ones, size in shares]
    data = partitions.from_indices(dataset, held).with_local_tests()
    found = [np.bincount(labels[own[own >= 0]], minlength=2).tolist() for own in data.test_indices]
    assert found == [[100 - ones, ones] for ones in range(1, 100)] + [[93, 8]]


def test_groups_stay_together():
    dataset = datasets.synthetic(num_train=300)
    groups = np.random.default_rng(0).choice(["ann", "bob", "eve", "kim", "joe"], 300)
    for num_nodes in (5, 3):
        data = partitions.by_group(dataset, num_nodes, groups=groups)
        owners = {}
        for node, row in enumerate(data.indices):
            for example in row[row >= 0]:
                owners.setdefault(groups[example], set()).add(node)
        assert all(len(nodes) == 1 for nodes in owners.values())
        assert data.sizes.sum() == 300
    for labels in (np.zeros((300, 8), int), np.zeros((300, 2))):  # sequences, and real targets
        several = datasets.from_arrays(np.zeros((300, 8)), labels, np.zeros((4, 8)), labels[:4])
        assert (partitions.by_group(several, 3, groups=groups).sizes == data.sizes).all()
    with pytest.raises(ValueError, match="num_nodes=6"):
        partitions.by_group(dataset, 6, groups=groups)
    with pytest.raises(ValueError, match=r"groups have shape \(3,\)"):
        partitions.by_group(dataset, 2, groups=[1, 2, 3])
