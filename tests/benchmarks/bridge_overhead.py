# ruff: noqa: E402  (JAX is set up before it is imported)
"""What calling torch from a compiled attack costs: input gradients a second; not a test.

    python tests/benchmarks/bridge_overhead.py [mnist|cifar10] [rounds]

Run it on an idle machine with torch installed (`pip install -e '.[torch]'`). One torch network, one
batch on one JAX device, in turn: called directly, through the bridge in a compiled loop, and
directly again, so that a change of the machine's load shows. Processor time stands beside the time
on the clock: on a busy machine it alone says something, with one torch thread (OMP_NUM_THREADS=1;
idle threads of torch spin). The last line is of a whole attack (DDN) over all devices, its own
arithmetic included.
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
    """`_STEPS` steps, each a margin's gradient at a slightly other place; the last images."""
    x = torch.tensor(images.transpose(0, 3, 1, 2)).contiguous()
    wanted = nn.functional.one_hot(torch.tensor(targets).long(), 10).bool()
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    for _ in range(_STEPS):
        x.requires_grad_(True)
        logits = net(x)
        other = logits.masked_fill(wanted, -torch.inf).amax(1)
        (slope,) = torch.autograd.grad((other - logits[wanted]).sum(), x)
        x = (x.detach() - 1e-4 * slope).clamp(0, 1)
    return x.numpy().transpose(0, 2, 3, 1)


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

    return loop


def spent(function, *arguments):
    """(on the clock, of the processor) milliseconds a step."""
    clock, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(function(*arguments))
    return 1e3 * np.array([time.perf_counter() - clock, time.process_time() - processor]) / _STEPS


def main(name="mnist", rounds=str(_ROUNDS)):
    side, channels = {"mnist": (28, 1), "cifar10": (32, 3)}[name]
    net = network(channels, side)
    rng = np.random.default_rng(0)
    images = rng.random((_BATCH, side, side, channels), np.float32)
    targets = rng.integers(0, 10, _BATCH).astype(np.int32)
    classifier = bridges.torch_classifier(net)
    loop = bridged(classifier)
    np.testing.assert_allclose(direct(net, images, targets), loop(images, targets), atol=1e-5)
    print(f"{torch.get_num_threads()} torch threads, {jax.device_count()} JAX devices")
    plain, through = [], []
    for _ in range(int(rounds)):
        plain.append(spent(direct, net, images, targets))
        through.append(spent(loop, images, targets))
        plain.append(spent(direct, net, images, targets))
    for column, what in enumerate(("on the clock", "of the processor")):
        without, having = np.array(plain)[:, column], np.array(through)[:, column]
        print(
            f"milliseconds {what} for a batch of {_BATCH}, median (fastest): directly "
            f"{np.median(without):.2f} ({without.min():.2f}), bridged {np.median(having):.2f} "
            f"({having.min():.2f}); ratio {np.median(having) / np.median(without):.3f} "
            f"({having.min() / without.min():.3f})"
        )
    many = np.tile(images, (2 * jax.device_count(), 1, 1, 1))
    progress = driver.run(
        jax.random.key(0), DDN(_STEPS), Generic(), undefended(classifier), many,
        np.tile(targets, 2 * jax.device_count()), np.arange(len(many)), lanes=_BATCH,
    )  # fmt: skip
    print(f"a whole attack: {progress.lane_steps / progress.run_seconds:,.0f} steps a second")


if __name__ == "__main__":
    main(*sys.argv[1:])
