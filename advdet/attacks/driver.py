"""Runs an attack over many images by continuous batching.

Each device holds L lanes and a queue of images of its own. One vmapped step of the attack runs
inside a compiled loop; a lane whose image is done hands its result in and takes the next image from
the queue, so that no lane waits for the slowest and the cost is the sum of what each image needs.
The loop comes back to the host every second or two, for progress, for saving and for Ctrl-C.

An image's result depends on its id and the settings alone: bit for bit at equal lanes a device,
whatever its lane, its neighbours, its place in the queue or an interruption before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from advdet.attacks.base import AttackResult
from advdet.defenses import image_keys

_AXIS = "devices"
_SLICE_SECONDS = 2.0
_MAX_SLICE = 2**30


class Queue(NamedTuple):
    """What is to be attacked, [Q] rows on each device.

    Attributes:
      images, start: [Q, H, W, C]; free: [Q, H, W, C] bool.
      targets, ids: [Q] int32.
      length: [1] int32, rows that are to be run; the rest is padding.
    """

    images: jax.Array
    start: jax.Array
    free: jax.Array
    targets: jax.Array
    ids: jax.Array
    length: jax.Array


class Carry(NamedTuple):
    """The loop's state on each device.

    Attributes:
      states: the attack's, [L].
      rows: [L] int32, the queue row that a lane works on, Q where it idles.
      cursor: [1] int32, the next row of the queue.
      results: `AttackResult`, [Q].
      finished: [Q] bool.
      lane_steps: [1] int32, steps that advanced an unfinished image.
      loop_steps: [1] int32, steps of the whole batch.
    """

    states: NamedTuple
    rows: jax.Array
    cursor: jax.Array
    results: AttackResult
    finished: jax.Array
    lane_steps: jax.Array
    loop_steps: jax.Array


class Progress(NamedTuple):
    """What is known after a slice of the loop.

    Attributes:
      finished: [N] bool, images done.
      results: `AttackResult` of NumPy arrays [N, ...]; rows not finished are meaningless.
      lane_steps: steps so far that advanced an unfinished image.
      loop_steps: steps so far of the busiest device's batch.
      compile_seconds: spent before the first step.
      run_seconds: spent in the loop.
    """

    finished: np.ndarray
    results: AttackResult
    lane_steps: int
    loop_steps: int
    compile_seconds: float
    run_seconds: float


def run(
    key: jax.Array,
    attack,
    objective,
    defense,
    images: np.ndarray,
    targets: np.ndarray,
    ids: np.ndarray,
    *,
    lanes: int,
    start: np.ndarray | None = None,
    free: np.ndarray | None = None,
    todo: np.ndarray | None = None,
    devices: Sequence[jax.Device] | None = None,
    on_slice: Callable[[Progress], None] | None = None,
    slice_seconds: float = _SLICE_SECONDS,
) -> Progress:
    """Attacks each image on its own.

    Args:
      key: consumed; an image's key is this one with its id folded in.
      attack, objective, defense: as in `attacks.base`.
      images: [N, H, W, C] float32 in [0, 1].
      targets: [N] int32 wanted classes, or the true ones of an untargeted objective.
      ids: [N] int32, distinct.
      lanes: images worked on at once on each device.
      start: [N, H, W, C] where to begin; the images where None.
      free: [N, H, W, C] bool, pixels that may change; all where None.
      todo: rows to run; all where None. Others stay unfinished.
      devices: all of JAX's where None.
      on_slice: called on the host after each slice.
      slice_seconds: how often.

    Returns:
      The last `Progress`.

    Raises:
      ValueError: lanes below 1, or ids that repeat.
    """
    if lanes < 1:
        raise ValueError(f"lanes must be at least 1, not {lanes}")
    if len(np.unique(ids)) != len(ids):
        raise ValueError("ids repeat; each image needs an id of its own")
    devices = list(devices if devices is not None else jax.devices())
    mesh = Mesh(np.array(devices), (_AXIS,))
    rows = np.arange(len(images)) if todo is None else np.asarray(todo)
    queue, owner, place = _share_out(images, targets, ids, start, free, rows, mesh)

    began = time.perf_counter()
    carry = _begin(key, attack, queue, lanes=lanes, mesh=mesh)
    slice_steps = 0  # the first call compiles and does nothing
    compile_seconds = run_seconds = 0.0
    while True:
        tick = time.perf_counter()
        carry = _advance(
            key, attack, objective, defense, queue, carry, np.int32(slice_steps), mesh=mesh
        )
        jax.block_until_ready(carry)
        spent = time.perf_counter() - tick
        if slice_steps == 0:
            compile_seconds = time.perf_counter() - began
            slice_steps = 1
        else:
            run_seconds += spent
            faster = slice_seconds / max(spent, 1e-6)
            slice_steps = int(np.clip(slice_steps * min(faster, 4.0), 1, _MAX_SLICE))
        progress = _collect(
            carry, len(images), rows, owner, place, len(devices), compile_seconds, run_seconds
        )
        if on_slice is not None:
            on_slice(progress)
        if progress.finished[rows].all():
            return progress


def _share_out(images, targets, ids, start, free, rows, mesh):
    """Deals the rows out to the devices in turn, each with a queue of equal, padded length."""
    num_devices = mesh.devices.size
    # The length follows from all images, not from those still to do: resuming compiles nothing.
    length = max(1, -(-len(images) // num_devices))
    owner = np.arange(len(rows)) % num_devices
    place = np.arange(len(rows)) // num_devices
    slots = owner * length + place

    def deal(values, dtype):
        dealt = np.zeros((num_devices * length, *values.shape[1:]), dtype)
        dealt[slots] = values[rows]
        return dealt

    images = np.asarray(images, np.float32)
    queue = Queue(
        images=deal(images, np.float32),
        start=deal(images if start is None else np.asarray(start), np.float32),
        free=deal(np.ones(images.shape, bool) if free is None else np.asarray(free), bool),
        targets=deal(np.asarray(targets), np.int32),
        ids=deal(np.asarray(ids), np.int32),
        length=np.bincount(owner, minlength=num_devices).astype(np.int32),
    )
    return jax.device_put(queue, NamedSharding(mesh, P(_AXIS))), owner, place


def _collect(carry, num_images, rows, owner, place, num_devices, compile_seconds, run_seconds):
    """The results so far, by row of the input."""
    host = jax.device_get((carry.finished, carry.results, carry.lane_steps, carry.loop_steps))
    finished_slots, result_slots, lane_steps, loop_steps = host
    slots = owner * (len(finished_slots) // num_devices) + place

    def back(values):
        out = np.zeros((num_images, *values.shape[1:]), values.dtype)
        out[rows] = values[slots]
        return out

    return Progress(
        finished=back(finished_slots),
        results=jax.tree.map(back, result_slots),
        lane_steps=int(lane_steps.sum()),
        loop_steps=int(loop_steps.max()),
        compile_seconds=compile_seconds,
        run_seconds=run_seconds,
    )


def _states_of(key, attack, queue: Queue, rows: jax.Array):
    """Fresh states for queue rows [L]; rows beyond the end give some state, which is not used."""
    rows = jnp.minimum(rows, queue.ids.shape[0] - 1)
    ids = queue.ids[rows]
    return jax.vmap(attack.init)(
        image_keys(key, ids), ids, queue.images[rows], queue.targets[rows], queue.start[rows],
        queue.free[rows],
    )  # fmt: skip


@partial(jax.jit, static_argnames=("lanes", "mesh"))
def _begin(key, attack, queue: Queue, *, lanes: int, mesh: Mesh) -> Carry:
    """The carry before the first step: all lanes idle, nothing taken from the queue."""

    def on_device(key, attack, queue):
        size = queue.ids.shape[0]
        rows = jnp.full((lanes,), size, jnp.int32)
        states = _states_of(key, attack, queue, rows)
        shapes = jax.eval_shape(jax.vmap(attack.result), states)
        blank = lambda s: jnp.zeros((size, *s.shape[1:]), s.dtype)
        zero = jnp.zeros((1,), jnp.int32)
        return Carry(
            states=states,
            rows=rows,
            cursor=zero,
            results=jax.tree.map(blank, shapes),
            finished=jnp.zeros((size,), bool),
            lane_steps=zero,
            loop_steps=zero,
        )

    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(P(), P(), P(_AXIS)), out_specs=P(_AXIS), check_vma=False
    )(key, attack, queue)


@partial(jax.jit, static_argnames=("mesh",), donate_argnames=("carry",))
def _advance(key, attack, objective, defense, queue, carry, num_steps, *, mesh) -> Carry:
    """At most `num_steps` steps of all lanes; stops where all queues are empty."""

    def on_device(key, attack, objective, defense, queue, carry, num_steps):
        size = queue.ids.shape[0]

        def over(carry):
            return (carry.rows < size) & jax.vmap(attack.done)(carry.states)

        def unfinished(loop):
            count, carry = loop
            waiting = jnp.any(carry.rows < size) | (carry.cursor[0] < queue.length[0])
            return (count < num_steps) & waiting

        def until_one_is_over(loop):
            count, carry = loop
            busy = jnp.any(carry.rows < size)
            return (count < num_steps) & busy & ~jnp.any(over(carry))

        def one_step(loop):
            count, carry = loop
            busy = carry.rows < size
            keys = image_keys(key, queue.ids[jnp.minimum(carry.rows, size - 1)])
            states = jax.vmap(lambda k, s: attack.step(k, objective, defense, s))(
                keys, carry.states
            )
            return count + 1, carry._replace(
                states=states,
                lane_steps=carry.lane_steps + jnp.sum(busy, dtype=jnp.int32),
                loop_steps=carry.loop_steps + 1,
            )

        def one_round(loop):
            # Images enter a lane here and nowhere else: compiled at two places, `init` could differ
            # in its last bit, and a result would tell which way its image came in.
            count, carry = loop
            carry = _change(key, attack, queue, over(carry), carry)
            return jax.lax.while_loop(until_one_is_over, one_step, (count, carry))

        return jax.lax.while_loop(unfinished, one_round, (jnp.int32(0), carry))[1]

    whole, split = P(), P(_AXIS)
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(whole, whole, whole, whole, split, split, whole),
        out_specs=split,
        check_vma=False,
    )(key, attack, objective, defense, queue, carry, num_steps)


def _change(key, attack, queue: Queue, over: jax.Array, carry: Carry) -> Carry:
    """Writes the results of finished lanes, and gives these and idle ones the next images."""
    size = queue.ids.shape[0]
    found = jax.vmap(attack.result)(carry.states)
    slot = jnp.where(over, carry.rows, size)  # `size` lies outside and is dropped
    results = jax.tree.map(
        lambda all, new: all.at[slot].set(new, mode="drop"), carry.results, found
    )

    ready = over | (carry.rows == size)
    wanted = carry.cursor[0] + jnp.cumsum(ready, dtype=jnp.int32) - 1
    rows = jnp.where(ready, jnp.where(wanted < queue.length[0], wanted, size), carry.rows)
    fresh = _states_of(key, attack, queue, rows)
    pick = lambda new, old: jnp.where(ready.reshape(-1, *[1] * (new.ndim - 1)), new, old)
    return carry._replace(
        states=jax.tree.map(pick, fresh, carry.states),
        rows=rows,
        cursor=jnp.minimum(carry.cursor + jnp.sum(ready, dtype=jnp.int32), queue.length),
        results=results,
        finished=carry.finished.at[slot].set(True, mode="drop"),
    )
