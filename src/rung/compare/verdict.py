"""The verdict of a comparison: a sentence on the measurements, and the strategy to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rung.compare.variants import REFERENCE, Variant
from rung.planner.search import WORTH_IT
from rung.spec.abilities import rung_of
from rung.spec.strategy import Layout
from rung.system.units import human_bytes, human_seconds

_SAME = 0.005  # relative; times that differ by less count as equal
_FAR = 0.01  # relative; the verdict mentions losses that differ by more


def make_verdict(rows: Sequence[dict[str, Any]], variants: Sequence[Variant]) -> dict[str, Any]:
    """`sentence` sums up all rows; `recommendation` explains the choice of `strategy`."""
    done = [(row, variant) for row, variant in zip(rows, variants, strict=True) if row["status"] == "ok"]
    if not done:
        return {
            "sentence": f"None of the {len(rows)} strategies could be run.",
            "recommendation": "See the reason of each row.",
            "strategy": None,
        }
    quickest = min(done, key=lambda pair: _seconds(pair[0]))
    chosen = choose(done)
    return {
        "sentence": _sentence([row for row, _ in done], quickest[0], len(rows)),
        "recommendation": _recommendation(*chosen, quickest[0], [row for row, _ in done]),
        "strategy": chosen[0]["strategy"],
    }


def choose(done: Sequence[tuple[dict[str, Any], Variant]]) -> tuple[dict[str, Any], Variant]:
    """The quickest row, or one with a simpler strategy (a lower rung) that is less than 5 % slower."""
    least = min(_seconds(row) for row, _ in done)
    near = [pair for pair in done if _seconds(pair[0]) * (1 - WORTH_IT) <= least]
    return min(near, key=lambda pair: (_rung(pair[1].layout), len(pair[1].text.split()), _seconds(pair[0])))


def _rung(layout: Layout | None) -> float:
    assert layout is not None
    return rung_of(layout)


def _seconds(row: dict[str, Any]) -> float:
    return float(row["step_seconds"]["median"])


def fullest(row: dict[str, Any]) -> int:
    """Peak bytes of the rank that needs the most."""
    return max(int(rank["peak_bytes"]) for rank in row["memory"])


def _sentence(done: Sequence[dict[str, Any]], quickest: dict[str, Any], count: int) -> str:
    name, step = quickest["strategy"], human_seconds(_seconds(quickest))
    of = f"of {len(done)}" + (f" that ran ({count - len(done)} failed)" if len(done) < count else "")
    speedup = quickest["speedup"]
    if len(done) == 1:
        failed = {1: "", 2: "; the other failed"}.get(count, f"; the {count - 1} others failed")
        text = f"{_name(quickest)} takes {step} a step{failed}"
    elif name == REFERENCE:
        text = f"one process is the quickest {of}, with {step} a step"
    elif speedup is None:
        text = f"{name} is the quickest {of}, with {step} a step"
    else:
        text = f"{name} is the quickest {of}, with {step} a step, {_times(speedup)} one process"
    leanest = min(done, key=fullest)
    if len(done) > 1:
        text += f"; {_name(leanest)} needs the least memory, {human_bytes(fullest(leanest))} on its fullest rank"
    return _capital(f"{text}.")


def _times(ratio: float) -> str:
    if abs(ratio - 1) < _SAME:
        return "as quick as"
    if ratio < 1:
        return f"{100 * (1 / ratio - 1):.0f} % slower than"
    return f"{100 * (ratio - 1):.0f} % quicker than" if ratio < 1.5 else f"{ratio:.1f} times as quick as"


def _recommendation(
    chosen: dict[str, Any], variant: Variant, quickest: dict[str, Any], done: Sequence[dict[str, Any]]
) -> str:
    name = _name(chosen)
    if len(done) == 1:
        return f"Only {name} was measured here: there is nothing to choose from."
    if chosen is quickest:
        text = f"Use {name}: no lower rung of the ladder comes within {100 * WORTH_IT:.0f} % of its speed."
        if chosen["strategy"] == REFERENCE:
            spread = any(row["ranks"] > 1 for row in done)
            why = "on this machine, communication costs the others more than they save" if spread else "it is quickest"
            text = f"Use one process: {why}."
    else:
        slower = 100 * (1 - _seconds(quickest) / _seconds(chosen))
        text = (
            f"Use {name}: {_name(quickest)} is {slower:.1f} % quicker, which is not worth a higher rung."
            if slower >= 0.05
            else f"Use {name}: {_name(quickest)} is as quick, but a higher rung."
        )
    leanest = min(done, key=fullest)
    if fullest(leanest) < 0.8 * fullest(chosen):
        share = 100 * (1 - fullest(leanest) / fullest(chosen))
        text += f" If memory is short, {_name(leanest)} needs {share:.0f} % less of it."
    if any(row.get("other_cores") for row in done):
        text += " But other programs kept the machine busy meanwhile: compare again when it is idle."
    difference = chosen["largest_difference"]["loss"]
    if any(loss is None for _, loss in chosen.get("losses", ())):
        text += " Its losses are not all numbers."
    elif difference is not None and difference > _FAR:
        text += f" Its losses differ from those of one process by up to {100 * difference:.0f} %."
        if variant.config.dropout:
            text += " If the model has dropout, ranks draw different masks: --set dropout=false turns it off."
    return text


def _name(row: dict[str, Any]) -> str:
    return "one process" if row["strategy"] == REFERENCE else str(row["strategy"])


def _capital(text: str) -> str:
    """Capitalise a sentence, unless it begins with the name of a strategy."""
    return text[0].upper() + text[1:] if text.startswith("one process") else text
