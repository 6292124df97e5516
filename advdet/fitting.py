"""One pure training loop for classifiers and learned detectors.

`fit` is given a loss and knows nothing of networks. Everything random comes from
fold_in(key, epoch) and fold_in(key, step), so that a run which was stopped and resumed ends with
the same bits as one that was not. Batches are spread over all devices; on CPU each device works
through micro-batches that fit its cache, unrolled in one compiled step (inside a compiled loop
XLA:CPU runs kernel gradients 10 to 30 times slower).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from advdet import checkpoints
from advdet.recipes import Recipe, optimizer
from advdet.types import InputError, PyTree

LossFn = Callable[[PyTree, PyTree, jax.Array, PyTree], tuple[jax.Array, tuple[PyTree, dict]]]
_AXIS = "device"
_CPU_MICRO_BATCH = 32  # images a device takes in one pass: more of them fall out of the cache


class TrainState(NamedTuple):
    """Everything that the next step depends on.

    Attributes:
      step: [] int32 steps taken.
      params: learned arrays.
      state: other arrays that the loss carries along (BatchNorm statistics), {} if none.
      average: moving average of params, or {} where the recipe keeps none.
      optimizer: optax state.
    """

    step: jax.Array
    params: PyTree
    state: PyTree
    average: PyTree
    optimizer: PyTree


class Fitted(NamedTuple):
    """What training gives.

    Attributes:
      params: learned arrays, averaged if the recipe says so.
      state: the loss function's other arrays after the last step.
      metrics: name -> mean over the last epoch.
    """

    params: PyTree
    state: PyTree
    metrics: dict[str, float]


def device_mesh(batch_size: int) -> Mesh:
    """A mesh of as many local devices as divide the batch."""
    devices = jax.local_devices()
    count = max(n for n in range(1, len(devices) + 1) if batch_size % n == 0)
    return Mesh(np.array(devices[:count]), (_AXIS,))


@functools.lru_cache(maxsize=8)
def _make_step(recipe, steps_per_epoch, loss_fn, augment, mesh):
    """The step (key, TrainState, batch) -> (TrainState, metrics); equal arguments compile once."""
    sgd = optimizer(recipe, steps_per_epoch)
    local = recipe.batch_size // mesh.size
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    micro = local
    if on_cpu:
        micro = max(n for n in range(1, min(local, _CPU_MICRO_BATCH) + 1) if local % n == 0)
    passes = local // micro
    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    def on_device(key, params, state, batch):
        totals = None
        for index in range(passes):
            place = jax.lax.axis_index(_AXIS) * passes + index
            augment_key, loss_key = jax.random.split(jax.random.fold_in(key, place))
            part = jax.tree.map(lambda x, at=index * micro: x[at : at + micro], batch)
            if augment is not None:
                part = part._replace(images=augment(augment_key, part.images))
            (loss, (state, metrics)), gradients = gradient(params, state, loss_key, part)
            new = (gradients, metrics | {"loss": loss})
            totals = new if totals is None else jax.tree.map(jnp.add, totals, new)
        means = jax.tree.map(lambda x: x / passes, totals)
        return jax.lax.pmean((means, state), _AXIS)

    spread = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(), P(), P(), P(_AXIS)), out_specs=P(), check_vma=False
    )

    @functools.partial(jax.jit, donate_argnums=1)
    def step(key, current, batch):
        step_key = jax.random.fold_in(key, current.step)
        (gradients, metrics), state = spread(step_key, current.params, current.state, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix dtypes
            updates, opt = sgd.update(gradients, current.optimizer, current.params)
        params = optax.apply_updates(current.params, updates)
        average = current.average
        if recipe.average:
            # Early on the average spans a tenth of the run, so that the random start fades.
            count = current.step.astype(jnp.float32)
            decay = jnp.minimum(recipe.average, (1.0 + count) / (10.0 + count))
            average = jax.tree.map(lambda a, p: decay * a + (1.0 - decay) * p, average, params)
        return TrainState(current.step + 1, params, state, average, opt), metrics

    return step


def fit(
    key: jax.Array,
    recipe: Recipe,
    loss_fn: LossFn,
    params: PyTree,
    state: PyTree,
    data: PyTree,
    *,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    checkpoint: Path | None = None,
    settings: dict[str, Any] | None = None,
    progress: str | None = None,
    stop_after: int | None = None,
) -> Fitted:
    """Minimises the mean of `loss_fn` over `data` by SGD.

    Args:
      key: decides order, augmentation and whatever the loss draws.
      recipe: see Recipe.
      loss_fn: `(params, state, key, batch) -> (loss [], (new state, {name: metric []}))`, means
        over the rows of batch. Hashable; equal ones (a function, a frozen dataclass) are compiled
        once.
      params: starting point.
      state: starting state, {} if the loss keeps none.
      data: pytree of arrays that share their first axis, on the host.
      augment: `(key, images) -> images` for data with a field `images` (a Batch).
      checkpoint: folder for the state after each epoch; a run found there goes on.
      settings: JSON-able facts that a resumed run must share (data hash, seed); with them the
        recipe is compared.
      progress: what to call the run on its progress bar; None for silence.
      stop_after: leave after this epoch, as if interrupted.

    Raises:
      InputError: too few rows for one batch, or a checkpoint of another run.
    """
    rows = len(jax.tree.leaves(data)[0])
    steps = rows // recipe.batch_size
    if steps == 0:
        raise InputError(
            f"{rows} training rows do not fill one batch of {recipe.batch_size}: "
            "use more data or a smaller batch_size"
        )
    mesh = device_mesh(recipe.batch_size)
    average, start = params if recipe.average else {}, optimizer(recipe, steps).init(params)
    current = TrainState(jnp.int32(0), params, state, average, start)
    facts = {"recipe": dataclasses.asdict(recipe), "devices": mesh.size} | (settings or {})
    facts = json.loads(json.dumps(facts))  # as they will be read back
    first_epoch, metrics = 0, {}
    if checkpoint is not None:
        resumed = _resume(checkpoint, current, facts)
        if resumed is not None:
            current, first_epoch, metrics = resumed
    # Copied, since the step takes its argument's memory and the caller keeps params.
    current = jax.device_put(jax.tree.map(np.array, current), NamedSharding(mesh, P()))
    order_key, step_key = jax.random.split(key)
    step = _make_step(recipe, steps, loss_fn, augment, mesh)
    by_row = NamedSharding(mesh, P(_AXIS))

    total = recipe.epochs * steps
    bar = _bar(progress, total, first_epoch * steps)
    for epoch in range(first_epoch, recipe.epochs):
        epoch_key = jax.random.fold_in(order_key, epoch)
        order = np.asarray(jax.random.permutation(epoch_key, rows))
        seen = []
        for start in range(0, steps * recipe.batch_size, recipe.batch_size):
            chosen = order[start : start + recipe.batch_size]
            batch = jax.tree.map(lambda x, rows=chosen: np.asarray(x[rows]), data)
            batch = jax.device_put(batch, by_row)
            current, step_metrics = step(step_key, current, batch)
            seen.append(step_metrics)
            if len(seen) > 1:  # wait for the step before: the bar is honest, the device stays busy
                jax.block_until_ready(seen[-2])
            bar.update()
        seen = jax.device_get(seen)
        metrics = {name: float(np.mean([m[name] for m in seen])) for name in seen[0]}
        _say(bar, progress, epoch + 1, recipe.epochs, metrics)
        if checkpoint is not None:
            _store(checkpoint, current, epoch + 1, facts, metrics)
        if stop_after == epoch + 1:
            break
    bar.close()
    final = jax.device_get(current)
    return Fitted(final.average if recipe.average else final.params, final.state, metrics)


def _bar(progress, total, done):
    interval = 0.2 if sys.stderr.isatty() else 20.0
    return tqdm(
        total=total,
        initial=done,
        desc=progress,
        unit="step",
        mininterval=interval,
        disable=progress is None,
    )


def _say(bar, progress, epoch, epochs, metrics):
    if progress is not None:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
        bar.write(f"{progress}: epoch {epoch} of {epochs}, {figures}", file=sys.stderr)


# The npz and its manifest are two files, and a run may be killed between them: two slots take turns
# so that one of them is always whole.
def _slots(folder: Path) -> list[Path]:
    return [Path(folder) / f"state-{slot}.npz" for slot in (0, 1)]


def _store(folder, current, epoch, facts, metrics):
    manifest = {"epoch": epoch, "settings": facts, "metrics": metrics}
    checkpoints.save(_slots(folder)[epoch % 2], jax.device_get(current), manifest)


def _resume(folder, like, facts):
    """(TrainState, epochs done, metrics) of the newest whole checkpoint, or None."""
    found = []
    for path in _slots(folder):
        try:
            manifest = checkpoints.load_manifest(path)
        except InputError:
            continue
        if manifest.get("settings") != facts:
            raise InputError(
                f"{path} is from a training with other settings "
                f"({_differences(manifest.get('settings') or {}, facts)}): delete its folder to "
                "start afresh, or give the settings it was started with"
            )
        try:
            found.append((manifest["epoch"], manifest["metrics"], checkpoints.load(path, like)[0]))
        except InputError:
            continue  # killed while writing; the other slot is whole
    if not found:
        return None
    epoch, metrics, state = max(found, key=lambda entry: entry[0])
    return state, epoch, metrics


def _differences(found, wanted):
    names = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
    return "; ".join(f"{n} was {found.get(n)}, is {wanted.get(n)}" for n in names)
