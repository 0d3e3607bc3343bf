"""The page: everything about a run in one file that needs no network, no script and no server.

The same run directory always gives the same page: nothing of the moment of rendering goes into it.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from milepost.checkpoint.diary.facts import RunHistory
from milepost.checkpoint.diary.goodput import goodput
from milepost.checkpoint.diary.history import read_history
from milepost.checkpoint.diary.status import StepsOnDisk, require_run, steps_on_disk
from milepost.errors import WriteError
from milepost.report.curves import Marks, Panel, draw_panel, marks_of, panels
from milepost.report.shares import shares
from milepost.report.style import STYLE
from milepost.report.svg import Markup, joined, markup
from milepost.report.tables import headline, starts_table, steps_table
from milepost.report.timeline import timeline
from milepost.wording import counted, disk_error, moment

REPORT = "report.html"
# The policy lets a browser load nothing at all, whatever stands in the page.
_META = Markup(
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
)


def render_report(run_dir: Path) -> str:
    """The page as text.

    Raises NotFoundError where there is no such directory, or no run in it.
    """
    require_run(run_dir)
    history = read_history(run_dir)
    on_disk = steps_on_disk(run_dir)
    name = run_dir.resolve().name
    head = markup("head", _META, markup("title", f"{name} · milepost report"), markup("style", Markup(STYLE)))
    main = markup(
        "main",
        markup("header", markup("h1", name), *_about(run_dir, history)),
        headline(history, on_disk),
        *_timeline_section(history),
        *_curve_sections(history),
        *_table_sections(history, on_disk),
    )
    return f"<!DOCTYPE html>\n{markup('html', head, markup('body', main), lang='en')}\n"


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Render the page into `output`, by default `report.html` in the run directory, and return where it is.

    A reader never sees half a page: it is written beside its place and then renamed.
    Raises NotFoundError as `render_report` does, WriteError where the place cannot be written.
    """
    page = render_report(run_dir)
    target = run_dir / REPORT if output is None else output
    try:
        # A rename would put a file in the place of a device or a pipe.
        if target.exists() and not target.is_file():
            raise WriteError(f"{target} is there and is no file. Name another place with --output")
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".report.", suffix=".tmp", dir=target.parent)
        temporary = Path(path)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
                file.write(page)
            # mkstemp makes files for their owner alone; a report is to be shown around.
            temporary.chmod(0o644)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        why = disk_error(error)
        raise WriteError(f"{target} cannot be written: {why}. Name another place with --output") from error
    return target


def _about(run_dir: Path, history: RunHistory) -> list[Markup]:
    lines = [markup("p", str(run_dir), class_="soft path")]
    if history.sessions:
        first, last = history.sessions[0], history.sessions[-1]
        end = "no stop recorded, last event" if last.end is None else last.ended
        run_id = next((session.run_id for session in history.sessions if session.run_id), None)
        words = f"Begun {moment(first.start)} · {end} {moment(last.last)}{f' · run {run_id}' if run_id else ''}"
        lines.append(markup("p", words, class_="soft"))
    else:
        lines.append(markup("p", "No events recorded: only what is on disk can be told.", class_="soft"))
    return lines


def _timeline_section(history: RunHistory) -> list[Markup]:
    if not history.sessions:
        return []
    caption = ["Wall time in UTC. The height of a bar tells its number of ranks."]
    if history.lost_steps:
        caption.append("Hatched: work that was lost and done again.")
    if history.validations:
        caption.append("Diamonds: validations.")
    if any(save.stall is not None and save.stall < (save.seconds or 0.0) for save in history.saves):
        caption.append("Pale saves: on their way to the disk while training went on.")
    if history.stalls:
        caption.append("Along the foot of a bar: a phase that hung.")
    caption.append("Hover for details.")
    drawing = markup("div", timeline(history), class_="scroll")
    sections = [markup("h2", "Timeline"), markup("figure", drawing, markup("figcaption", " ".join(caption)))]
    spent = goodput(history)
    if spent is not None:
        sections += [markup("h2", "Where the time went"), markup("figure", shares(spent))]
    return sections


def _curve_sections(history: RunHistory) -> list[Markup]:
    main, others, left_out = panels(history)
    if not main and not others:
        return []
    marks = marks_of(history)
    words = ["By step."]
    if marks.kills:
        words.append("Red dashes: the last step before a kill.")
    if marks.resumes:
        words.append("Green: the step resumed from.")
    if history.lost_steps:
        words.append("Dashed values: steps lost and done again.")
    sections = [markup("h2", "Curves"), markup("p", " ".join(words), class_="soft")]
    if main:
        sections.append(_figure("curve-0", main[0], marks, "first-curve", 1000, 260))
        sections.append(_grid("curve", main[1:], marks))
    if others:
        sections += [markup("h2", "Other metrics"), _grid("other", others, marks)]
    if left_out:
        sections.append(markup("p", f"{counted(left_out, 'more metric')} in events.jsonl.", class_="soft"))
    return sections


def _grid(prefix: str, drawn: Sequence[Panel], marks: Marks) -> Markup:
    figures = [_figure(f"{prefix}-{number}", panel, marks) for number, panel in enumerate(drawn, start=1)]
    return markup("div", *figures, class_="grid-of-curves")


def _figure(
    name: str, panel: Panel, marks: Marks, class_: str | None = None, width: float = 340, height: float = 176
) -> Markup:
    unit = markup("i", f" {panel.unit}") if panel.unit else None
    if len(panel.curves) > 1:
        latest = [
            joined([markup("i", class_=f"key c{index}"), f"{curve.label} {_last(panel, index)}"])
            for index, curve in enumerate(panel.curves)
        ]
    else:
        latest = [joined([_last(panel, 0)])]
    header = markup("header", markup("h3", panel.title, unit), markup("span", *latest))
    drawing = draw_panel(name, panel, marks, width, height)
    # A wide drawing is scrolled on a narrow screen, where its letters would be too small to read.
    return markup("figure", header, markup("div", drawing, class_="scroll") if class_ else drawing, class_=class_)


def _last(panel: Panel, index: int) -> str:
    finite = [value for _, value in panel.curves[index].kept if math.isfinite(value)]
    return f"{finite[-1]:.3g}" if finite else "not a number"


def _table_sections(history: RunHistory, on_disk: StepsOnDisk) -> list[Markup]:
    sections = []
    if history.sessions:
        sections += [markup("h2", "Starts and resumes"), starts_table(history)]
    sections.append(markup("h2", "Steps on disk"))
    none = markup("p", "None yet.", class_="soft")
    sections.append(steps_table(history, on_disk) if on_disk.looked_into else none)
    return sections
