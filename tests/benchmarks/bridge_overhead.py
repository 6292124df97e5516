# ruff: noqa: E402  (JAX is set up before it is imported)
"""What calling torch from a compiled attack costs: input gradients a second; not a test.

    python tests/benchmarks/bridge_overhead.py [mnist|cifar10] [rounds]

Run it on an idle machine with torch installed (`pip install -e '.[torch]'`). One torch network, one
batch on one JAX device, in turn: called directly, through the bridge in a compiled loop, and
directly again, so that a change of the machine's load shows. The ratio is of the medians; the last
line is that of a whole attack (DDN) over all devices, its own arithmetic included.
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

from advdet import bridges
from advdet.attacks import DDN, driver
from advdet.attacks.goals import margin
from advdet.attacks.objectives import Generic
from advdet.defenses import undefended

_BATCH, _STEPS, _ROUNDS = 32, 30, 15


def network(channels: int, side: int) -> nn.Module:
    """Convolutions and dense layers, of about the size of advdet's networks."""
    torch.manual_seed(0)
    width = 32 if channels == 1 else 64
    layers = [nn.Conv2d(channels, width, 3, 2, 1), nn.ReLU()]
    for _ in range(1 if channels == 1 else 6):
        layers += [nn.Conv2d(width, width, 3, 1, 1), nn.ReLU()]
    layers += [nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width * (side // 4) ** 2, 10)).eval()


def direct(net, images, targets):
    """Seconds for a step of `_STEPS`, each a margin's gradient at a slightly other place."""
    x = torch.tensor(images.transpose(0, 3, 1, 2)).contiguous()
    wanted = nn.functional.one_hot(torch.tensor(targets).long(), 10).bool()
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    began = time.perf_counter()
    for _ in range(_STEPS):
        x.requires_grad_(True)
        logits = net(x)
        other = logits.masked_fill(wanted, -torch.inf).amax(1)
        (slope,) = torch.autograd.grad((other - logits[wanted]).sum(), x)
        x = (x.detach() - 1e-4 * slope).clamp(0, 1)
    return (time.perf_counter() - began) / _STEPS, x.numpy().transpose(0, 2, 3, 1)


def bridged(classifier):
    """The same in a compiled loop, as the attacks do it."""

    def one(image, target):
        return margin(classifier(image[None]).logits[0], target, True)

    @jax.jit
    def loop(images, targets):
        def step(_, images):
            slope = jax.vmap(jax.grad(one))(images, targets)
            return jnp.clip(images - 1e-4 * slope, 0, 1)

        return jax.lax.fori_loop(0, _STEPS, step, images)

    def run(images, targets):
        began = time.perf_counter()
        found = jax.block_until_ready(loop(images, targets))
        return (time.perf_counter() - began) / _STEPS, np.asarray(found)

    return run


def main(name="mnist", rounds=str(_ROUNDS)):
    side, channels = {"mnist": (28, 1), "cifar10": (32, 3)}[name]
    net = network(channels, side)
    rng = np.random.default_rng(0)
    images = rng.random((_BATCH, side, side, channels), np.float32)
    targets = rng.integers(0, 10, _BATCH).astype(np.int32)
    classifier = bridges.torch_classifier(net)
    loop = bridged(classifier)
    _, plain = direct(net, images, targets)
    _, through = loop(images, targets)
    np.testing.assert_allclose(plain, through, atol=1e-5)
    print(f"{torch.get_num_threads()} torch threads, {jax.device_count()} JAX devices")
    times = {"directly": [], "bridged": [], "directly again": []}
    for _ in range(int(rounds)):
        times["directly"].append(direct(net, images, targets)[0])
        times["bridged"].append(loop(images, targets)[0])
        times["directly again"].append(direct(net, images, targets)[0])
    for what, found in times.items():
        middle = np.median(found)
        print(
            f"{what}: {1e3 * middle:.2f} ms for a batch of {_BATCH} (from {1e3 * min(found):.2f} "
            f"to {1e3 * max(found):.2f}), {_BATCH / middle:,.0f} gradients a second"
        )
    plain = times["directly"] + times["directly again"]
    print(f"ratio of medians: {np.median(times['bridged']) / np.median(plain):.3f}")
    print(f"ratio of the fastest: {min(times['bridged']) / min(plain):.3f}")
    many = np.tile(images, (2 * jax.device_count(), 1, 1, 1))
    progress = driver.run(
        jax.random.key(0), DDN(_STEPS), Generic(), undefended(classifier), many,
        np.tile(targets, 2 * jax.device_count()), np.arange(len(many)), lanes=_BATCH,
    )  # fmt: skip
    print(f"a whole attack: {progress.lane_steps / progress.run_seconds:,.0f} steps a second")


if __name__ == "__main__":
    main(*sys.argv[1:])
