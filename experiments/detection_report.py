"""What a detector sees of attacks that do not know of it: a table over confidences, ROC curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments import pictures, report


def by_confidence(records) -> str:
    """True positive rates, AUC and controls, a line for each confidence.

    Args:
      records: of one attack, one for each confidence.
    """
    kind = "score"
    if records[0]["correction"] is not None:
        kind = "corrector"
    elif records[0].get("sets") is not None or records[0]["detection"]["auc"] is None:
        kind = "set"
    lines = {"score": _scores, "corrector": _corrections, "set": _sets}[kind](records)
    return "\n".join([*lines, ""])


def _scores(records):
    rows = [("detected", "reached", "native", "1 %", "5 %", "AUC", "mean L2", "noise, 5 %")]
    for record in records:
        detection, attack = record["detection"], record["attack"]
        rates, noise = detection["true_positive_rate"], record["controls"]["noise_of_equal_l2"]
        rows.append((
            f"confidence {record['run']['settings']['confidence']:g}",
            f"{detection['n']} of {record['counts']['attacked']}",
            *(report.percent(rates[point]) for point in ("native", "0.01", "0.05")),
            report.number(detection["auc"]),
            report.number(attack["mean_l2_unfiltered"]),
            report.percent((noise or {}).get("0.05")),
        ))  # fmt: skip
    squeezed = records[0]["controls"]["tanh_round_trip"]
    shares = ", ".join(
        f"{report.percent(squeezed[point])} at {words}"
        for point, words in (("native", "native"), ("0.01", "1 %"), ("0.05", "5 %"))
        if squeezed[point] is not None
    )
    return [
        *report.aligned(rows),
        "reached: images at which the attack found the label with that confidence; noise: flagged "
        "of clean images with",
        f"noise of the successes' L2. A mere round trip through C&W's variables: {shares} flagged",
    ]


def _corrections(records):
    rows = [("corrected", "reached", "target broken", "label restored", "mean L2")]
    for record in records:
        correction = record["correction"]
        rows.append((
            f"confidence {record['run']['settings']['confidence']:g}", str(correction["n"]),
            report.percent(correction["target_broken"]),
            report.percent(correction["label_restored"]),
            report.number(record["attack"]["mean_l2_unfiltered"]),
        ))  # fmt: skip
    return report.aligned(rows)


def _sets(records):
    rows = [("sets rejected", "set size", "adversarial", "median p", "originals", "median p",
             "other clean", "median p")]  # fmt: skip
    for record in records:
        sets = record.get("sets")
        if sets is None:
            continue
        rows.append((
            f"confidence {record['run']['settings']['confidence']:g}", str(sets["size"]),
            *(text for name in ("adversarial", "originals", "clean") for text in (
                report.sets_told(sets[name]), report.number(sets[name]["median_p"]))),
        ))  # fmt: skip
    return report.aligned(rows)


def roc_picture(path: Path, records, arrays) -> None:
    """Saves ROC curves, one for each confidence, with a logarithmic false-positive axis.

    Args:
      path: of the PNG.
      records: of one attack, one for each confidence.
      arrays: their per-image arrays.
    """
    from sklearn.metrics import roc_curve

    with pictures.saved(path, figsize=(5.5, 4)) as axis:
        for record, images in zip(records, arrays):
            clean = images["clean_score"][0][images["clean_correct"]]
            found = images["adversarial_score"][0][images["clean_correct"] & images["success"]]
            if not len(found):
                continue
            labels = np.r_[np.zeros(len(clean)), np.ones(len(found))]
            false, true, _ = roc_curve(labels, np.r_[clean, found])
            confidence = record["run"]["settings"]["confidence"]
            area = report.number(record["detection"]["auc"])
            axis.plot(np.maximum(false, 0.5 / len(clean)), true, drawstyle="steps-post",
                      label=f"confidence {confidence:g}: AUC {area}, n {len(found)}")  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("clean images flagged")
        axis.set_ylabel("adversarial images flagged")
        axis.set_ylim(-0.02, 1.02)
        run = records[0]["run"]
        axis.set_title(f"{run['defense']} on {run['dataset']}, {run['attack']}", fontsize=9)
        axis.legend(fontsize=8)
