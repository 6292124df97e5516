"""What does the whitened tail of the principal components see? The paper's figure 2, and controls.

The picture shows the mean absolute coefficient on each component, clean and adversarial. The table
tells the cause on MNIST: pixels that hardly ever change. Noise that nobody could see is flagged,
unless it leaves these pixels alone; no attack is needed.

python -m experiments.pca_coefficients --num_images=1000 --preset=fast
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments import common, evaluation, pictures, subject

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
flags.FLAGS.set_default("defense", "input_pca")
_CUTS = (0.0, 0.02, 0.05, 0.1)
_NOISES = (1e-4, 1e-2)


def main() -> None:
    """Prints the table, saves figures as JSON and picture."""
    import advdet
    from advdet import detectors, results, statistics, training, victims
    from experiments import report

    settings = evaluation.settings()
    splits = common.splits()
    settings |= {"data": splits, "targets": settings["targets"] or "untargeted"}
    settings |= {"attack": settings["attack"] or "carlini_wagner"}
    command = evaluation.command("pca_coefficients")
    done = advdet.evaluate("none", command=command, **settings)
    ((name, arrays),) = done.arrays.items()
    rows = arrays["success"]
    flat = lambda images: np.asarray(images).reshape(len(images), -1)
    components = statistics.pca(flat(splits.train.images))
    shown = {
        "clean": statistics.mean_coefficients(flat(done.clean.images[rows]), components),
        "adversarial": statistics.mean_coefficients(flat(arrays["image"][rows]), components),
    }
    detector = detectors.from_spec(subject.DEFENSE.value)
    classifier = subject.classifier() or training.classifier_for(splits)
    victim = victims.defend(detector, classifier, splits, seed=settings["seed"])
    flagged = _controls(victim, splits, done.clean)
    lines = [("images", "flagged")]
    lines += [(what, report.percent(share)) for what, share in flagged.items()]
    print("\n".join([
        "", f"{subject.DEFENSE.value} on {splits.name}, threshold at 5 % of clean images; "
        f"{int(rows.sum())} images", "", *report.aligned(lines), "",
    ]))  # fmt: skip
    stem = Path(evaluation.RESULTS_DIR.value, f"{splits.name}-pca_coefficients")
    value = {
        "schema": results.SCHEMA,
        "kind": "pca_coefficients",
        "command": command,
        "mean_absolute_coefficient": {k: [float(c) for c in v] for k, v in shown.items()},
        "flagged": flagged,
        "n": int(rows.sum()),
    }
    results.write_json(stem.with_suffix(".json"), value)
    _picture(stem.with_suffix(".png"), shown)
    print(f"figures {stem.with_suffix('.json')}\npicture {stem.with_suffix('.png')}")


def _controls(victim, splits, clean) -> dict[str, float]:
    """The share flagged at 5 % of images that nobody has attacked."""
    import jax

    from advdet.attacks.variables import from_box, to_box
    from advdet.defenses import score_images

    images, std = np.asarray(clean.images), np.std(splits.train.images, axis=0, dtype=np.float64)
    rng = np.random.RandomState(0)
    threshold = np.float32(victim.thresholds["0.05"])

    def share(changed):
        scores = score_images(jax.random.key(0), victim.defense, changed, clean.ids)
        return float((scores > threshold).mean())

    found = {"clean": share(images)}
    found["after a round trip through C&W's variables"] = share(
        np.asarray(to_box(from_box(images)))
    )
    for size in _NOISES:
        noise = rng.normal(0.0, size, images.shape).astype(np.float32)
        for cut in _CUTS:
            free = (std >= cut)[None]
            what = f"with noise of std {size:g}"
            if cut:
                what += f", {int((std < cut).sum())} pixels of std < {cut:g} left alone"
            found[what] = share(np.clip(images + noise * free, 0.0, 1.0).astype(np.float32))
    return found


def _picture(path: Path, shown) -> None:
    with pictures.saved(path, figsize=(6, 4)) as axis:
        for (name, values), style in zip(shown.items(), ("-", "--")):
            axis.plot(np.maximum(values, 1e-12), style, linewidth=1, label=name)
        axis.set_yscale("log")
        axis.set_xlabel("component, by falling variance")
        axis.set_ylabel("mean absolute coefficient")
        axis.legend(fontsize=8)


if __name__ == "__main__":
    common.run(main)
