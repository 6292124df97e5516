"""Are stored records true? Every figure computed again from the stored images.

python -m experiments.verify results
python -m experiments.verify results/mnist/perfect_knowledge/dropout/best.quantile/NAME.json

A line for each claim: confirmed, refuted (status 1), or not decidable, with what is missing (status
3, where it is a core claim: verdicts on images, scores, thresholds, success). What no file can show
stands apart, as claimed. The last line counts the core claims. Random defences are judged by fresh
draws, too; --seed repeats those of another verification, whose seed was printed. The defence is
built again as the record says; a detector of your own must be importable from here, and what was
made from functions or arrays is named again, as it was for the run:

python -m experiments.verify results --defense=mine:detector --classifier=mine:classifier \\
    --dataset=mine:data
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from absl import flags

from experiments import common, subject

flags.declare_key_flag("data_dir")
flags.declare_key_flag("dataset")
flags.declare_key_flag("seed")
flags.adopt_module_key_flags(subject)
_ALL = flags.DEFINE_bool("all", True, "Print confirmed claims, too; else only the others.")
_AS_ABOVE = "(as above)"


def records_in(where: Path) -> list[Path]:
    """The records to verify: a file, or all below a folder.

    Raises:
      InputError: there are none.
    """
    import json

    from advdet import verify
    from advdet.types import InputError

    if where.is_file():
        return [where.with_suffix(".json") if where.suffix == ".npz" else where]
    if not where.is_dir():
        raise InputError(f"there is no file or folder {where}")
    found = []
    for path in sorted(where.rglob("*.json")):
        try:
            mine = verify.is_record(json.loads(path.read_text()))
        except ValueError:
            print(f"skipped, as it is no JSON: {path}", file=sys.stderr)
            continue
        if mine:
            found.append(path)
    if not found:
        raise InputError(f"{where} holds no record of an attack")
    return found


def show(claim) -> str:
    """A claim as one line."""
    text = f"  {claim.verdict:<14} {claim.name:<40}"
    if claim.stored is not None:
        text += f" {_number(claim.stored)}"
    if claim.verdict == "refuted" and (claim.stored, claim.found) != (None, None):
        text += f", found {_number(claim.found)}"
    return f"{text} {claim.note}".rstrip()


def _number(value) -> str:
    if isinstance(value, tuple):
        low, high = (_number(end) for end in value)
        return low if low == high else f"{low} to {high}"
    return f"{value:.7g}" if isinstance(value, (int, float)) else str(value)


def main(where: str | None = None) -> int:
    """Verifies a folder or a file; see `claims.status` for what comes back."""
    from advdet import claims, fresh_draws, paths, verify
    from advdet.types import InputError

    if where is None:
        raise InputError("name a folder of results, or one record: experiments.verify results")
    given, seed = _given(), _seed()
    records, kept, made = records_in(paths.given(where)), {}, []
    for number, path in enumerate(records, 1):
        print(f"{number} of {len(records)}", file=sys.stderr)
        found = verify.verify(
            path, data_dir=common.DATA_DIR.value, kept=kept, seed=seed,
            level=fresh_draws.LEVEL / len(records), **given,
        )  # fmt: skip
        made += found
        _print(path, found)
    if len(records) > 1:
        print(f"{len(records)} records: {_said(made)}")
    print(f"seed of fresh draws: {seed}")
    print(_core(made))
    return claims.status(made)


def _print(path: Path, found: list) -> None:
    """A record's claims; those that no file can show come last."""
    print(path)
    said: set[str] = set()
    shown = [claim for claim in found if _ALL.value or claim.verdict != "confirmed"]
    for claimed in (False, True):
        some = [claim for claim in shown if (claim.verdict == "claimed") == claimed]
        if claimed and some:
            print("  claimed, not verifiable from the files:")
        for claim in some:
            known = claim.note in said and len(claim.note) > len(_AS_ABOVE)
            print(show(claim._replace(note=_AS_ABOVE) if known else claim))
            said.add(claim.note)
    print(f"  {_said(found)}", flush=True)


def _seed() -> int:
    """Of the fresh draws: the flag's, else one that nobody can have known."""
    from advdet import fresh_draws

    return common.SEED.value if common.SEED.present else fresh_draws.entropy()


def _given() -> dict:
    """What the flags name in place of what the records do."""
    from advdet import detectors, named

    given = {"classifier": subject.classifier()}
    if subject.DEFENSE.value is not None:
        given["detector"] = detectors.from_spec(subject.DEFENSE.value)
    if named.is_own(common.DATASET.value):
        given["data"] = common.data()
    return given


def _said(found: list) -> str:
    counts = Counter(claim.verdict for claim in found)
    return ", ".join(
        f"{counts[name]} {name}" for name in ("confirmed", "refuted", "not decidable", "claimed")
    )


def _core(found: list) -> str:
    """The last line: what became of the claims without which a record is worth nothing."""
    counts = Counter(claim.verdict for claim in found if claim.is_core)
    confirmed, refuted, undecided = (
        counts[name] for name in ("confirmed", "refuted", "not decidable")
    )
    share = confirmed / max(1, confirmed + refuted + undecided)
    return (
        f"core claims: {confirmed} confirmed, {refuted} refuted, {undecided} undecided "
        f"({share:.1%} confirmed)"
    ).replace("%", " %")


if __name__ == "__main__":
    common.run(main, words=1)
