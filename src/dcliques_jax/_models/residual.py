"""Residual networks for small images."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dcliques_jax import layers
from dcliques_jax._models import parts


class ResNet(nn.Module):
    """A residual network with basic blocks; see `models.resnet20` and `models.resnet18`."""

    widths: tuple[int, ...]  # channels of every stage; the first block of later stages halves height and width
    blocks: int  # per stage
    num_classes: int = 10
    norm: str = "group"
    shortcut: str = "B"
    groups: int = 2

    @property
    def couples_examples(self) -> bool:
        """Whether the output of an example depends on its batch: EvoNorm normalises half of the layers by batch."""
        return self.norm == "evonorm"

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        parts.check_images("a ResNet", inputs, 2 ** (len(self.widths) - 1))
        x = self._first(self._conv(inputs, self.widths[0], 3), train)
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                x = self._block(x, width, 2 if stage and not block else 1, train)
        return parts.dense(self.num_classes, x.mean(axis=(1, 2)))

    def _block(self, x: jax.Array, width: int, stride: int, train: bool) -> jax.Array:
        """Computes ReLU(norm(conv(ReLU(norm(conv(x))))) + shortcut(x))."""
        y = self._first(self._conv(x, width, 3, stride), train)
        y = self._second(self._conv(y, width, 3), train)
        return nn.relu(y + self._shortened(x, width, stride, train))

    def _shortened(self, x: jax.Array, width: int, stride: int, train: bool) -> jax.Array:
        """The input in the shape of the output: as it is, with zeros for new channels (A), or projected (B)."""
        if x.shape[-1] == width and stride == 1:
            return x
        if self.shortcut == "A":
            new = width - x.shape[-1]
            return jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (new // 2, new - new // 2)))
        return self._second(self._conv(x, width, 1, stride), train)

    def _conv(self, x: jax.Array, width: int, window: int, stride: int = 1) -> jax.Array:
        start = parts.HE_NORMAL if self.shortcut == "A" else parts.FAN_OUT
        options = {"strides": stride, "padding": window // 2, "use_bias": False, "kernel_init": start}
        return layers.Conv(width, (window, window), **options)(x)

    def _first(self, x: jax.Array, train: bool) -> jax.Array:
        """The normalisation and non-linearity in the stem and after the first convolution of a block."""
        if self.norm == "evonorm":
            return layers.EvoNorm()(x)
        return nn.relu(parts.normalised(self.norm, x, train=train, groups=self.groups))

    def _second(self, x: jax.Array, train: bool) -> jax.Array:
        """The normalisation before a sum."""
        if self.norm == "evonorm":
            return layers.BatchNorm(running=False)(x)
        return parts.normalised(self.norm, x, train=train, groups=self.groups)
