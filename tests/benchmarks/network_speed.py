# ruff: noqa: E402  (JAX is set up before it is imported)
"""Input and parameter gradients a second of both networks; not a test.

    python tests/benchmarks/network_speed.py

Run it on an idle machine. Input gradients are taken inside a compiled loop, as attacks take them.
"""

import dataclasses
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from experiments import common

common.configure_process()

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from advdet import fitting, nets, plans, training
from advdet.types import Batch

NETS = {"mnist": (nets.MnistNet(10), (28, 28, 1)), "cifar10": (nets.ResNet32(10), (32, 32, 3))}


def seconds(run):
    """Of the faster of two runs, after one that compiles."""
    run()
    times = []
    for _ in range(2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def input_gradients(classifier, shape, steps, lanes=32):
    """Input gradients a second, `lanes` images spread over all devices."""
    mesh = fitting.device_mesh(lanes)

    def loop(classifier, images):
        gradient = jax.grad(lambda images: classifier(images).logits.max(-1).sum())
        step = lambda _, images: jnp.clip(images - 0.01 * gradient(images), 0.0, 1.0)
        return jax.lax.fori_loop(0, steps, step, images)

    axis = P(*mesh.axis_names)
    spread = jax.shard_map(loop, mesh=mesh, in_specs=(P(), axis), out_specs=axis, check_vma=False)
    images = np.random.default_rng(0).random((lanes, *shape), np.float32)
    run = jax.jit(spread)
    return lanes * steps / seconds(lambda: run(classifier, images).block_until_ready())


def parameter_gradients(name, net, classifier, shape, steps):
    """Parameter gradients a second while training, augmentation included."""
    plan = plans.PLANS[name, "fast"]
    count = steps * plan.recipe.batch_size
    rng = np.random.default_rng(0)
    images = rng.random((count, *shape), np.float32)
    batch = Batch(images, rng.integers(0, 10, count).astype(np.int32), np.arange(count))
    variables = classifier.variables
    loss = training.ClassifierLoss(net)
    recipe = dataclasses.replace(plan.recipe, epochs=1)

    def run():
        state = variables.get("batch_stats", {})
        arguments = (recipe, loss, variables["params"], state, batch)
        fitting.fit(jax.random.key(0), *arguments, augment=plan.augment)

    return count / seconds(run)


for name, (net, shape) in NETS.items():
    classifier = nets.init(jax.random.key(0), net, shape)
    steps = 200 if name == "mnist" else 15
    print(
        f"{name}: {input_gradients(classifier, shape, steps):,.0f} input gradients/s, "
        f"{parameter_gradients(name, net, classifier, shape, steps):,.0f} parameter gradients/s",
        flush=True,
    )
