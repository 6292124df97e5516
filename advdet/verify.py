"""Is a stored record true? Every figure computed again, from the stored images.

A record's images are judged anew, by the defence that it names and with the draws that its seed
gives; a random defence's by fresh draws, too. Controls, indicators, the verdict and the comparison
with the paper are made again by the functions that made them. Each claim comes out as

    confirmed      it follows from the stored images
    refuted        it does not, and float error (see `rejudge`) cannot explain that
    not decidable  what it needs is not here: the note says what
    claimed        no file can show it: what the attacker knew, which attack ran, how long

Nor is it looked at whether the attack could have done better.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from advdet import (
    beside,
    claimed_figures,
    claimed_images,
    claimed_origin,
    claimed_signs,
    claimed_verdicts,
    fresh_draws,
    paths,
    recompute,
    results,
)
from advdet.claims import CONFIRMED, REFUTED, UNDECIDED, Claim, stored, undecided
from advdet.rebuild import Evidence, rebuild
from advdet.rejudge import look_again
from advdet.types import InputError


def verify(
    path: str | Path,
    *,
    progress: bool = True,
    seed: int | None = None,
    level: float = fresh_draws.LEVEL,
    **given,
) -> list[Claim]:
    """Verifies one record.

    Args:
      path: its JSON; the npz lies beside it.
      progress: show what takes long on stderr.
      seed: of the fresh draws; None takes one that nobody can have known.
      level: the chance at which an honest record of a random defence may be refuted by them;
        divide it by the number of records that are verified together.
      **given: what `rebuild.rebuild` takes: data, classifier and detector in place of those that
        the record names, data_dir, and `kept`, a dict to be handed over again for further records.

    Returns:
      Its claims.

    Raises:
      InputError: there is no such file, or it is not a record.
    """
    path = paths.given(path)
    record = read_record(path)
    if record["schema"] != results.SCHEMA:
        why = f"its schema is {record['schema']}, this version reads {results.SCHEMA}"
        return [undecided("file", why)]
    seed = fresh_draws.entropy() if seed is None else seed
    kept, found, built = given.setdefault("kept", {}), [], None
    try:
        made, arrays = _files(path, record)
        found += made
        if arrays is not None:
            built = rebuild(record["run"], progress=progress, **given)
        found += claimed_origin.of_names(path, record["run"], built)
        if built is not None:
            clean = built.splits and built.splits.test.take(slice(len(arrays["id"])))
            lenient = stored(record)  # but for what it cannot be rebuilt without
            lenient["run"] = record["run"]
            there = beside.baseline(path, lenient)
            evidence = Evidence(lenient, arrays, built, clean, path, there)
            for made in _claims(evidence, found, kept, progress, seed, level):
                found += made
        found += claimed_origin.of_the_run(record)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        found.append(undecided("file", f"not a whole record: {what}"))
    return [claim for claim in found if not claim.is_empty()]


def read_record(path: Path) -> dict[str, Any]:
    """A record's JSON.

    Raises:
      InputError: it cannot be read, or is not a record.
    """
    record = results.read_json(path)
    if not is_record(record):
        raise InputError(f"{path} is not the record of an attack")
    return record


def is_record(value: Any) -> bool:
    """Whether a JSON value is the record of an attack, not a summary or a manifest."""
    return isinstance(value, dict) and {"schema", "run", "attack"} <= set(value)


def _files(path: Path, record: dict[str, Any]) -> tuple[list[Claim], dict | None]:
    """Whether the arrays are there, and those that were sealed; and the arrays, where they are."""
    npz, digest = path.with_suffix(".npz"), record.get("arrays_sha256")
    if not npz.exists():
        of_what = f"digest {digest}" if digest else "nor a digest of them"
        return [undecided("file", f"images not here ({of_what}): {npz.name} is missing")], None
    try:
        _, arrays = results.load(path)
    except InputError as error:
        return [Claim("seal", REFUTED, note=str(error))], None
    if wrong := claimed_images.misshapen(arrays):
        return [Claim("arrays", REFUTED, note=wrong)], None
    note = "the arrays are those that were sealed"
    if digest is None:
        note += "; by their own word, as the JSON of an older version names no digest"
    return [Claim("seal", CONFIRMED, digest, note=note)], arrays


def _claims(
    evidence: Evidence, made: list[Claim], kept: dict, progress: bool, seed: int, level: float
) -> Iterator[list[Claim]]:
    """All claims that take the images, in the order in which they are made; `made` is what was."""
    found, fits = claimed_images.of_images(evidence)
    yield found
    if not fits:
        return
    looks = None
    if evidence.built.victim is not None:
        arrays, clean = evidence.arrays, evidence.clean
        looks = look_again(evidence.built.victim, evidence.run, arrays, clean, progress)
        fit = claimed_verdicts.of_fit(evidence, looks)
        yield [fit]
        if fit.verdict == UNDECIDED:  # judged by another detector, every claim would be refuted
            evidence, looks = evidence.without(fit.note), None
    yield claimed_origin.of_hash(evidence) + claimed_origin.of_radius(evidence)
    yield claimed_images.of_targets(evidence)
    clean, adversarial = claimed_verdicts.as_stored(evidence.arrays)
    thresholds = evidence.record["clean"]["thresholds"]
    if looks is not None:
        judged = claimed_verdicts.of_looks(evidence, looks, clean, adversarial)
        found, clean, adversarial, thresholds = judged
        yield found
    seen = claimed_figures.Verdicts(clean, adversarial, thresholds)
    if looks is not None:
        yield fresh_draws.of_fresh_draws(evidence, seen, seed, level)
    yield claimed_figures.of_verdicts(evidence, seen)
    yield claimed_figures.of_looks(evidence, seen, looks)
    yield claimed_figures.of_many_clean_images(evidence, kept, progress)
    if looks is None:
        yield claimed_signs.without_a_judge(evidence)
        return
    reference = claimed_figures.reference(evidence, kept, progress)
    again = recompute.again(evidence, seen, looks, reference)
    yield claimed_signs.of_signs(evidence.record, again)
    yield claimed_signs.of_rest(evidence.record, again, {claim.name for claim in made})
