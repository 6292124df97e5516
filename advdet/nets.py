"""The classifiers: the paper's MNIST network and its 32-layer pre-activation ResNet.

With `detector_nets.py` the only file that imports flax. Both convolutions are written for what
XLA:CPU does well; their values and gradients equal those of `lax.conv_general_dilated`:

- `patches_conv` (MNIST): strided slices and one matrix product, faster than a convolution where
  channels are few and images small.
- `conv` (ResNet): an ordinary convolution whose input gradient is written as another ordinary
  convolution, since XLA:CPU runs the derived form 10 to 30 times slower inside compiled loops.

Precision is HIGHEST: TF32 and bfloat16 flip an attack's success tests. Training may lower it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from advdet.types import Classifier, InputError, Outputs, PyTree

_CONV_LAYOUT = ("NHWC", "HWIO", "NHWC")
_MIN_SIDE = 16  # below it MnistNet's last VALID convolution has no output pixel
_COLOUR_CHANNELS = 3


def dropout(key: jax.Array, x: jax.Array, rate: float = 0.5) -> jax.Array:
    """Zeroes each unit of x with probability `rate` and divides the others by 1 - rate.

    Args:
      key: typed key.
      x: [B, ...] activations; each unit of each image gets its own draw.
      rate: in [0, 1). At 0.5 every random bit serves as one mask entry, so 32 units cost one word.

    Returns:
      [B, ...] of x's dtype.
    """
    if rate == 0.0:
        return x
    if rate == 0.5:
        units = math.prod(x.shape[1:])
        words = jax.random.bits(key, (x.shape[0], -(-units // 32), 1), jnp.uint32)
        places = jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 32)
        bits = (jnp.broadcast_to(words, (*words.shape[:2], 32)) >> places) & jnp.uint32(1)
        keep = bits.reshape(x.shape[0], -1)[:, :units].reshape(x.shape) != 0
    else:
        keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))


def _edges(x: jax.Array, kernel: jax.Array, stride: int, padding: str):
    """The padding (low, high) of the two spatial axes."""
    return lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], (stride, stride), padding)


def patches_conv(
    x: jax.Array, kernel: jax.Array, stride: int, padding: str, precision: str = "highest"
) -> jax.Array:
    """Convolution as strided slices and one matrix product.

    Args:
      x: [B, H, W, C].
      kernel: [h, w, C, O].
      stride: of both spatial axes.
      padding: "SAME" or "VALID".
      precision: of the matrix product.

    Returns:
      [B, H', W', O].
    """
    edges = _edges(x, kernel, stride, padding)
    x = jnp.pad(x, ((0, 0), *edges, (0, 0)))
    (h, w), (height, width) = kernel.shape[:2], x.shape[1:3]
    rows, columns = (height - h) // stride + 1, (width - w) // stride + 1
    slices = [
        x[:, i : i + stride * (rows - 1) + 1 : stride, j : j + stride * (columns - 1) + 1 : stride]
        for i in range(h)
        for j in range(w)
    ]
    patches = jnp.concatenate(slices, axis=-1)
    return jnp.matmul(patches, kernel.reshape(-1, kernel.shape[-1]), precision=precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def conv(
    x: jax.Array, kernel: jax.Array, stride: int, padding: str, precision: str = "highest"
) -> jax.Array:
    """Convolution [B, H, W, C] with [h, w, C, O] -> [B, H', W', O]; reverse mode only."""
    return _plain_conv(x, kernel, stride, padding, precision)


def _plain_conv(x, kernel, stride, padding, precision):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=_CONV_LAYOUT, precision=precision
    )


def _conv_forward(x, kernel, stride, padding, precision):
    return _plain_conv(x, kernel, stride, padding, precision), (x, kernel)


def _conv_backward(stride, padding, precision, residuals, cotangent):
    x, kernel = residuals
    # The input gradient: output pixels spread `stride` apart, convolved with the turned kernel. The
    # spreading is an explicit pad, because XLA:CPU's dilated convolution is the slow one.
    edges = _edges(x, kernel, stride, padding)
    config = [(0, 0, 0)]
    for axis in (1, 2):
        reach = kernel.shape[axis - 1] - 1
        spread = (cotangent.shape[axis] - 1) * stride + 1
        low = reach - edges[axis - 1][0]
        config.append((low, x.shape[axis] + reach - low - spread, stride - 1))
    config.append((0, 0, 0))
    spread = lax.pad(cotangent, jnp.zeros((), cotangent.dtype), config)
    turned = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    x_gradient = _plain_conv(spread, turned, 1, "VALID", precision)
    _, pull = jax.vjp(lambda k: _plain_conv(x, k, stride, padding, precision), kernel)
    (kernel_gradient,) = pull(cotangent)
    return x_gradient, kernel_gradient


conv.defvjp(_conv_forward, _conv_backward)


class Conv(nn.Module):
    """A convolution with He-normal kernel; `by_patches` chooses the form."""

    features: int
    size: int
    stride: int = 1
    padding: str = "SAME"
    by_patches: bool = False
    precision: str = "highest"

    @nn.compact
    def __call__(self, x):
        shape = (self.size, self.size, x.shape[-1], self.features)
        # The paper's networks: Keras' own initialiser for digits, He's for the ResNet.
        scheme = nn.initializers.glorot_uniform if self.by_patches else nn.initializers.he_normal
        kernel = self.param("kernel", scheme(), shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        form = patches_conv if self.by_patches else conv
        out = form(x, kernel, self.stride, self.padding, self.precision)
        return out + bias.reshape(1, 1, 1, -1)


class MnistNet(nn.Module):
    """The paper's MNIST network (reference code of Carlini & Wagner 2017, section 2).

    Features: `conv1`, `conv2`, `conv3` and `penultimate` [B, 32], each after its ReLU.
    """

    num_classes: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, images, key=None, train=False) -> Outputs:
        """Images [B, H, W, C] in [0, 1], H and W >= 16; a key switches dropout on."""
        del train  # no batch statistics
        if min(images.shape[1:3]) < _MIN_SIDE:
            raise InputError(
                f"images of {images.shape[1]} x {images.shape[2]} pixels are too small for this "
                f"network: it needs at least {_MIN_SIDE} x {_MIN_SIDE}"
            )
        form = functools.partial(Conv, 64, by_patches=True, precision=self.precision)
        dense = functools.partial(
            nn.Dense, precision=self.precision, kernel_init=nn.initializers.glorot_uniform()
        )
        conv1 = nn.relu(form(5, 2, "SAME", name="conv1")(images - 0.5))
        conv2 = nn.relu(form(3, 2, "VALID", name="conv2")(conv1))
        conv3 = nn.relu(form(3, 1, "VALID", name="conv3")(conv2))
        penultimate = nn.relu(dense(32, name="dense")(conv3.reshape(conv3.shape[0], -1)))
        hidden = penultimate if key is None else dropout(key, penultimate)
        logits = dense(self.num_classes, name="logits")(hidden)
        features = {"conv1": conv1, "conv2": conv2, "conv3": conv3, "penultimate": penultimate}
        return Outputs(logits, features)


class ResNet32(nn.Module):
    """32-layer pre-activation ResNet (He et al. 2016; the paper's CIFAR network).

    Features: `ad0` ... `ad4`, where Metzen et al. 2017 attach their detector (the image, the first
    convolution, the three groups of residual blocks), and `penultimate` [B, 64].
    """

    num_classes: int
    precision: str = "highest"
    momentum: float = 0.99
    epsilon: float = 1e-3
    blocks: int = 5

    @nn.compact
    def __call__(self, images, key=None, train=False) -> Outputs:
        """Images [B, H, W, C] in [0, 1]; a key switches dropout on, `train` batch statistics."""
        form = functools.partial(Conv, precision=self.precision)

        def norm_relu(x, name):
            norm = nn.BatchNorm(not train, momentum=self.momentum, epsilon=self.epsilon, name=name)
            return nn.relu(norm(x))

        x = norm_relu(form(16, 3, name="conv")(images - 0.5), "norm")
        features = {"ad0": images, "ad1": x}
        for group, width in enumerate((16, 32, 64)):
            for block in range(self.blocks):
                name = f"group{group + 1}_block{block + 1}"
                stride = 2 if group > 0 and block == 0 else 1
                # The first block follows a norm and ReLU directly and skips its own.
                inner = x if group == block == 0 else norm_relu(x, f"{name}_norm1")
                inner = form(width, 3, stride, name=f"{name}_conv1")(inner)
                inner = form(width, 3, name=f"{name}_conv2")(norm_relu(inner, f"{name}_norm2"))
                if x.shape != inner.shape:
                    x = form(width, 1, stride, "VALID", name=f"{name}_shortcut")(x)
                x = x + inner
            features[f"ad{group + 2}"] = x
        last = norm_relu(x, "last_norm")
        penultimate = last.mean((1, 2))
        pooled = penultimate if key is None else dropout(key, last).mean((1, 2))
        logits = nn.Dense(self.num_classes, precision=self.precision, name="logits")(pooled)
        return Outputs(logits, features | {"penultimate": penultimate})


class TrainOutputs(NamedTuple):
    """What a network says in training mode.

    Attributes:
      outputs: as from a `Classifier`.
      batch_stats: the running statistics after this batch; {} without BatchNorm.
    """

    outputs: Outputs
    batch_stats: PyTree


@dataclasses.dataclass(frozen=True)
class NetApply:
    """A Linen network as `Classifier.apply`: inference-mode BatchNorm; equal by value."""

    net: Any

    def __call__(
        self, variables: PyTree, images: jax.Array, key: jax.Array | None = None
    ) -> Outputs:
        return self.net.apply(variables, images, key)


def train_apply(
    net: nn.Module, variables: PyTree, images: jax.Array, key: jax.Array | None
) -> TrainOutputs:
    """The network in training mode: BatchNorm by this batch, dropout where a key is given."""
    outputs, updated = net.apply(variables, images, key, train=True, mutable=["batch_stats"])
    return TrainOutputs(outputs, updated.get("batch_stats", {}))


def init(key: jax.Array, net: nn.Module, image_shape: tuple[int, int, int]) -> Classifier:
    """An untrained classifier for images of shape (H, W, C)."""
    variables = jax.jit(net.init)(key, jnp.zeros((1, *image_shape), jnp.float32))
    return Classifier(variables, NetApply(net))


def without_rescaling(classifier: Classifier) -> Classifier:
    """Our networks as the paper's script thins them: kept units are not divided by 1 - rate.

    Dropout comes last before the final, linear layer, so halving that layer's kernel is the same.
    Only calls with a key mean anything.

    Raises:
      InputError: the classifier is not one of these networks.
    """
    if not isinstance(classifier.apply, NetApply):
        raise InputError(
            "rescale=0 is the slip of the paper's script on its own networks; this classifier is "
            "another"
        )
    params = classifier.variables["params"]
    logits = params["logits"] | {"kernel": params["logits"]["kernel"] * 0.5}
    variables = classifier.variables | {"params": params | {"logits": logits}}
    return Classifier(variables, classifier.apply)


def net_for(
    dataset: str, num_classes: int, image_shape: tuple[int, int, int] | None = None
) -> nn.Module:
    """The network for a data set: ResNet32 for CIFAR-10 and colour images, else MnistNet."""
    colour = image_shape is not None and image_shape[-1] == _COLOUR_CHANNELS
    if colour or dataset.startswith(("cifar", "svhn")):
        return ResNet32(num_classes)
    return MnistNet(num_classes)
