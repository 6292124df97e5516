"""The classifiers: training, accuracy, and `classifier_for`, which trains only if it must."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from advdet import checkpoints, datasets, nets
from advdet.fitting import device_mesh, fit
from advdet.plans import HALVES, Plan, describe, part_of, plan_for
from advdet.splits import Splits
from advdet.types import Batch, Classifier, InputError, PyTree

_STATISTICS_BATCH, _STATISTICS_BATCHES = 250, 60


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy [] of logits [B, K] with labels [B]."""
    wanted = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -(wanted * jax.nn.log_softmax(logits)).sum(-1).mean()


@dataclasses.dataclass(frozen=True)
class ClassifierLoss:
    """`fit`'s loss for a network: cross-entropy with dropout, and the accuracy."""

    net: Any

    def __call__(self, params: PyTree, state: PyTree, key: jax.Array, batch: Batch):
        variables = {"params": params} | ({"batch_stats": state} if state else {})
        outputs, state = nets.train_apply(self.net, variables, batch.images, key)
        hits = (outputs.logits.argmax(-1) == batch.labels).astype(jnp.float32)
        return cross_entropy(outputs.logits, batch.labels), (state, {"accuracy": hits.mean()})


@functools.partial(jax.jit, static_argnames="mesh")
def _logits(classifier, images, mesh):
    (axis,) = mesh.axis_names
    forward = lambda classifier, images: classifier(images).logits
    spread = jax.shard_map(
        forward, mesh=mesh, in_specs=(P(), P(axis)), out_specs=P(axis), check_vma=False
    )
    return spread(classifier, images)


def logits(classifier: Classifier, images: np.ndarray, batch_size: int = 256) -> np.ndarray:
    """The classifier's logits [N, K] for images [N, H, W, C], in padded batches of one size."""
    mesh = device_mesh(batch_size)
    found = []
    for start in range(0, len(images), batch_size):
        part = np.asarray(images[start : start + batch_size], np.float32)
        full = np.zeros((batch_size, *part.shape[1:]), np.float32)
        full[: len(part)] = part
        found.append(np.asarray(_logits(classifier, full, mesh))[: len(part)])
    if not found:
        raise InputError("no images to classify")
    return np.concatenate(found)


def accuracy(classifier: Classifier, batch: Batch, batch_size: int = 256) -> float:
    """The share of images in `batch` that the classifier gets right, over all of them."""
    predicted = logits(classifier, batch.images, batch_size).argmax(-1)
    return float((predicted == np.asarray(batch.labels)).mean())


def reestimate_statistics(classifier: Classifier, images: np.ndarray) -> Classifier:
    """BatchNorm statistics taken anew from clean images [N, H, W, C]; other weights unchanged.

    Means over up to 15,000 of them, in batches large enough for steady variances.
    """
    if "batch_stats" not in classifier.variables:
        return classifier
    net = classifier.apply.net.clone(momentum=0.0)  # the running statistics are then the batch's

    @jax.jit
    def statistics(variables, part):
        return nets.train_apply(net, variables, part, None).batch_stats

    size = min(_STATISTICS_BATCH, len(images))
    total, count = None, min(len(images) // size, _STATISTICS_BATCHES)
    for start in range(0, count * size, size):
        new = statistics(classifier.variables, np.asarray(images[start : start + size]))
        total = new if total is None else jax.tree.map(jnp.add, total, new)
    mean = jax.tree.map(lambda x: x / count, total)
    return dataclasses.replace(classifier, variables=classifier.variables | {"batch_stats": mean})


def retrain_command(splits: Splits, half: str, schedule: str, plan: Plan, seed: int) -> str:
    """The command line that trains the same classifier again."""
    words = ["python", "-m", "experiments.train", f"--dataset={splits.name}", f"--half={half}"]
    words += [f"--schedule={schedule}", f"--epochs={plan.recipe.epochs}", f"--seed={seed}"]
    return shlex.join(words)


def _name(half, schedule, epochs, seed):
    length = "" if epochs is None else f"-{epochs}_epochs"
    return f"classifier-{half}-{schedule}{length}-seed{seed}"


def cached_path(
    splits: Splits, half: str, schedule: str, epochs: int | None, seed: int, cache: Path | None
) -> Path:
    """Where weights trained with these settings lie in the cache folder."""
    folder = Path(cache or datasets.cache_dir()) / "weights" / splits.name
    return folder / f"{_name(half, schedule, epochs, seed)}.npz"


def checkpoint_folder(
    splits: Splits, half: str, schedule: str, epochs: int | None, seed: int, cache: Path | None
) -> Path:
    """Where a training with these settings keeps its state while it runs."""
    folder = Path(cache or datasets.cache_dir()) / "training" / splits.name
    return folder / _name(half, schedule, epochs, seed)


def train_classifier(
    splits: Splits,
    *,
    half: str = "full",
    schedule: str = "fast",
    epochs: int | None = None,
    seed: int = 0,
    checkpoint: Path | None = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> tuple[Classifier, dict[str, Any]]:
    """Trains the data set's network.

    Args:
      splits: the data; a half of it is taken as `half` says (or is given already).
      half: "full", "defender" or "attacker".
      schedule: see `plan_for`.
      epochs: see `plan_for`.
      seed: of weights, order, augmentation and dropout; halves differ in all of them.
      checkpoint: folder for the state after each epoch, from which a stopped run goes on.
      progress: whether to show a progress bar.
      say: receives what the training has to tell.

    Returns:
      (classifier, manifest for `checkpoints.save`).
    """
    splits = part_of(splits, half)
    half = splits.part
    plan = plan_for(splits, schedule, epochs)
    net = nets.net_for(splits.name, splits.num_classes, splits.image_shape)
    if isinstance(net, nets.ResNet32):
        net = net.clone(momentum=plan.momentum)
    key = jax.random.fold_in(jax.random.key(seed), HALVES.index(half))
    init_key, fit_key = jax.random.split(key)
    start = nets.init(init_key, net, splits.image_shape)
    facts = {
        "net": type(net).__name__,
        "dataset": splits.name,
        "half": half,
        "seed": seed,
        "data_hash": splits.data_hash,
        "augment": plan.augment and dataclasses.asdict(plan.augment),
        "momentum": plan.momentum,
    }
    fitted = fit(
        fit_key,
        plan.recipe,
        ClassifierLoss(net),
        start.variables["params"],
        start.variables.get("batch_stats", {}),
        splits.train,
        augment=plan.augment,
        checkpoint=checkpoint,
        settings=facts,
        progress=f"{splits.name} ({half})" if progress else None,
    )
    variables = {"params": fitted.params}
    if fitted.state:
        variables["batch_stats"] = fitted.state
    classifier = dataclasses.replace(start, variables=variables)
    if plan.reestimate:
        classifier = reestimate_statistics(classifier, splits.train.images)
    classifier = jax.device_get(classifier)
    test_accuracy = accuracy(classifier, splits.test)
    say(f"{splits.name} ({half}): {test_accuracy:.2%} of {len(splits.test.labels)} test images")
    manifest = {
        "net": type(net).__name__,
        "num_classes": splits.num_classes,
        "image_shape": list(splits.image_shape),
        "dataset": splits.name,
        "data_source": splits.source,
        "data_hash": splits.data_hash,
        "half": half,
        "seed": seed,
        "command": retrain_command(splits, half, schedule, plan, seed),
        "schedule": schedule,
        "plan": dataclasses.asdict(plan),
        "devices": len(jax.local_devices()),
        "platform": jax.default_backend(),
        "train_images": len(splits.train.labels),
        "test_accuracy": test_accuracy,
        "test_images": len(splits.test.labels),
        "last_epoch": fitted.metrics,
    }
    return classifier, manifest


def _fits(path: Path, splits: Splits, seed: int | None) -> bool:
    """Whether the weights at `path` were trained on these very data (and from this seed)."""
    manifest = checkpoints.load_manifest(path)
    if manifest.get("data_hash") != splits.data_hash:
        print(f"{path.name} was trained on other data: not used", file=sys.stderr)
        return False
    return seed is None or manifest.get("seed") == seed


def load_classifier(path: str | Path, splits: Splits) -> Classifier:
    """The data set's network with the weights at `path`.

    Raises:
      InputError: the file is missing, damaged or for another network; see `checkpoints.load`.
    """
    net = nets.net_for(splits.name, splits.num_classes, splits.image_shape)
    like = jax.eval_shape(lambda: nets.init(jax.random.key(0), net, splits.image_shape))
    variables, _ = checkpoints.load(path, like.variables)
    return Classifier(jax.tree.map(jnp.asarray, variables), nets.NetApply(net))


def classifier_for(
    splits: Splits,
    *,
    half: str = "full",
    seed: int | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> Classifier:
    """The classifier for a data set: the weights shipped for it, else cached, else trained now.

    Weights count only if their manifest names the very same data.

    Args:
      splits: the data.
      half: whose training images: "full", "defender" or "attacker".
      seed: a training seed; None takes the shipped weights whatever theirs is, else seed 0.
      cache: folder for weights and unfinished trainings (default: advdet's cache folder).
      progress: whether a training shows its progress.

    Raises:
      InputError: weights are there but damaged, or there is nothing to train on.
    """
    splits = part_of(splits, half)
    settings = {"half": splits.part, "schedule": "fast", "epochs": None, "seed": seed or 0}
    cached = cached_path(splits, **settings, cache=cache)
    for path in (checkpoints.shipped(splits.name, splits.part), cached):
        if path is not None and path.exists() and _fits(path, splits, seed):
            return load_classifier(path, splits)
    folder = checkpoint_folder(splits, **settings, cache=cache)
    print(f"no weights for these data yet: {describe(splits, **settings)}", file=sys.stderr)
    classifier, manifest = train_classifier(
        splits, **settings, checkpoint=folder, progress=progress
    )
    checkpoints.save(cached, classifier.variables, manifest)
    shutil.rmtree(folder, ignore_errors=True)
    return jax.tree.map(jnp.asarray, classifier)
