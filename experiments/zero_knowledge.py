"""Does a detector see attacks by someone who does not know that it is there? The least it must do.

One that is tuned to images of minimal distance may miss those that are classified with confidence,
so several confidences are tried; noise of equal L2 and a mere round trip through C&W's variables
stand beside them as controls.

python -m experiments.zero_knowledge --defense=dropout
python -m experiments.zero_knowledge --defense=binary --attack=fast_gradient --targets=untargeted
"""

from __future__ import annotations

from absl import flags

from experiments import common, evaluation

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
CONFIDENCES = flags.DEFINE_list(
    "confidences",
    None,
    "Logit margins that the attacks ask for, with commas; default 0,10,20,40, or --confidence.",
)
_WEAK = ("fast_gradient", "jsma")  # they stop at the first success, whatever its margin


def evaluate_one(spec: str) -> None:
    """Evaluates one defence at all confidences; prints tables, saves pictures."""
    import advdet
    from experiments import detection_report, pictures, report

    settings = evaluation.settings(budget=True)
    given, weak = settings.pop("confidence"), settings["attack"] in _WEAK
    confidences = [0.0 if given is None else given]
    if CONFIDENCES.value is not None:
        confidences = evaluation.numbers("confidences", CONFIDENCES.value)
    elif given is None and not weak and settings["preset"] != "smoke":
        confidences = [0.0, 10.0, 20.0, 40.0]
    command = evaluation.command("zero_knowledge")
    evaluations = advdet.sweep(
        [{"confidence": confidence} for confidence in confidences], spec,
        threat_model="zero_knowledge", command=command, **settings,
    )  # fmt: skip
    print(report.table(evaluations[0]))
    name, path = list(evaluations[0].paths.items())[-1]
    records = [done.records[name] for done in evaluations]
    print(detection_report.by_confidence(records))
    sheet = path.with_suffix(".png")
    pictures.sheet(sheet, evaluations[0].clean, evaluations[0].arrays[name])
    print(f"record  {path}\nimages  {path.with_suffix('.npz')}\nsheet   {sheet}")
    if records[0]["detection"]["auc"] is not None:
        roc = path.with_name(f"{path.stem}-roc.png")
        detection_report.roc_picture(roc, records, [done.arrays[name] for done in evaluations])
        print(f"ROC     {roc}")


if __name__ == "__main__":
    common.run(lambda: evaluation.each_defense(evaluate_one))
