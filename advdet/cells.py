"""One cell of work: one attack on one view, over all images, kept on disk as it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from advdet import results
from advdet.attacks import driver
from advdet.attacks.base import AttackResult
from advdet.types import Batch

_ATTACK, _TARGETS = 0x4154, 0x5447
_CPU_LANES, _ACCELERATOR_LANES = 32, 256
_LOG_SECONDS = 15.0  # between progress lines where stderr is a file


def default_lanes(num_images: int) -> int:
    """Lanes a device: as many as pay, and no more than there are images."""
    most = _CPU_LANES if jax.default_backend() == "cpu" else _ACCELERATOR_LANES
    each = -(-num_images // len(jax.devices()))
    rounds = -(-each // most)  # as many images in the last round as in the others
    return max(1, -(-each // rounds))


def random_targets(seed: int, labels: np.ndarray, ids: np.ndarray, num_classes: int) -> np.ndarray:
    """[N] a wrong class for each image, uniform, from seed and image id alone."""
    root = jax.random.fold_in(jax.random.key(seed), _TARGETS)
    draw = lambda i: jax.random.randint(jax.random.fold_in(root, i), (), 1, num_classes)
    return (labels + np.asarray(jax.vmap(draw)(ids))).astype(np.int32) % num_classes


def attack_in_variants(
    name: str,
    attack,
    objective,
    view,
    batch: Batch,
    targets: np.ndarray,
    *,
    start: Callable[..., np.ndarray | None] = lambda variant: None,
    elsewhere: Callable[..., np.ndarray] | None = None,
    path: Path | None = None,
    only: np.ndarray | None = None,
    **options,
) -> tuple[AttackResult, dict[str, float]]:
    """Attacks with each variant of an objective; the nearest success of each image counts.

    Args: as those of `attack_images`; `view` is the defence that the attacker is shown, of which
      each variant makes what it works with, and `start` takes a variant and gives its start.
      Images on which all variants fail are attacked once more, by the first of them, from where
      `elsewhere` says, which takes a variant as well. Each keeps a partial file of its own.
    """
    variants, parts, seconds = objective.variants(), [], {"compile": 0.0, "run": 0.0}
    shown = [variant.view(view, start(variant), batch.images) for variant in variants]

    def run(number, label, own, begin, rows):
        variant = variants[number]
        found, spent = attack_images(
            label, attack, variant, shown[number], batch, targets, start=begin,
            free=variant.free(view), path=own, only=rows, **options,
        )  # fmt: skip
        parts.append(found)
        for kind in seconds:
            seconds[kind] += spent[kind]

    many = len(variants) > 1
    for number, variant in enumerate(variants):
        own = path and (variant_path(path, number) if many else path)
        label = f"{name} ({number + 1} of {len(variants)})" if many else name
        run(number, label, own, start(variant), only)
    lost = ~np.any([part.success for part in parts], axis=0)
    lost &= True if only is None else only
    if elsewhere is not None and lost.any():
        begin = elsewhere(variants[0])
        lost &= (begin != batch.images).any(axis=(1, 2, 3))
        if lost.any():
            own = path and variant_path(path, len(variants))
            run(0, f"{name}, once more from natural images", own, begin, lost)
    distances = np.stack([np.where(part.success, part.distance, np.inf) for part in parts])
    pick, rows = distances.argmin(axis=0), np.arange(distances.shape[1])
    nearest = AttackResult(*(np.stack(field)[pick, rows] for field in zip(*parts)))
    gradients = np.sum([part.num_gradients for part in parts], axis=0, dtype=np.int32)
    return nearest._replace(num_gradients=gradients), seconds


def variant_path(path: Path, number: int) -> Path:
    """The path that a variant's partial file is named after."""
    return path.with_name(f"{path.stem}.variant{number}.json")


def attack_images(
    name: str,
    attack,
    objective,
    view,
    batch: Batch,
    targets: np.ndarray,
    *,
    seed: int,
    lanes: int,
    start: np.ndarray | None = None,
    free: np.ndarray | None = None,
    path: Path | None = None,
    resume: bool = False,
    only: np.ndarray | None = None,
    progress: bool = True,
) -> tuple[AttackResult, dict[str, float]]:
    """Attacks all images of a batch, or what a partial file leaves of them.

    Args:
      name: of the attack, for the progress line.
      attack, objective: what to run.
      view: the defence that the attacker is shown.
      batch: [N] clean images with their true labels.
      targets: [N] wanted classes, or true ones where untargeted.
      seed: of the run.
      lanes: a device.
      start: [N, H, W, C] where attacks begin; the images where None.
      free: [H, W, C] bool, the pixels that may change; all where None.
      path: of the record, beside which finished images are kept; None keeps nothing.
      resume: go on with the partial file there.
      only: [N] bool, the images to attack; others count as failures. All where None.
      progress: show a line on stderr.

    Returns:
      The results, NumPy [N, ...], and {compile, run} seconds.

    Raises:
      InputError: the partial file is damaged.
      KeyboardInterrupt: after finished images were saved.
    """
    done, kept = _resumed(path, batch, resume)
    mine = np.ones(len(targets), bool) if only is None else only
    done = done | ~mine
    root = jax.random.fold_in(jax.random.key(seed), _ATTACK)
    if free is not None:
        free = np.broadcast_to(free[None], batch.images.shape)
    show = _Line(name, attack, int(mine.sum()), int((done & mine).sum()), progress)
    save_cost, saved_at, latest = 0.0, time.perf_counter(), None

    def merged(now):
        pick = lambda new, old: np.where(done.reshape(-1, *[1] * (new.ndim - 1)), old, new)
        return done | now.finished, AttackResult(*map(pick, now.results, kept))

    def save(now):
        nonlocal save_cost, saved_at
        began = time.perf_counter()
        finished, found = merged(now)
        results.save_partial(path, finished, found._asdict())
        saved_at = time.perf_counter()
        save_cost = saved_at - began

    def on_slice(now):
        nonlocal latest
        finished, found = merged(now)
        show(now, finished & mine, found)
        news = latest is None or now.finished.sum() > latest.finished.sum()
        latest = now
        if path is not None and news and now.finished.any():
            if time.perf_counter() - saved_at > 20 * save_cost:
                save(now)

    try:
        if done.all():
            return kept, {"compile": 0.0, "run": 0.0}
        last = driver.run(
            root, attack, objective, view, batch.images, targets, batch.ids,
            lanes=lanes, start=start, free=free, todo=np.flatnonzero(~done), on_slice=on_slice,
        )  # fmt: skip
    except KeyboardInterrupt:
        if path is not None and latest is not None:
            save(latest)
            count = int(merged(latest)[0].sum())
            print(
                f"\ninterrupted: {count} of {len(targets)} images are kept in "
                f"{results.partial_path(path)}; the same command with --resume goes on",
                file=sys.stderr,
            )
        raise
    finally:
        show.close()
    if path is not None:
        save(last)  # whole, until the record stands in its place
    return merged(last)[1], {"compile": last.compile_seconds, "run": last.run_seconds}


def _resumed(path: Path | None, batch: Batch, resume: bool) -> tuple[np.ndarray, AttackResult]:
    """Which images are done already, and their results."""
    n = len(batch.labels)
    flag, number = np.zeros(n, bool), np.zeros(n, np.float32)
    image = np.zeros(batch.images.shape, np.float32)
    blank = AttackResult(image, flag, number, number, image, flag, np.zeros(n, np.int32))
    if path is None or not resume:
        return flag, blank
    stored = results.load_partial(path, {"finished": flag, **blank._asdict()})
    if stored is None:
        return flag, blank
    return stored.pop("finished"), AttackResult(**stored)


class _Line:
    """Images done, success so far, mean L2, rate, time left: one line that is rewritten in a
    terminal, a new line every quarter of a minute and at the end in a file.
    """

    def __init__(self, name, attack, num_images, already, progress):
        self._limit, self._num_images, self._already = attack.max_steps(), num_images, already
        self._estimated, self._silent = False, not progress
        self._terminal = progress and sys.stderr.isatty()
        self._said_at, self._said, self._status = time.perf_counter(), "", ""
        self._bar = tqdm(
            mininterval=0.2, miniters=0, total=num_images, initial=already, desc=name,
            file=sys.stderr, disable=not self._terminal,
            bar_format="{desc}: {n_fmt}/{total_fmt} images [{elapsed}{postfix}]",
        )  # fmt: skip
        self._name = name

    def __call__(self, now, finished: np.ndarray, found: AttackResult) -> None:
        if now.run_seconds == 0:
            self._bar.set_postfix_str(f"compiled in {now.compile_seconds:.0f} s", refresh=False)
            return
        rate = now.lane_steps / now.run_seconds
        count, fresh = int(finished.sum()), int(now.finished.sum())
        each = self._limit  # until something is finished; then what was needed so far
        if fresh:
            needed = found.num_gradients[now.finished].mean()
            each = min(each, needed) if needed else each  # 0 of an attack without gradients
        left = max(0.0, (self._num_images - self._already) * each - now.lane_steps) / rate
        if not self._estimated and now.run_seconds > 0.2:
            self._estimated = True
            most = (self._num_images - self._already) * self._limit / rate
            self._write(f"at {rate:,.0f} steps a second at most {_clock(most)}")
        won = finished & found.success
        parts = [f"success {won.sum() / count:.0%}" if count else "none finished yet"]
        if won.any():
            parts.append(f"mean L2 {found.distance[won].mean():.2f}")
        parts += [f"{rate:,.0f} steps/s", f"about {_clock(left)} left"]
        self._bar.set_postfix_str(", ".join(parts), refresh=False)
        self._bar.update(count - self._bar.n)
        self._status = f"{count}/{self._num_images} images, {', '.join(parts)}"
        if time.perf_counter() - self._said_at > _LOG_SECONDS:
            self._log()

    def close(self) -> None:
        self._bar.close()
        self._log()

    def _log(self) -> None:
        """Where stderr is a file: a line of its own, unless it was said already."""
        if not self._terminal and self._status != self._said:
            self._write(self._status)
            self._said, self._said_at = self._status, time.perf_counter()

    def _write(self, text: str) -> None:
        if not self._silent:
            self._bar.write(f"{self._name}: {text}", file=sys.stderr)


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
