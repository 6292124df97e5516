"""A record's controls, indicators, verdict and comparison with the paper, against those made again.

What was made again comes from `recompute`. Every indicator is looked at: those of `ASKS_GRADIENTS`
as far as the attacker's view is here, those of `NOT_COMPUTABLE` never, all others always.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from advdet import indicators
from advdet.claims import (
    CONFIRMED,
    LACKING,
    MISSING,
    REFUTED,
    Claim,
    Range,
    claimed,
    compare,
    compare_ends,
    undecided,
)
from advdet.defenses import POINTS
from advdet.rebuild import Evidence
from advdet.recompute import Again

NOT_COMPUTABLE = {
    "nearer_attack": "rests on the record of another attack",
    "nearer_again": "rests on a second run, which is not stored",
    "score_drifts": "rests on what the score said during the run",
}
ASKS_GRADIENTS = ("zero_gradient", "wrong_gradient", "one_step")
_SLACK = 1e-3  # of a figure, or of 1 where that is more: float error that adds up
_GRADIENT_SLACK = 0.02  # of images: a gradient's last bit can decide whether one step is enough
_FEW_IMAGES = 0.15  # one of the fewest that are asked
BASELINE_ELSEWHERE = "the images of the undefended classifier's record are not beside this one"
_FIGURES = ("counts", "clean", "attack", "detection", "correction", "intervals")
_WORDS = ("advice", "reason")  # of an indicator; they differ between versions


def of_signs(record: Mapping[str, Any], again: Again) -> list[Claim]:
    """Controls, indicators, the verdict, the paper's figures.

    Args:
      record: as stored, of `claims.stored`.
      again: the record built again.
    """
    return [
        *_controls(record["controls"], again),
        *_indicators(record["indicators"], again),
        verdict(record, again),
        *_paper(record["paper"], again),
    ]


def of_rest(record: Mapping[str, Any], again: Again, made: Collection[str]) -> list[Claim]:
    """Every other figure of a record, so that a new one cannot be forgotten.

    Args:
      record: as stored, of `claims.stored`.
      again: the record built again.
      made: names of the claims that were made already.
    """
    found = []
    for part in _FIGURES:
        for name, ours in _leaves({part: again.readings[1][part]}):
            if name in made or f"{name}.low" in made or isinstance(ours, str):
                continue
            stored = _leaf(record, name)
            if again.unpaired and ".paired_baseline" in name and stored is not MISSING:
                found.append(undecided(name, BASELINE_ELSEWHERE))
                continue
            others = [_leaf(reading, name) for reading in again.readings]
            if isinstance(ours, list):
                found += compare_ends(name, stored, ours)
            elif all(isinstance(value, (int, float)) for value in others):
                found.append(compare(name, stored, Range(min(others), max(others))))
            else:
                found.append(compare(name, stored, ours))
    return found


def without_a_judge(evidence: Evidence) -> list[Claim]:
    """The same where there is no judge: what follows from stored figures can only be refuted."""
    record, why = evidence.record, evidence.built.why
    found = [undecided(name, why) for name in ("controls", "indicators")]
    stored, signs, interval = record["verdict"], record["indicators"], record["intervals"]
    if stored is MISSING or signs is MISSING or interval is MISSING:
        return [*found, undecided("verdict", why)]
    ours = indicators.verdict(
        interval["success_rate"], signs, record["sets"] or None,
        by_values=indicators.by_values(record["run"]),
    )  # fmt: skip
    if stored != ours:
        return [*found, Claim("verdict", REFUTED, stored, ours)]
    return [*found, undecided("verdict", why, stored), undecided("paper", why)]


def _controls(stored, again: Again) -> Iterator[Claim]:
    if stored is MISSING:
        yield undecided("controls", LACKING)
        return
    for name in again.readings[0]["controls"]:
        found = [reading["controls"][name] for reading in again.readings]
        if stored[name] is None or None in found:
            empty = stored[name] is None and found[0] is None
            yield Claim(f"controls.{name}", CONFIRMED if empty else REFUTED, note="none")
            continue
        for point in POINTS:
            rates = [rates[point] for rates in found]
            ends = Range(None, None) if None in rates else Range(min(rates), max(rates))
            yield compare(f"controls.{name}.{point}", stored[name][point], ends)


# ---- indicators


def _indicators(stored, again: Again) -> Iterator[Claim]:
    if stored is MISSING:
        yield undecided("indicators", LACKING)
        return
    computed = again.readings[0]["indicators"]
    for name in (*computed, *(name for name in stored if name not in computed)):
        yield _indicator(name, stored[name], again)


def _indicator(name: str, stored, again: Again) -> Claim:
    """One indicator: raised as it should be, and its figures within float error."""
    where = f"indicators.{name}"
    found = [reading["indicators"].get(name) for reading in again.readings]
    if why := _not_computable(name, again):
        return claimed(where, why, _state(stored))
    if found[0] is None:
        return undecided(where, "this version knows no such indicator", _state(stored))
    ours = {sign["raised"] for sign in found}
    if stored is MISSING:
        raised = "; it would be raised" if ours == {True} else ""
        return undecided(where, f"{LACKING}{raised}")
    if name in ASKS_GRADIENTS:
        return _gradients(where, stored, found[0])
    off = [part for part, value in _leaves(stored)
           if not _within(value, [_leaf(sign, part) for sign in found], _SLACK)]  # fmt: skip
    if off:
        note = f"in {', '.join(off)}" if off != ["raised"] else ""
        return Claim(where, REFUTED, _state(stored), _state(found[1]), note)
    if len(ours) > 1:
        return undecided(where, "what is here leaves open whether it is raised", _state(stored))
    return Claim(where, CONFIRMED, _state(stored))


def _gradients(where: str, stored, found) -> Claim:
    """An indicator that asks for gradients, whose last bits differ on another machine."""
    hidden = found["raised"] and not stored["raised"]
    same = all(stored[part] == found[part] for part in ("raised", "invalidates"))
    near = lambda slack: _within(stored["value"], [found["value"]], slack)
    if same and near(_GRADIENT_SLACK):
        return Claim(where, CONFIRMED, _state(stored))
    if not hidden and near(_FEW_IMAGES):
        why = f"float error can explain the difference: {_state(found)} here"
        return undecided(where, why, _state(stored))
    return Claim(where, REFUTED, _state(stored), _state(found))


def _not_computable(name: str, again: Again) -> str:
    if name in NOT_COMPUTABLE:
        return NOT_COMPUTABLE[name]
    if name == "score_reversed" and again.unpaired:
        return BASELINE_ELSEWHERE
    return again.unasked if name in ASKS_GRADIENTS else ""


def _state(sign) -> str | None:
    """An indicator in a few words."""
    if sign is MISSING or not isinstance(sign, Mapping):
        return None
    value = sign["value"]
    said = f"{value:.4g}" if isinstance(value, (int, float)) else "no figure"
    return f"{said}, raised" if sign["raised"] else f"{said}, not raised"


def _leaves(sign, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name with dots, value) of all that is no text of ours."""
    for name, value in sign.items():
        if name in _WORDS:
            continue
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _leaf(sign, name: str):
    for part in name.split("."):
        sign = sign[part] if isinstance(sign, Mapping) and part in sign else MISSING
    return sign


def _within(stored, found: list, slack: float) -> bool:
    """Whether a stored value is one of those found, or lies between them."""
    is_number = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number(stored) or not all(map(is_number, found)):
        return stored in found
    room = slack * max(1.0, *map(abs, found))
    return math.isfinite(stored) and min(found) - room <= stored <= max(found) + room


# ---- the verdict, and the paper


def verdict(record: Mapping[str, Any], again: Again) -> Claim:
    """The verdict: of success, sets and indicators, all made again as far as they can be."""
    stored, signs = record["verdict"], record["indicators"]
    found = sorted({reading["verdict"] for reading in again.readings})
    if stored is MISSING:
        return undecided("verdict", LACKING)
    open_ones = [name for name in indicators.INVALIDATING if _not_computable(name, again)]
    excused = [name for name in open_ones if signs and signs[name] and signs[name]["raised"]]
    if stored == "evaluation invalid" and stored not in found and excused:
        why = f"as {', '.join(excused)} says, which cannot be computed: {again.unasked}"
        return undecided("verdict", why, stored)
    if stored not in found:
        raised = sorted({name for reading in again.readings
                         for name, sign in reading["indicators"].items()
                         if sign["raised"] and sign["invalidates"]})  # fmt: skip
        note = f"raised here: {', '.join(raised)}" if raised else ""
        return Claim("verdict", REFUTED, stored, " or ".join(found), note)
    if len(found) > 1:
        return undecided("verdict", f"within float error of {' or '.join(found)}", stored)
    if excused and stored != "evaluation invalid":
        note = f"{', '.join(excused)} is raised in the record itself"
        return Claim("verdict", REFUTED, stored, "evaluation invalid", note)
    note = f"unless {' or '.join(open_ones)} is raised: {again.unasked}" if open_ones else ""
    return Claim("verdict", CONFIRMED, stored, note=note)


def _paper(stored, again: Again) -> Iterator[Claim]:
    if stored is MISSING:
        yield undecided("paper", LACKING)
        return
    found = [reading["paper"] for reading in again.readings]
    bands = [part["in_band"] for part in found]
    said, ours = stored["in_band"], bands[1]
    if said is MISSING:
        yield undecided("paper.in_band", LACKING)
    elif said not in bands:
        yield Claim("paper.in_band", REFUTED, _word(said), _word(ours))
    elif len(set(bands)) > 1:
        yield undecided("paper.in_band", "within float error of the band's end", _word(said))
    else:
        yield Claim("paper.in_band", CONFIRMED, _word(said))
    for name in ("figure", "regime"):
        if stored[name] == found[1][name]:
            yield Claim(f"paper.{name}", CONFIRMED)
        else:
            yield undecided(f"paper.{name}", "not what this version's table of the paper says")


def _word(band) -> str:
    return {True: "yes", False: "no", None: "not comparable"}.get(band, str(band))
