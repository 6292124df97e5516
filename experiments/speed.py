"""How fast is the attack engine, against the bare gradient that it is built on? Ratios, in one run.

python -m experiments.speed
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from absl import flags

from experiments import common

flags.adopt_module_key_flags(common)
LANES = flags.DEFINE_integer("lanes", 64, "Lanes over all devices.", lower_bound=1)
_CHILD = flags.DEFINE_integer(
    "memory_of", 0, "Used by the script itself: measure one run's memory."
)
_SMALL, _LARGE = 100, 400
_BARE_SECONDS = 5.0


def bare_rate(objective, defense, images, targets, mesh) -> float:
    """Gradients a second of a compiled loop that does nothing else, sharded as in the engine."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    def one(defense, image, target):
        total = lambda x: jnp.sum(objective(jax.random.key(0), defense, x, target).losses)
        return jax.grad(total)(image)

    @partial(jax.jit, static_argnums=3)
    def loop(defense, images, targets, steps):
        def on_device(defense, images, targets):
            gradients = jax.vmap(partial(one, defense))
            body = lambda _, x: x - 1e-6 * gradients(x, targets)
            return jax.lax.fori_loop(0, steps, body, images)

        split = P("devices")
        return jax.shard_map(
            on_device, mesh=mesh, in_specs=(P(), split, split), out_specs=split, check_vma=False
        )(defense, images, targets)

    steps = 10
    while True:
        jax.block_until_ready(loop(defense, images, targets, steps))
        tick = time.perf_counter()
        jax.block_until_ready(loop(defense, images, targets, steps))
        spent = time.perf_counter() - tick
        if spent > _BARE_SECONDS:
            return len(images) * steps / spent
        steps = int(steps * max(2.0, 1.2 * _BARE_SECONDS / spent))


def engine(num_images: int, lanes: int):
    """One untimed and one timed run of C&W `fast` on the undefended MNIST classifier."""
    import jax
    import numpy as np

    from advdet import cells, training
    from advdet.attacks import driver, presets
    from advdet.attacks.objectives import Generic
    from advdet.defenses import undefended

    splits = common.splits()
    defense = undefended(training.classifier_for(splits))
    batch = splits.test.take(slice(num_images))
    targets = cells.random_targets(0, batch.labels, batch.ids, splits.num_classes)
    attack = presets.make(
        "carlini_wagner", presets.settings("carlini_wagner", "fast", splits.image_shape[-1], "none")
    )
    key = jax.random.key(common.SEED.value)
    last = driver.run(
        key, attack, Generic(), defense, batch.images, targets, np.asarray(batch.ids),
        lanes=lanes // jax.device_count(),
    )  # fmt: skip
    return last, defense, batch.images, targets


def main() -> None:
    """Prints the three ratios."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from advdet.attacks.objectives import Generic

    if _CHILD.value:
        last, *_ = engine(_CHILD.value, LANES.value)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"peak_mib": peak, "seconds": last.run_seconds}))
        return
    print(
        f"C&W fast on {common.DATASET.value}, {LANES.value} lanes over {jax.device_count()} devices"
    )
    large, defense, images, targets = engine(_LARGE, LANES.value)
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    bare = bare_rate(Generic(), defense, images[: LANES.value], targets[: LANES.value], mesh)
    small, *_ = engine(_SMALL, LANES.value)
    rate = large.lane_steps / large.run_seconds
    times = large.run_seconds / small.run_seconds
    print(f"bare gradient  {bare:9,.0f} a second")
    print(f"engine         {rate:9,.0f} a second that advance an image: {rate / bare:.1%} of it")
    seconds = f"{large.run_seconds:9.1f} s, {_SMALL} images {small.run_seconds:.1f} s"
    print(f"{_LARGE} images     {seconds}: {times:.2f} x")
    peaks = {}
    for count in (_SMALL, _LARGE):
        out = subprocess.run(
            [sys.executable, "-m", "experiments.speed", *sys.argv[1:], f"--memory_of={count}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks[count] = json.loads(out.stdout.splitlines()[-1])["peak_mib"]
    print(f"peak memory    {peaks[_LARGE]:9.0f} MiB, {_SMALL} images {peaks[_SMALL]:.0f} MiB: "
          f"{peaks[_LARGE] / peaks[_SMALL]:.2f} x")  # fmt: skip


if __name__ == "__main__":
    common.run(main)
