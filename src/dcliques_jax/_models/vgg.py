"""VGG-11 for small images."""

import flax.linen as nn
import jax

from dcliques_jax import layers
from dcliques_jax._models import parts

WIDTHS = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)


class VGG11(nn.Module):
    """Convolutions and pools, then linear layers; see `models.vgg11`."""

    num_classes: int = 10
    norm: str = "none"
    groups: int = 8
    dropout: float = 0.5
    widths: tuple[int, ...] = WIDTHS  # channels of convolutions; 0: a pool

    @nn.compact
    def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        parts.check_images("vgg11", inputs, 32)
        x = inputs
        for width in self.widths:
            x = self._convolved(x, width, train) if width else layers.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        if self.norm != "group":
            for _ in range(2):
                x = nn.relu(parts.dense(max(self.widths), nn.Dropout(self.dropout, deterministic=not train)(x)))
        return parts.dense(self.num_classes, x)

    def _convolved(self, x: jax.Array, width: int, train: bool) -> jax.Array:
        x = layers.Conv(width, (3, 3), padding=1, kernel_init=parts.FAN_OUT)(x)
        if self.norm != "none":
            x = parts.normalised(self.norm, x, train=train, groups=self.groups)
        return nn.relu(x)
