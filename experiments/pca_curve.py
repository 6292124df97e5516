"""How many principal components make the sturdiest network? The paper's figure 3.

One network for each number of components k = n^2, n = 3 ... 28, on k coefficients (fc) or on the
image put together from them (cnn), each attacked end to end without a target; the undefended
network's distance is the line to compare with. Networks are trained once and kept in the cache.

python -m experiments.pca_curve --num_images=100
python -m experiments.pca_curve --defense=pca_reduction:epochs=4 --components=9,25,784
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from absl import flags

from experiments import common, evaluation, pictures, subject

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
flags.FLAGS.set_default("defense", "pca_reduction")
COMPONENTS = flags.DEFINE_list(
    "components", [str(n * n) for n in range(3, 29)], "Numbers of components, with commas."
)
VARIANTS = flags.DEFINE_list("variants", ["fc", "cnn"], "Which networks: fc, cnn, or both.")


def main() -> None:
    """Runs the sweep, prints the curve, and saves it as JSON and picture."""
    import advdet
    from advdet import detectors, results
    from advdet.types import InputError
    from experiments import report

    settings = evaluation.settings()
    splits = common.splits()
    settings |= {"data": splits, "targets": settings["targets"] or "untargeted"}
    settings |= {"attack": settings["attack"] or "carlini_wagner"}
    counts = [int(k) for k in evaluation.numbers("components", COMPONENTS.value)]
    given = detectors.from_spec(subject.DEFENSE.value)
    if not isinstance(given, detectors.PcaReduction):
        raise InputError(
            f"the curve is of pca_reduction, not of {subject.DEFENSE.value}; --defense may give "
            "its epochs (pca_reduction:epochs=4)"
        )
    command = evaluation.command("pca_curve")
    curves, baseline = {}, None
    for variant in VARIANTS.value:
        for k in counts:
            detector = dataclasses.replace(given, components=k, variant=variant)
            done = advdet.evaluate(detector, command=command, **settings)
            record = list(done.records.values())[-1]
            baseline = list(done.baseline.records.values())[-1]["attack"]["mean_l2"]
            curves.setdefault(variant, []).append({
                "components": k,
                "accuracy": record["clean"]["accuracy"],
                "success_rate": record["attack"]["success_rate"]["misclassified"],
                "mean_l2": record["attack"]["mean_l2"],
                "interval": record["intervals"]["mean_l2"],
            })  # fmt: skip
    rows = [("components", *(f"{v}: {w}" for v in curves for w in ("accuracy", "success", "L2")))]
    for number, k in enumerate(counts):
        row = [str(k)]
        for points in curves.values():
            point = points[number]
            row += [report.percent(point["accuracy"]), report.percent(point["success_rate"])]
            row.append(report.number(point["mean_l2"]))
        rows.append(tuple(row))
    print("\n".join(["", *report.aligned(rows), f"undefended: {baseline:.2f}", ""]))
    stem = Path(evaluation.RESULTS_DIR.value, f"{splits.name}-pca_curve-{settings['targets']}")
    value = {
        "schema": results.SCHEMA,
        "kind": "pca_curve",
        "command": command,
        "curves": curves,
        "undefended_mean_l2": baseline,
    }
    results.write_json(stem.with_suffix(".json"), value)
    _picture(stem.with_suffix(".png"), curves, baseline)
    print(f"curve   {stem.with_suffix('.json')}\npicture {stem.with_suffix('.png')}")


def _picture(path: Path, curves, baseline: float) -> None:
    with pictures.saved(path, figsize=(6, 4)) as axis:
        for variant, points in curves.items():
            points = [p for p in points if p["mean_l2"] is not None and p["interval"]]
            k, mean = [p["components"] for p in points], [p["mean_l2"] for p in points]
            axis.plot(k, mean, "o-", markersize=3, label=variant)
            axis.fill_between(k, *zip(*(p["interval"] for p in points)), alpha=0.2)
        axis.axhline(baseline, color="black", linewidth=1, label="undefended")
        axis.set_xlabel("components kept")
        axis.set_ylabel("mean L2 (95 % interval)")
        axis.set_ylim(0)
        axis.legend(fontsize=8)


if __name__ == "__main__":
    common.run(main)
