"""The run over wall time: sessions as bars, saves as ticks, validations, kills and resumes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from milepost.checkpoint.diary.facts import RunHistory, Save, Session, Validation
from milepost.report.svg import Markup, TimeScale, drawing, joined, markup, text_width, time_scale
from milepost.wording import counted, duration, file_size, moment, named_ranks

WIDTH = 1000.0
LEFT, RIGHT = 84.0, 988.0
_KILL_LABELS, _RESUME_LABELS = 12.0, 27.0
_BARS_TOP, _BARS_BOTTOM = 38.0, 84.0
_BARS_MIDDLE = (_BARS_TOP + _BARS_BOTTOM) / 2
_SAVES_TOP, _SAVES_BOTTOM = 96.0, 110.0
_VALIDATIONS = 138.0
_AXIS = 158.0
_BOLD = 1.2  # how much wider bold letters are
_MOST_LINES = 30  # more kills or resumes are drawn on the bars alone, so that all else can be seen
HEIGHT = 186.0


def timeline(history: RunHistory) -> Markup:
    """One drawing of the whole run; empty markup where no session is known."""
    if not history.sessions:
        return Markup("")
    scale = time_scale([(session.start, session.last) for session in history.sessions], LEFT, RIGHT)
    first, last = history.sessions[0].start, history.sessions[-1].last
    description = (
        f"{counted(len(history.sessions), 'session')} from {moment(first)} to {moment(last)}, "
        f"{counted(len([save for save in history.saves if save.outcome == 'durable']), 'durable save')}, "
        f"{counted(len(history.validations), 'validation')}, {counted(len(history.kills), 'kill')}, "
        f"{counted(len(history.stalls), 'stall')}."
    )
    return drawing(
        "timeline",
        "Timeline of the run",
        description,
        WIDTH,
        HEIGHT,
        _hatching(),
        *_axis(scale),
        *_lane_names(history),
        *_bars(history, scale),
        *_stalls(history, scale),
        *_save_ticks(history.saves, scale),
        *_validation_marks(history.validations, scale),
        # An end's line passes the row of the resumes' labels, which are to stand before it.
        *_ends(history, scale),
        *_resumes(history.sessions, scale),
    )


def _hatching() -> Markup:
    line = markup("path", d="M0 6L6 0M-1 1L1 -1M5 7L7 5", class_="hatch")
    pattern = markup("pattern", line, id="lost-work", width=6, height=6, patternUnits="userSpaceOnUse")
    return markup("defs", pattern)


def _axis(scale: TimeScale) -> list[Markup]:
    parts = [markup("path", d=f"M{LEFT:g} {_AXIS:g}H{RIGHT:g}", class_="axis")]
    for x, label in scale.ticks():
        parts.append(markup("line", x1=x, x2=x, y1=_BARS_TOP, y2=_AXIS + 4, class_="grid"))
        parts.append(_label(label, x, _AXIS + 18))
    for start, end, seconds in scale.folds:
        middle = (start + end) / 2
        parts.append(markup("rect", x=start, y=_AXIS - 6, width=end - start, height=12.0, class_="fold"))
        parts.append(
            markup(
                "path",
                d=f"M{middle - 5:.1f} {_AXIS + 5:g}L{middle - 1:.1f} {_AXIS - 5:g}"
                f"M{middle + 1:.1f} {_AXIS + 5:g}L{middle + 5:.1f} {_AXIS - 5:g}",
                class_="axis",
            )
        )
        # The leading unit alone fits a fold of any length; the hover text has the rest.
        words = duration(seconds)
        shown = " ".join(words.split(" ")[:2])
        shown = shown if text_width(shown, 9.5) <= end - start - 4 else ""
        hover = markup("title", f"nothing ran for {words}")
        parts.append(markup("text", hover, shown, x=middle, y=_BARS_MIDDLE + 4, class_="note", text_anchor="middle"))
    return parts


def _lane_names(history: RunHistory) -> list[Markup]:
    lanes = [("sessions", _BARS_MIDDLE + 4)]
    lanes += [("saves", _SAVES_BOTTOM - 3)] if history.saves else []
    lanes += [("validation", _VALIDATIONS + 4)] if history.validations else []
    return [markup("text", name, x=0, y=y, class_="lane") for name, y in lanes]


def _bars(history: RunHistory, scale: TimeScale) -> list[Markup]:
    largest = max(history.world_sizes, default=1)
    lost_from: dict[int, float] = {}
    for record in history.lost_steps:
        lost_from.setdefault(record.session, record.time - (record.seconds or 0.0))
    parts: list[Markup] = []
    for session in history.sessions:
        x = scale(session.start)
        width = max(2.0, scale(session.last) - x)
        # The height tells the world size, so that a shrunken cluster is seen before a label is read.
        height = 18.0 + (_BARS_BOTTOM - _BARS_TOP - 18.0) * (session.world_size or largest) / max(1, largest)
        top = _BARS_MIDDLE - height / 2
        inside = [markup("title", _session_words(session))]
        inside.append(markup("rect", x=x, y=top, width=width, height=height, rx=3, class_="session"))
        if session.index in lost_from:
            lost = max(x, scale(lost_from[session.index]))
            inside.append(markup("rect", x=lost, y=top, width=x + width - lost, height=height, class_="lost"))
        label = next((words for words in _bar_labels(session) if text_width(words) <= width - 8), None)
        if label is not None:
            inside.append(_label(label, x + width / 2, _BARS_MIDDLE + 4, "bar"))
        parts.append(markup("g", *inside))
    return parts


def _bar_labels(session: Session) -> list[str]:
    """What may stand in a bar, longest first."""
    ranks = "" if session.world_size is None else counted(session.world_size, "rank")
    steps = ""
    if session.first_step is not None:
        one = session.first_step == session.last_step
        steps = f"step {session.first_step}" if one else f"steps {session.first_step} to {session.last_step}"
    both = " · ".join(words for words in (ranks, steps) if words)
    return [words for words in (both, ranks, "" if session.world_size is None else str(session.world_size)) if words]


def _session_words(session: Session) -> str:
    end = "no stop recorded" if session.end is None else session.ended
    about = " · ".join(_bar_labels(session)[:1])
    return (
        f"Session {session.index + 1}{about and ': ' + about}. {moment(session.start)} to {moment(session.last)}, {end}"
    )


def _save_ticks(saves: Iterable[Save], scale: TimeScale) -> list[Markup]:
    parts: list[Markup] = []
    drawn, free = (-1.0, ""), -math.inf
    for save in saves:
        x = scale(save.requested)
        if (round(x), save.outcome) == drawn:
            continue
        drawn = (float(round(x)), save.outcome)
        took = "" if save.seconds is None else f" in {duration(save.seconds)}"
        waited = save.stall is not None and save.seconds is not None and save.stall < save.seconds
        took += f", of which training waited {duration(save.stall or 0.0)}" if waited else ""
        size = "" if save.bytes is None else f", {file_size(save.bytes)}"
        words = {
            "durable": f"step {save.step} saved{took}{size}, {moment(save.time)}",
            "failed": f"save of step {save.step} failed: {save.error or 'no reason recorded'}",
        }.get(save.outcome, f"save of step {save.step} begun, end not recorded")
        width = max(2.0, scale(save.time) - x)
        box = markup("rect", x=x, y=_SAVES_TOP, width=width, height=_SAVES_BOTTOM - _SAVES_TOP)
        boxes = [box]
        if waited:
            # The whole way to the disk in pale, and the part of it in which training stood still.
            stood = max(2.0, scale(save.requested + (save.stall or 0.0)) - x)
            boxes = [
                markup("rect", x=x, y=_SAVES_TOP, width=width, height=_SAVES_BOTTOM - _SAVES_TOP, class_="behind"),
                markup("rect", x=x, y=_SAVES_TOP, width=min(width, stood), height=_SAVES_BOTTOM - _SAVES_TOP),
            ]
        parts.append(markup("g", markup("title", words), *boxes, class_=f"save {save.outcome}"))
        label, middle = str(save.step), x + width / 2
        if middle - text_width(label, 9) / 2 >= free:
            parts.append(_label(label, middle, _SAVES_BOTTOM + 10, "note"))
            free = middle + text_width(label, 9) / 2 + 5
    return parts


def _validation_marks(validations: Iterable[Validation], scale: TimeScale) -> list[Markup]:
    parts: list[Markup] = []
    drawn = -1
    for validation in validations:
        x = scale(validation.time)
        if round(x) == drawn:
            continue
        drawn = round(x)
        values = ", ".join(f"{name} {value:.4g}" for name, value in sorted(validation.metrics.items())[:3])
        words = f"validation after step {validation.step}{values and ': ' + values}"
        diamond = f"M{x:.1f} {_VALIDATIONS - 5:g}l5 5l-5 5l-5 -5z"
        parts.append(markup("path", markup("title", words), d=diamond, class_="validation"))
    return parts


def _resumes(sessions: Iterable[Session], scale: TimeScale) -> list[Markup]:
    marks = []
    for session in sessions:
        resume = session.resume
        if resume is None or (resume.from_step is None and session.index == 0):
            continue
        words = "starts over" if resume.from_step is None else f"resumes from step {resume.from_step}"
        if session.world_size is not None and resume.saved_world_size not in (None, session.world_size):
            words += f" on {counted(session.world_size, 'rank')}"
        marks.append((scale(resume.time), words, f"{words}, {moment(resume.time)}"))
    return _marks([(*mark, "resume", f"M{{x}} {_AXIS:g}l-4 7h8z") for mark in marks], _RESUME_LABELS, "start")


def _stalls(history: RunHistory, scale: TimeScale) -> list[Markup]:
    """Over the bar of its session, a phase that hung, from its begin to its end or that of the session."""
    parts = []
    for stall in history.stalls:
        begun = stall.time - (stall.limit or 0.0)
        end = history.sessions[stall.session].last if stall.over is None else begun + stall.over
        x = scale(begun)
        took = "did not end" if stall.over is None else f"took {duration(stall.over)}"
        who = f"; told by {named_ranks(stall.ranks)}" if stall.ranks else ""
        words = f"stall: {stall.where} {took}{who}, {moment(begun)}"
        height = (_BARS_BOTTOM - _BARS_TOP) / 3
        width = max(3.0, scale(end) - x)
        box = markup("rect", x=x, y=_BARS_BOTTOM - height, width=width, height=height)
        parts.append(markup("g", markup("title", words), box, class_="stall"))
    return parts


def _ends(history: RunHistory, scale: TimeScale) -> list[Markup]:
    """Kills, and what else ended a session before the run was done."""
    cross = f"M{{x}} {_BARS_MIDDLE - 4:g}m-4 0l8 8m0 -8l-8 8"
    square = f"M{{x}} {_BARS_MIDDLE:g}m-4 -4h8v8h-8z"
    marks = []
    for kill in history.kills:
        words = "killed" if kill.last_step is None else f"killed after step {kill.last_step}"
        lost = f", {counted(kill.lost_steps, 'step')} lost" if kill.lost_steps else ", nothing lost"
        told = f"{words}{lost}; last sign of life {moment(kill.time)}"
        marks.append((scale(kill.time), words + lost, told, "kill", cross))
    for session in history.sessions:
        if session.end is not None and session.end not in ("done", "killed"):
            error = f": {session.error}" if session.error else ""
            told = f"{session.ended}{error}; {moment(session.last)}"
            kind = "fault" if session.end == "error" else "stop"
            marks.append((scale(session.last), _end_label(session), told, kind, square))
    return _marks(sorted(marks), _KILL_LABELS, "end")


def _end_label(session: Session) -> str:
    """In a few words, since kills are told in the same row."""
    short = {"signal": session.signal or "a signal", "resize": "machines came", "error": "an error"}
    saved = f", saved step {session.stopped_at}" if session.saved and session.end != "resize" else ""
    return short.get(session.end or "", session.end or "") + saved


def _marks(marks: Iterable[tuple[float, str, str, str, str]], y: float, anchor: str) -> list[Markup]:
    """Vertical lines at x, each with its label, words on hover, class and symbol; the label stands in the row at `y`
    where there is room.

    With the anchor `end` the label ends at its line, with `start` it begins there: that of a kill and that of the
    resume after it then lie on either side of the pause. At an edge it is pushed inside, over its own line.
    """
    marks = list(marks)
    if len(marks) > _MOST_LINES:
        return _crowded(marks)
    marks = list({round(mark[0]): mark for mark in reversed(marks)}.values())[::-1]
    room = _room([(mark[0], mark[1], mark[3]) for mark in marks], anchor)
    parts: list[Markup] = []
    for (x, label, words, kind, symbol), left in zip(marks, room, strict=True):
        inside = [
            markup("title", words),
            markup("line", x1=x, x2=x, y1=y - 9, y2=_AXIS, class_="mark"),
            markup("path", d=symbol.format(x=f"{x:.1f}"), class_="symbol"),
        ]
        if left is not None:
            at = left + _label_width(label) - 5 if anchor == "end" else left
            inside.append(markup("text", label, x=at, y=y, class_="said", text_anchor=anchor))
        parts.append(markup("g", joined(inside), class_=kind))
    return parts


def _room(labels: Sequence[tuple[float, str, str]], anchor: str) -> list[float | None]:
    """Where each label begins, None for one that finds no room; kills choose first."""
    places: list[float | None] = [None] * len(labels)
    taken: list[tuple[float, float]] = []
    for number in sorted(range(len(labels)), key=lambda number: labels[number][2] != "kill"):
        x, label, _ = labels[number]
        width = _label_width(label)
        left = min(max(x - width if anchor == "end" else x + 5, 0.0), WIDTH - width)
        if all(left >= end + 8 or left + width + 8 <= start for start, end in taken):
            places[number] = left
            taken.append((left, left + width))
    return places


def _label_width(label: str) -> float:
    return text_width(label) * _BOLD + 5


def _crowded(marks: Iterable[tuple[float, str, str, str, str]]) -> list[Markup]:
    places = {round(x): (x, words, kind) for x, _, words, kind, _ in marks}
    return [
        markup(
            "g",
            markup("title", words),
            markup("line", x1=x, x2=x, y1=_BARS_TOP - 6, y2=_BARS_TOP + 6, class_="mark"),
            class_=f"{kind} crowded",
        )
        for x, words, kind in places.values()
    ]


def _label(words: str, x: float, y: float, class_: str = "tick") -> Markup:
    return markup("text", words, x=x, y=y, class_=class_, text_anchor="middle")
