"""Curves by step: which ones a run has, and how one is drawn.

Kept values make the line. Values of steps whose work was lost are drawn dashed and faint where they were: both are in
the events, and the distance between them is what a kill changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median

from milepost.checkpoint.diary.facts import RunHistory, StepRecord, Validation
from milepost.report.svg import Markup, Scale, coordinate, drawing, markup, text_width

Point = tuple[int, float]

_MOST_POINTS = 240  # more are drawn as means of equal stretches of steps, with a band from lowest to highest
_MOST_DOTS = 60  # a line of more points has no dots
_MOST_LOST = 300
_MOST_OTHERS = 30
_MOST_LINES = 30  # more kills or resumes are short ticks, so that the curve behind them can be seen
_LARGEST, _SMALLEST = 1e300, 1e-290
_WIDE_RANGE = 50.0  # highest over median, from which on a logarithmic axis shows more


@dataclass(frozen=True)
class Curve:
    """One series. `kept` ascends by step; each run of `lost` begins, where there is one, with the kept point before it.
    A value that is no finite number is NaN."""

    label: str
    kept: tuple[Point, ...]
    lost: tuple[tuple[Point, ...], ...] = ()


@dataclass(frozen=True)
class Panel:
    """One drawing of one or two curves of the same unit."""

    title: str
    unit: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Marks:
    """What every panel shares: the range of steps, the steps after which a kill fell, and those resumed from."""

    first: int
    last: int
    kills: tuple[int, ...]
    resumes: tuple[int, ...]


# Title, unit, and for each curve its label and the names it may be recorded under: verl's, and older. Only names of
# one and the same value stand together, since only the first that a run has is drawn.
_KNOWN: tuple[tuple[str, str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = (
    ("Reward, mean", "", (("", ("reward", "critic/score/mean")),)),
    (
        "KL to the reference policy",
        "nats",
        (("in the reward", ("actor/reward_kl_penalty",)), ("in the loss", ("actor/kl_loss",))),
    ),
    ("KL to the old policy", "nats", (("", ("actor/ppo_kl",)),)),
    ("Entropy", "nats", (("", ("actor/entropy", "actor/entropy_loss")),)),
    ("Policy loss", "", (("", ("actor/pg_loss",)),)),
    ("Value loss", "", (("", ("critic/vf_loss",)),)),
    ("Gradient norm", "", (("actor", ("actor/grad_norm",)), ("critic", ("critic/grad_norm",)))),
    ("Learning rate", "", (("actor", ("actor/lr",)), ("critic", ("critic/lr",)))),
    ("Response length, mean", "tokens", (("", ("response_length/mean",)),)),
    ("Time of a step", "s", (("", ("seconds", "timing_s/step", "perf/time_per_step")),)),
)


def panels(history: RunHistory) -> tuple[list[Panel], list[Panel], int]:
    """The known panels that have values, reward first; the panels of all other metrics; and how many of those had to
    be left out."""
    step_values = [(record, _step_values(record)) for record in history.steps]
    names = sorted({name for _, values in step_values for name in values})
    known: list[Panel] = []
    used: set[str] = set()
    for title, unit, wanted in _KNOWN:
        chosen = [(label, next((name for name in candidates if name in names), None)) for label, candidates in wanted]
        curves = tuple(_curve(label, step_values, name) for label, name in chosen if name is not None)
        used.update(name for _, candidates in wanted for name in candidates)
        if curves:
            known.append(Panel(title, unit, curves))
    validated = [(record, dict(record.metrics)) for record in history.validations]
    validations = [
        Panel(f"Validation: {name}", "", (_curve("", validated, name),))
        for name in sorted({name for _, values in validated for name in values})
    ]
    reward = [panel for panel in known if panel.title == _KNOWN[0][0]]
    saves = tuple((save.step, save.seconds) for save in history.saves if save.seconds is not None)
    timed = [Panel("Time of a save", "s", (Curve("", _last_of_each_step(saves)),))] if saves else []
    main = reward + validations[:4] + [panel for panel in known if panel not in reward] + timed
    others = validations[4:]
    others += [Panel(name, "", (_curve("", step_values, name),)) for name in names if name not in used]
    return main, others[:_MOST_OTHERS], max(0, len(others) - _MOST_OTHERS)


def marks_of(history: RunHistory) -> Marks:
    """The range of steps of a run, and its kills and resumes by step, which lie in that range."""
    kills = tuple(kill.last_step for kill in history.kills if kill.last_step is not None)
    found = [session.resume.from_step for session in history.sessions if session.resume is not None]
    resumes = tuple(step for step in found if step is not None)
    steps = [fact.step for facts in (history.steps, history.validations, history.saves) for fact in facts]
    steps += [*kills, *resumes]
    return Marks(min(steps, default=0), max(steps, default=0), kills, resumes)


def _step_values(record: StepRecord) -> dict[str, float]:
    own = {"reward": record.reward, "seconds": record.seconds}
    return {**record.metrics, **{name: value for name, value in own.items() if value is not None}}


def _curve(label: str, records: Sequence[tuple[StepRecord | Validation, Mapping[str, float]]], name: str) -> Curve:
    points = [(record, (record.step, _drawable(values[name]))) for record, values in records if name in values]
    kept = tuple(point for record, point in points if record.kept)
    lost: list[tuple[Point, ...]] = []
    before: tuple[StepRecord | Validation, Point] | None = None
    for (is_kept, session), run in groupby(points, key=lambda item: (item[0].kept, item[0].session)):
        members = list(run)
        if not is_kept:
            lead = [before[1]] if before is not None and before[0].session == session else []
            lost.append((*lead, *(point for _, point in members)))
        before = members[-1]
    return Curve(label, kept, tuple(lost))


def _drawable(value: float) -> float:
    """`value` where a drawing can show it: NaN where it is not finite or near the end of what a double holds, which
    the margins of an axis would pass; 0 where it is nearer to 0 than an axis can be divided."""
    if not abs(value) <= _LARGEST:
        return math.nan
    return value if abs(value) >= _SMALLEST else 0.0


def _last_of_each_step(points: Iterable[Point]) -> tuple[Point, ...]:
    return tuple(sorted(dict(points).items()))


def draw_panel(name: str, panel: Panel, marks: Marks, width: float = 340, height: float = 176) -> Markup:
    """A panel as SVG. `name` is unique in the page; `width` and `height` are in user units, text is 11 of them."""
    values = [value for curve in panel.curves for run in (curve.kept, *curve.lost) for _, value in run]
    finite = [value for value in values if not math.isnan(value)]
    left, right, top, bottom = 50.0, width - 10, 10.0, height - 26
    y = _value_scale(finite, bottom, top)
    pad = 0.5 if marks.first == marks.last else 0.0
    x = Scale(marks.first - pad, marks.last + pad, left, right)
    body: list[Markup] = []
    for value, label in y.ticks(round((bottom - top) / 26)):
        at = y(value)
        body.append(markup("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        body.append(markup("text", label, x=left - 6, y=at + 4, class_="tick", text_anchor="end"))
    body.extend(_step_ticks(x, bottom))
    body.append(_event_marks(marks, x, top, bottom))
    for index, curve in enumerate(panel.curves):
        body.append(markup("g", *_draw_curve(curve, x, y, top), class_=f"curve c{index}"))
    if y.logarithmic:
        body.append(markup("text", "log scale", x=right, y=bottom - 5, class_="note", text_anchor="end"))
    return drawing(name, panel.title, _description(panel), width, height, *body)


def _value_scale(finite: Sequence[float], bottom: float, top: float) -> Scale:
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low > 0 and high / _WIDE_RANGE > median(finite):
        return Scale(10.0 ** math.floor(math.log10(low)), high * 1.2, bottom, top, logarithmic=True)
    if low == high:
        pad = abs(low) / 10 or 1.0
    else:
        pad = high / 16 - low / 16
        # An axis that is nearly at zero anyway begins there: heights can then be compared.
        if 0 <= low < high / 4:
            return Scale(0.0, high + pad, bottom, top)
    return Scale(low - pad, high + pad, bottom, top)


def _step_ticks(x: Scale, bottom: float) -> list[Markup]:
    parts = [markup("path", d=f"M{coordinate(x.start)} {coordinate(bottom)}H{coordinate(x.end)}", class_="axis")]
    if x.high - x.low == 1.0 and x.low != int(x.low):
        labelled = [(x.low + 0.5, f"{x.low + 0.5:,.0f}")]
    else:
        labelled = [(value, label) for value, label in x.ticks(round((x.end - x.start) / 45)) if value == int(value)]
    free = -math.inf
    for value, label in labelled:
        at = x(value)
        if at - text_width(label) / 2 < free:
            continue
        free = at + text_width(label) / 2 + 6
        body = {"x1": at, "x2": at, "y1": bottom, "y2": bottom + 4}
        parts.append(markup("line", class_="axis", **body))
        end = "end" if at + text_width(label) / 2 > x.end + 10 else "middle"
        parts.append(markup("text", label, x=at, y=bottom + 17, class_="tick", text_anchor=end))
    return parts


def _event_marks(marks: Marks, x: Scale, top: float, bottom: float) -> Markup:
    """All kills as one path and all resumes as another, however many there are."""
    paths = []
    for kind, steps in (("kill", marks.kills), ("resume", marks.resumes)):
        at = sorted({round(x(step)) for step in steps})
        down, up = coordinate(bottom), coordinate(top if len(at) <= _MOST_LINES else bottom - 8)
        triangle = "" if kind == "kill" or len(at) > _MOST_LINES else "l-4 7h8z"
        lines = "".join(f"M{place} {down}V{up}M{place} {down}{triangle}" for place in at)
        words = ", ".join(str(step) for step in sorted(set(steps))[:20]) + (", ..." if len(set(steps)) > 20 else "")
        said = f"killed after step {words}" if kind == "kill" else f"resumed from step {words}"
        if at:
            paths.append(markup("path", markup("title", said), d=lines, class_=f"{kind} at"))
    return markup("g", *paths)


def _draw_curve(curve: Curve, x: Scale, y: Scale, top: float) -> list[Markup]:
    parts: list[Markup] = []
    finite = [point for point in curve.kept if not math.isnan(point[1])]
    lost = [run for run in curve.lost if run]
    if sum(len(run) for run in lost) <= _MOST_LOST:
        parts += [markup("path", d=_line(run, x, y), class_="lost-line") for run in lost if _line(run, x, y)]
    else:
        parts.append(markup("path", d=_scattered(lost, x, y), class_="lost-dots"))
    if len(finite) > _MOST_POINTS:
        stretches = _stretches(finite)
        upper = [(step, high) for step, _, _, high in stretches]
        lower = [(step, low) for step, _, low, _ in reversed(stretches)]
        outline = "L".join(_at(step, value, x, y) for step, value in upper + lower)
        parts.append(markup("path", d=f"M{outline}Z", class_="band"))
        parts.append(markup("path", d=_line([(s, mean) for s, mean, _, _ in stretches], x, y), class_="line"))
    elif finite:
        parts.append(markup("path", d=_line(curve.kept, x, y), class_="line"))
        for step, value in finite if len(finite) <= _MOST_DOTS else ():
            words = markup("title", f"step {step}: {value:.6g}")
            parts.append(markup("circle", words, cx=x(step), cy=y(value), r=2.5, class_="dot"))
    bad = sorted({round(x(step)): step for step, value in curve.kept if math.isnan(value)}.items())
    for at, step in bad:
        words = markup("title", f"step {step}: not a number")
        parts.append(markup("path", words, d=f"M{at - 3} {top:g}l6 6m0 -6l-6 6", class_="nan"))
    return parts


def _at(step: float, value: float, x: Scale, y: Scale) -> str:
    return f"{x(step):.1f} {y(value):.1f}"


def _line(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> str:
    """A path through the points, broken where a value is NaN. A point on its own is a stroke of no length, which a
    round cap shows as a dot."""
    path: list[str] = []
    for is_gap, run in groupby(points, key=lambda point: math.isnan(point[1])):
        if not is_gap:
            places = [_at(step, value, x, y) for step, value in run]
            path.append("M" + "L".join(places) + ("h0" if len(places) == 1 else ""))
    return "".join(path)


def _scattered(runs: Sequence[Sequence[Point]], x: Scale, y: Scale) -> str:
    """Many lost points as dots, one for each place of a coarse grid, evenly thinned to a bound."""
    seen = {
        (2 * round(x(step) / 2), 2 * round(y(value) / 2)) for run in runs for step, value in run if math.isfinite(value)
    }
    places = sorted(seen)
    return "".join(f"M{across} {down}h0" for across, down in places[:: max(1, math.ceil(len(places) / _MOST_LOST))])


def _stretches(points: Sequence[Point]) -> list[tuple[float, float, float, float]]:
    """Equal stretches of steps as (mean step, mean, lowest, highest)."""
    first, span = points[0][0], points[-1][0] - points[0][0] + 1
    return [
        (
            fmean(step for step, _ in run),
            fmean(value for _, value in run),
            min(run, key=_value)[1],
            max(run, key=_value)[1],
        )
        for run in (
            list(members) for _, members in groupby(points, key=lambda point: (point[0] - first) * _MOST_POINTS // span)
        )
    ]


def _value(point: Point) -> float:
    return point[1]


def _description(panel: Panel) -> str:
    sentences = []
    for curve in panel.curves:
        finite = [point for point in curve.kept if not math.isnan(point[1])]
        name = f"{curve.label}: " if len(panel.curves) > 1 else ""
        if not finite:
            sentences.append(f"{name}no value is a number.")
            continue
        low, high = min(finite, key=_value), max(finite, key=_value)
        sentences.append(
            f"{name}{finite[0][1]:.4g} at step {finite[0][0]}, {finite[-1][1]:.4g} at step {finite[-1][0]}; "
            f"lowest {low[1]:.4g} at step {low[0]}, highest {high[1]:.4g} at step {high[0]}."
        )
        if len(finite) < len(curve.kept):
            sentences.append(f"{name}{len(curve.kept) - len(finite)} values are not numbers.")
        if curve.lost:
            sentences.append(f"{name}values of steps lost and done again are dashed.")
    return " ".join(sentences)
