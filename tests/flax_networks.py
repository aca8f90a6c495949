"""ResNet and VGG-11 written with flax's own layers, as the papers' tables describe them. Parameters have our names."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class EvoNorm(nn.Module):
    """EPFL's variant, straight from its formula."""

    @nn.compact
    def __call__(self, x):
        channels = x.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        groups = min(32, channels)
        grouped = x.reshape(*x.shape[:3], groups, channels // groups)
        variance = grouped.var(axis=(1, 2, 4), ddof=1, keepdims=True)
        normal = (grouped * jax.nn.sigmoid(grouped) / jnp.sqrt(variance + 1e-5)).reshape(x.shape)
        return normal * scale[None, None, None] + bias[None, None, None]


def norm(kind, x, train, groups):
    if kind == "batch":
        return nn.BatchNorm(use_running_average=not train, momentum=0.9, epsilon=1e-5)(x)
    return nn.GroupNorm(num_groups=groups, epsilon=1e-5)(x)


def batch_statistics(x, scale_bias):
    mean, variance = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
    scale, bias = scale_bias
    return (x - mean[None, None, None]) / jnp.sqrt(variance + 1e-5)[None, None, None] * scale[None, None, None] + bias[
        None, None, None
    ]


class BatchNorm(nn.Module):
    """Batch normalisation without running statistics."""

    @nn.compact
    def __call__(self, x):
        shape = x.shape[-1:]
        pair = [self.param("scale", nn.initializers.ones, shape), self.param("bias", nn.initializers.zeros, shape)]
        return batch_statistics(x, pair)


class ResNet(nn.Module):
    widths: tuple
    blocks: int
    norm: str
    shortcut: str

    @nn.compact
    def __call__(self, x, train=False):
        def conv(x, width, window, stride=1):
            return nn.Conv(width, (window, window), stride, padding=window // 2, use_bias=False)(x)

        def first(x):
            return EvoNorm()(x) if self.norm == "evonorm" else nn.relu(norm(self.norm, x, train, 2))

        def second(x):
            return BatchNorm()(x) if self.norm == "evonorm" else norm(self.norm, x, train, 2)

        x = first(conv(x, self.widths[0], 3))
        for width in self.widths:
            for block in range(self.blocks):
                stride = 2 if block == 0 and width != self.widths[0] else 1
                y = second(conv(first(conv(x, width, 3, stride)), width, 3))
                if stride == 2 and self.shortcut == "A":
                    quarter = jnp.zeros((*y.shape[:3], width // 4), x.dtype)
                    x = jnp.concatenate([quarter, x[:, ::2, ::2], quarter], axis=3)
                elif stride == 2:
                    x = second(conv(x, width, 1, 2))
                x = nn.relu(y + x)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


class VGG11(nn.Module):
    norm: str
    share: int = 1  # of the widths

    @nn.compact
    def __call__(self, x, train=False):
        for width in (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"):
            if width == "M":
                x = nn.max_pool(x, (2, 2), (2, 2))
                continue
            x = nn.Conv(width // self.share, (3, 3), padding=1)(x)
            x = nn.relu(x if self.norm == "none" else norm(self.norm, x, train, 8))
        x = x.reshape(len(x), -1)
        if self.norm != "group":
            for _ in range(2):
                x = nn.relu(nn.Dense(512 // self.share)(nn.Dropout(0.5, deterministic=not train)(x)))
        return nn.Dense(10)(x)
