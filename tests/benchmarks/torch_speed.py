# ruff: noqa: E402  (JAX is set up before it is imported)
"""Input gradients a second: the attack engine against torch, one network, one run; not a test.

    python tests/benchmarks/torch_speed.py [cifar10|mnist]

Run it on an idle machine with torch installed (`pip install -e '.[torch]'`). The engine's figure is
that of a whole attack (DDN on the bare classifier: steps that advance an image, over the seconds in
the loop); torch's is the bare gradient of the same margin, in its better layout and batch size. The
logits of both are compared first.
"""

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from experiments import common

common.configure_process()

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from advdet import cells, nets
from advdet.attacks import DDN, driver
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended

_STEPS, _ROUNDS = 100, 3


def _pad_same(x, size, stride):
    """TensorFlow's SAME padding, which for a stride of 2 is not torch's."""
    edges = []
    for length in (x.shape[3], x.shape[2]):
        total = max(0, (-(-length // stride) - 1) * stride + size - length)
        edges += [total // 2, total - total // 2]
    return functional.pad(x, edges)


def _conv(x, leaf, stride=1, padding="SAME"):
    kernel = leaf["kernel"]
    if padding == "SAME":
        x = _pad_same(x, kernel.shape[-1], stride)
    return functional.conv2d(x, kernel, leaf["bias"], stride)


def _norm(x, params, stats, name):
    scale, bias = params[name]["scale"], params[name]["bias"]
    mean, variance = stats[name]["mean"], stats[name]["var"]
    return functional.relu(functional.batch_norm(x, mean, variance, scale, bias, eps=1e-3))


def _dense(x, leaf):
    return functional.linear(x, leaf["kernel"], leaf["bias"])


def torch_mnist(params, stats, x):
    """`nets.MnistNet` in torch."""
    del stats
    x = functional.relu(_conv(x - 0.5, params["conv1"], 2))
    x = functional.relu(_conv(x, params["conv2"], 2, "VALID"))
    x = functional.relu(_conv(x, params["conv3"], 1, "VALID"))
    x = functional.relu(_dense(x.permute(0, 2, 3, 1).flatten(1), params["dense"]))
    return _dense(x, params["logits"])


def torch_cifar10(params, stats, x):
    """`nets.ResNet32` in torch."""
    x = _norm(_conv(x - 0.5, params["conv"]), params, stats, "norm")
    for group, width in enumerate((16, 32, 64), 1):
        for block in range(1, 6):
            name = f"group{group}_block{block}"
            stride = 2 if group > 1 and block == 1 else 1
            inner = x if group == block == 1 else _norm(x, params, stats, f"{name}_norm1")
            inner = _conv(inner, params[f"{name}_conv1"], stride)
            inner = _conv(_norm(inner, params, stats, f"{name}_norm2"), params[f"{name}_conv2"])
            if x.shape[1] != width:
                x = _conv(x, params[f"{name}_shortcut"], stride, "VALID")
            x = x + inner
    return _dense(_norm(x, params, stats, "last_norm").mean((2, 3)), params["logits"])


def to_torch(tree, layout):
    """Weights in torch's order of axes."""

    def convert(leaf):
        array = np.array(leaf)
        if array.ndim == 4:
            return torch.tensor(array.transpose(3, 2, 0, 1)).contiguous(memory_format=layout)
        return torch.tensor(array.T if array.ndim == 2 else array)

    return jax.tree.map(convert, tree)


def torch_rate(net, variables, images, targets, batch, layout):
    """Input gradients a second of the targets' margins."""
    params = to_torch(variables["params"], layout)
    stats = to_torch(variables.get("batch_stats", {}), layout)
    x = torch.tensor(images[:batch].transpose(0, 3, 1, 2)).contiguous(memory_format=layout)
    wanted = nn.functional.one_hot(torch.tensor(targets[:batch]).long(), 10).bool()

    def gradient():
        x.requires_grad_(True)
        logits = net(params, stats, x)
        other = logits.masked_fill(wanted, -torch.inf).amax(1)
        (slope,) = torch.autograd.grad((other - logits[wanted]).sum(), x)
        return slope

    gradient(), gradient()
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() - began < 5.0:
        gradient()
        rounds += 1
    return rounds * batch / (time.perf_counter() - began)


def engine_rate(classifier, images, targets):
    """Steps a second that advance an image, in a whole DDN attack; compiling left out."""
    progress = driver.run(
        jax.random.key(0), DDN(_STEPS), Generic(), undefended(classifier), images, targets,
        np.arange(len(images)), lanes=cells.default_lanes(len(images)),
    )  # fmt: skip
    return progress.lane_steps / progress.run_seconds


def main(name):
    net, shape, twin = {
        "mnist": (nets.MnistNet(10), (28, 28, 1), torch_mnist),
        "cifar10": (nets.ResNet32(10), (32, 32, 3), torch_cifar10),
    }[name]
    count = 512 if name == "mnist" else 64
    classifier = nets.init(jax.random.key(0), net, shape)
    rng = np.random.default_rng(0)
    images = rng.random((count, *shape), np.float32)
    targets = rng.integers(0, 10, count).astype(np.int32)
    ours = np.asarray(classifier(jnp.asarray(images[:8])).logits)
    plain = torch.contiguous_format
    with torch.no_grad():
        theirs = twin(
            to_torch(classifier.variables["params"], plain),
            to_torch(classifier.variables.get("batch_stats", {}), plain),
            torch.tensor(images[:8].transpose(0, 3, 1, 2)),
        ).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    torch.set_num_threads(len(jax.devices()))
    best = {}
    for _ in range(_ROUNDS):  # in turn, so that a slow minute of the machine is shared
        best.setdefault("engine", []).append(engine_rate(classifier, images, targets))
        for layout in ("contiguous_format", "channels_last"):
            for batch in (32, 64) if name == "cifar10" else (128, 512):
                rate = torch_rate(
                    twin, classifier.variables, images, targets, batch, getattr(torch, layout)
                )
                best.setdefault(f"torch, {layout}, {batch} images", []).append(rate)
    median = {who: float(np.median(rates)) for who, rates in best.items()}
    for who, rate in median.items():
        print(f"{name}: {who}: {rate:,.0f} input gradients a second")
    torch_best = max(rate for who, rate in median.items() if who != "engine")
    print(f"{name}: engine / torch's best: {median['engine'] / torch_best:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cifar10")
