"""The true verdicts on images that someone else made: fooled, flagged at which threshold, how far.

python -m experiments.judge --defense=dropout --clean=clean.npz --adversarial=adv.npz
python -m experiments.judge --defense=dropout --adversarial=results/.../NAME.npz --out=verdicts.npz

A file holds `images` [N, H, W, C] in [0, 1] (or uint8), `labels`, and may hold `targets` and `ids`;
the npz of a record of ours will do, too. Without --clean the clean images are those of the data
set's test split with the same ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from absl import flags

from experiments import common, evaluation, path_flags, subject

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(subject)
flags.declare_key_flag("train_attack")
_ADVERSARIAL = path_flags.define("adversarial", None, "npz of the images to judge.", required=True)
_CLEAN = path_flags.define("clean", None, "npz of the clean images, row by row.")
_OUT = path_flags.define("out", None, "Write the verdicts on each image here: NAME.npz or .json.")
_WORDS = {"native": "native", "0.01": "1 %", "0.05": "5 %", "0.5": "50 %"}


def main() -> None:
    """Reads, judges, prints; writes what --out asks for."""
    import numpy as np

    from advdet import detectors, given_images, results, training, victims
    from advdet.judge_given import judge_given
    from advdet.types import InputError

    out = None if _OUT.value is None else Path(_OUT.value)
    if out is not None:
        if out.suffix not in (".npz", ".json"):
            raise InputError(f"--out must end in .npz or .json, not {out.name!r}")
        results.check_writable(out.parent)
    if subject.DEFENSE.value == "all":
        raise InputError("--defense=all: images are judged by one defence at a time")
    detector = detectors.from_spec(subject.DEFENSE.value)
    for path in (_CLEAN.value, _ADVERSARIAL.value):
        if path is not None and not Path(path).is_file():
            raise InputError(f"there is no file {path}")
    splits = common.splits()
    read = lambda path: given_images.read(path, splits.image_shape, splits.num_classes)
    adversarial = read(_ADVERSARIAL.value)
    clean = None if _CLEAN.value is None else read(_CLEAN.value)
    pair = given_images.pair(clean, adversarial, splits)
    for given in (clean, adversarial):
        if given is not None and given.was_uint8:
            print(f"{given.path} holds uint8: taken as 0 ... 255", file=sys.stderr)
    classifier = subject.classifier() or training.classifier_for(splits)
    victim = victims.defend(
        detector, classifier, splits, seed=common.SEED.value,
        train_attack=evaluation.TRAIN_ATTACK.value or "carlini_wagner",
    )  # fmt: skip
    print(f"judging {len(pair.goal)} images", file=sys.stderr)
    figures, arrays = judge_given(victim, splits, pair, seed=common.SEED.value)
    print(table(subject.DEFENSE.value, splits.name, figures))
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npz":
        results.write_npz(out, arrays)
    else:
        plain = {name: np.asarray(array).tolist() for name, array in arrays.items()}
        results.write_json(out, json.loads(json.dumps({"figures": figures, "images": plain})))
    print(f"verdicts  {out}")


def table(name: str, dataset: str, figures: dict) -> str:
    """The figures of `judge_given` as text."""
    from experiments import report

    counts, kind = figures["counts"], figures["kind"]
    wanted = "the wanted label" if figures["targeted"] else "a wrong label"
    lines = [
        "", f"{name} on {dataset}: {counts['images']} images, {counts['attacked']} of them "
        "classified rightly while clean; rates are over these",
    ]  # fmt: skip
    if counts["unchanged"]:
        lines.append(f"{counts['unchanged']} images are their clean originals, unchanged")
    say = lambda value: f"{report.percent(value['rate'])} {_span(value)} of {value['n']}"
    lines += ["", f"given {wanted}: {say(figures['fooled'])}; after rounding to 8 bit "
              f"{say(figures['fooled_8bit'])}"]  # fmt: skip
    if figures["points"]:
        rows = [("threshold", "at", "clean flagged", "fooling flagged", "success", "95 %", "8 bit",
                 "mean L2", "median L2")]  # fmt: skip
        for point, found in figures["points"].items():
            rows.append((
                _WORDS[point], f"{found['threshold']:.4g}",
                report.percent(found["clean_flagged"]["rate"]),
                report.percent(found["flagged"]["rate"]),
                report.percent(found["success"]["rate"]), _span(found["success"]),
                report.percent(found["success_8bit"]["rate"]),
                report.number(found["mean_l2"]), report.number(found["median_l2"]),
            ))  # fmt: skip
        lines += ["", *report.aligned(rows), "", f"success: {wanted}, and not flagged"]
    else:
        lines.append(
            f"mean L2 of these {report.number(figures['mean_l2'])}, median with failures as "
            f"infinite {report.number(figures['median_l2'])}"
        )
    if kind == "corrector":
        correction = figures["correction"]
        lines += [
            "a corrector: it flags nothing and changes the answer; the answers above are its own",
            f"of the images that fool the bare classifier it turns "
            f"{say(correction['target_broken'])} away from the goal, and restores the true label "
            f"of {say(correction['label_restored'])}",
        ]
    elif kind == "set":
        lines.append("it judges sets of images and flags no single one")
        sets = figures["sets"]
        if sets is None:
            lines.append("fewer than two images fool the classifier: no set to test")
        else:
            lines.append(
                f"sets of {sets['size']} images that fool: "
                f"{report.sets_told(sets['adversarial'])} rejected, median p "
                f"{sets['adversarial']['median_p']:.3g}; of their clean originals: "
                f"{report.sets_told(sets['originals'])}, {sets['originals']['median_p']:.3g}; of "
                f"other clean ones: {report.sets_told(sets['clean'])}, "
                f"{sets['clean']['median_p']:.3g}"
            )
            if sets["adversarial"]["reason"]:
                lines.append(sets["adversarial"]["reason"])
    elif kind == "none":
        lines.append("the undefended classifier: nothing is flagged")
    return "\n".join(lines) + "\n"


def _span(value: dict) -> str:
    from experiments import report

    return report.span(value["interval"], lambda v: f"{100 * v:.1f}")


if __name__ == "__main__":
    common.run(main)
