"""ResNets and VGG-11: golden counts, and equality with plain flax layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_networks
from dcliques_jax import algorithms, datasets, layers, models, partitions, simulate, topologies

IMAGES = jnp.zeros((1, 32, 32, 3))
RESNETS = [("batch", "A"), ("batch", "B"), ("group", "B"), ("evonorm", "B")]

# Parameters, numbers in the state, multiplications on an image of 32 x 32 if known
COUNTS = {
    "resnet20 A": (models.resnet20(shortcut="A", norm="batch"), 269_722, 1_376, 40_551_040),
    "resnet20 B": (models.resnet20(norm="batch"), 272_474, 1_568, 40_813_184),
    "resnet20 A, 100 classes": (models.resnet20(100, shortcut="A"), 275_572, 0, None),
    "resnet20 B, 100 classes": (models.resnet20(100), 278_324, 0, None),
    "resnet20 GN A": (models.resnet20(shortcut="A"), 269_722, 0, 40_551_040),
    "resnet20 GN B": (models.resnet20(), 272_474, 0, 40_813_184),
    "resnet20 EvoNorm": (models.resnet20(norm="evonorm"), 272_474, 0, None),
    "resnet18": (models.resnet18(), 11_173_962, 0, None),
    "resnet18, 100 classes": (models.resnet18(100), 11_220_132, 0, None),
    "resnet18 BN, 200 classes": (models.resnet18(200, norm="batch"), 11_271_432, 9_600, None),
    "vgg11": (models.vgg11(), 9_750_922, 0, 153_293_824),
    "vgg11 BN": (models.vgg11(norm="batch"), 9_756_426, 5_504, None),
    "vgg11 GN": (models.vgg11(norm="group"), 9_231_114, 0, 152_769_536),
    "vgg11 GN, 100 classes": (models.vgg11(100, norm="group"), 9_277_284, 0, None),
}


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def multiplications(model):
    """Those of convolutions and linear layers, from the shapes of kernels and outputs."""
    total = 0

    def shapes(key):
        variables = model.init(key, IMAGES)
        _, kept = model.apply(variables, IMAGES, capture_intermediates=True, mutable=["intermediates"])
        return variables["params"], kept["intermediates"]

    params, outputs = jax.eval_shape(shapes, jax.random.key(0))
    for name, values in params.items():
        if "kernel" in values:
            places = outputs[name]["__call__"][0].shape
            total += values["kernel"].size * int(np.prod(places[1:-1]))
    return total


@pytest.mark.parametrize("name", COUNTS)
def test_golden_counts(name):
    model, parameters, state, expected = COUNTS[name]
    made = jax.eval_shape(models.as_model(model).init, jax.random.key(0), IMAGES)
    assert (size(made[0]), size(made[1])) == (parameters, state)
    assert models.num_parameters(model, IMAGES) == parameters
    if expected:
        assert multiplications(model) == expected


def test_number_of_norms():
    for shortcut, norms, channels in (("A", 19, 688), ("B", 21, 784)):
        params, _ = jax.eval_shape(models.as_model(models.resnet20(shortcut=shortcut)).init, jax.random.key(0), IMAGES)
        scales = [values["scale"].size for name, values in params.items() if name.startswith("GroupNorm")]
        assert (len(scales), sum(scales)) == (norms, channels)


def compare(ours, theirs, images, labels):
    """Outputs, state and gradients of one node in training and evaluation, in float64."""
    model = models.as_model(ours)
    params, state = jax.jit(model.init)(jax.random.key(0), images)
    params, state = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (params, state))
    # Other values than the initial ones of norms, so that mistaking them shows.
    params = jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(1), leaf.shape), params)

    def plain(params, state, inputs, *, train, key):
        rngs = {"params": key} if train else None
        return theirs.apply({"params": params, **state}, inputs, train, rngs=rngs, mutable=list(state))

    def loss(apply, params):
        outputs, after = apply(params, state, images, train=True, key=jax.random.key(2))
        chosen = jax.nn.log_softmax(outputs)[jnp.arange(len(labels)), labels]
        return -chosen.mean(), after

    close = {"rtol": 1e-10, "atol": 1e-10}
    found, expected = (
        jax.jit(jax.value_and_grad(lambda params, apply=apply: loss(apply, params), has_aux=True))(params)
        for apply in (model.apply, plain)
    )
    np.testing.assert_allclose(found[0][0], expected[0][0], **close)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), found[1], expected[1])
    evaluated = (
        jax.jit(lambda a=a: a(params, state, images, train=False, key=None)[0])() for a in (model.apply, plain)
    )
    np.testing.assert_allclose(*evaluated, **close)
    return found[0][1], expected[0][1]


def batch(count, side=32):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(count, side, side, 3))), jnp.asarray(rng.integers(0, 10, count))


@pytest.mark.parametrize(("norm", "shortcut"), RESNETS)
@pytest.mark.usefixtures("x64")
def test_resnets_equal_plain_flax(norm, shortcut):
    """Two narrow stages of two blocks: the same code, compiled in a fraction of the time."""
    ours = models.resnet20(norm=norm, shortcut=shortcut).clone(widths=(8, 16), blocks=2)
    theirs = flax_networks.ResNet((8, 16), 2, norm, shortcut)
    images, labels = batch(3, 12)
    found, expected = compare(ours, theirs, images, labels)
    for name, kept in found.get("batch_stats", {}).items():
        other = expected["batch_stats"][name]
        np.testing.assert_allclose(kept["mean"], other["mean"], rtol=1e-10, atol=1e-12)
        side = 12 if int(name.removeprefix("BatchNorm_")) < 5 else 6  # the stem and two blocks come first
        places = 3 * side**2  # flax keeps the biased variance
        np.testing.assert_allclose(kept["var"] - 0.9, (other["var"] - 0.9) * places / (places - 1), rtol=1e-9)


@pytest.mark.usefixtures("x64")
def test_evonorm_equals_its_formula():
    """With 64 channels in 32 groups, as in the last stage of resnet20."""
    x, cosines = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 4, 64))), jnp.cos(jnp.arange(3840.0))
    params = {"scale": 1 + 0.1 * jnp.cos(jnp.arange(64.0)), "bias": jnp.sin(jnp.arange(64.0))}

    def total(layer, params, x):
        return (layer.apply({"params": params}, x) * cosines.reshape(x.shape)).sum()

    ours, theirs = (
        jax.jit(jax.value_and_grad(functools.partial(total, layer), (0, 1)))(params, x)
        for layer in (layers.EvoNorm(), flax_networks.EvoNorm())
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), ours, theirs)


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.usefixtures("x64")
def test_vgg_equals_plain_flax(norm):
    """An eighth as wide, with dropout: flax draws the same masks for modules of the same names."""
    ours = models.vgg11(norm=norm)
    ours = ours.clone(widths=tuple(width // 8 for width in ours.widths))
    compare(ours, flax_networks.VGG11(norm, 8), *batch(2))


@pytest.mark.parametrize(
    ("shape", "window", "stride"),
    [((2, 9, 8, 3), 3, 2), ((2, 8, 8, 5), 1, 2), ((1, 7, 9, 4), 5, 3), ((2, 8, 8, 16), 3, 1)],
)
@pytest.mark.usefixtures("x64")
def test_strided_convolutions_equal_those_of_xla(shape, window, stride):
    rng = np.random.default_rng(0)
    x, kernel = jnp.asarray(rng.normal(size=shape)), jnp.asarray(rng.normal(size=(window, window, shape[3], 6)))
    pads = [(window // 2, window // 2)] * 2

    def total(convolve, x, kernel):
        y = convolve(x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()

    convolutions = (layers.conv_general_dilated, jax.lax.conv_general_dilated)
    ours, theirs = (jax.value_and_grad(total, (1, 2))(convolve, x, kernel) for convolve in convolutions)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), ours, theirs)


def test_strided_convolutions_compute_only_what_they_keep():
    x, kernel = jnp.zeros((4, 32, 32, 16)), jnp.zeros((3, 3, 16, 32))
    jaxpr = str(
        jax.make_jaxpr(
            lambda x, k: layers.conv_general_dilated(
                x, k, (2, 2), [(1, 1)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )(x, kernel)
    )
    products = [line for line in jaxpr.splitlines() if "dot_general" in line]
    assert len(products) == 1
    assert "f32[4,16,16,32]" in products[0]


@pytest.mark.parametrize("norm", ["batch", "evonorm"])
def test_a_resnet_trains(norm):
    rng = np.random.default_rng(0)
    labels = np.arange(48) % 3
    means = rng.normal(size=(3, 8, 8, 3))
    images = (means[labels] + 0.5 * rng.normal(size=(48, 8, 8, 3))).astype(np.float32)
    data = partitions.iid(datasets.from_arrays(images, labels, images, labels), 4).sampled("full_batches")
    model = models.resnet20(3, norm=norm).clone(widths=(4, 8), blocks=1)
    result = simulate(
        topologies.fully_connected(4),
        data,
        model=model,
        algorithm=algorithms.dsgd(optax.sgd(0.1, momentum=0.9)),
        epochs=12,
        eval_every=12,
        batch_size=6,
        progress=False,
    )
    assert result.history.accuracy[-1].min() > 0.9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.resnet20(norm="layer"), "norm='layer'"),
        (lambda: models.resnet18(shortcut="C"), "shortcut='C'"),
        (lambda: models.resnet20(groups=0), "groups=0"),
        (lambda: models.vgg11(norm="evonorm"), "norm='evonorm'"),
        (lambda: models.vgg11(dropout=2), "dropout=2"),
        (lambda: models.num_parameters(models.vgg11(), jnp.zeros((1, 28, 28, 1))), "at least 32 x 32"),
        (lambda: models.num_parameters(models.resnet20(), jnp.zeros((1, 784))), "a ResNet takes images"),
    ],
)
def test_impossible_models_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
