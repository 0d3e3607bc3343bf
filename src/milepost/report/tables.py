"""The facts at the head of the report, and its tables: starts, and steps on disk."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from milepost.checkpoint.diary.facts import RunHistory, Session
from milepost.checkpoint.diary.goodput import goodput
from milepost.checkpoint.diary.status import StepsOnDisk, numbers
from milepost.report.svg import Markup, joined, markup
from milepost.wording import counted, duration, file_size, moment

_MOST_ROWS = 100


def headline(history: RunHistory, on_disk: StepsOnDisk) -> Markup:
    """What a researcher wants to know first, each fact with its number and half a sentence."""
    facts = [_reward_fact(history), _steps_fact(history), _newest_fact(on_disk)]
    if history.sessions:
        facts += [_world_fact(history), _kills_fact(history), _time_fact(history), _goodput_fact(history)]
    cells = [
        markup("div", markup("dt", name), markup("dd", markup("b", value), markup("span", words)))
        for name, value, words in (fact for fact in facts if fact is not None)
    ]
    return markup("dl", *cells, class_="facts") if cells else Markup("")


def _reward_fact(history: RunHistory) -> tuple[str, str, str] | None:
    found = [
        (record.step, record.reward)
        for record in history.kept_steps
        if record.reward is not None and math.isfinite(record.reward)
    ]
    if not found:
        return None
    best_step, best = max(found, key=lambda pair: (pair[1], -pair[0]))
    value = f"{found[0][1]:.3g} → {found[-1][1]:.3g}" if len(found) > 1 else f"{found[0][1]:.3g}"
    return "Mean reward, first to last step", value, f"best {best:.3g} at step {best_step}"


def _steps_fact(history: RunHistory) -> tuple[str, str, str] | None:
    kept = history.kept_steps
    if not kept:
        return ("Steps done", "0", "no step has been finished yet") if history.sessions else None
    again = len(history.lost_steps)
    more = f"{counted(again, 'step')} trained more than once" if again else "none trained twice"
    return "Steps done", f"{kept[-1].step:,}", more


def _newest_fact(on_disk: StepsOnDisk) -> tuple[str, str, str]:
    newest = on_disk.newest
    if newest is None:
        words = "no step on disk is whole" if on_disk.looked_into else "nothing saved yet"
        return "Newest whole step", "none", words
    state = "whole" if newest.state == "committed" else "complete, of another program"
    return "Newest whole step", f"step {newest.step:,}", f"{state}, {file_size(newest.bytes)}"


def _world_fact(history: RunHistory) -> tuple[str, str, str]:
    sizes = [str(size) for size in history.world_sizes]
    shown = " → ".join(sizes[:4] if len(sizes) <= 4 else [*sizes[:2], "…", sizes[-1]]) or "not recorded"
    engines = sorted({session.engine for session in history.sessions if session.engine})
    return "World size", shown, f"ranks{', ' + ', '.join(engines) if engines else ''}"


def _kills_fact(history: RunHistory) -> tuple[str, str, str]:
    resumed = sum(1 for session in history.sessions if session.resume and session.resume.from_step is not None)
    lost = sum(kill.lost_steps for kill in history.kills)
    words = f"{counted(lost, 'step')} lost, {counted(resumed, 'resume')}"
    return "Kills", f"{len(history.kills):,}", words


def _time_fact(history: RunHistory) -> tuple[str, str, str]:
    lost, down = history.redone_seconds, history.down_seconds
    if not history.kills and not lost:
        return "Time trained", duration(history.trained_seconds), "nothing lost"
    words = f"lost {duration(lost + down)}: {duration(down)} down, {duration(lost)} done again"
    return "Time trained", duration(history.trained_seconds), words


def _goodput_fact(history: RunHistory) -> tuple[str, str, str] | None:
    spent = goodput(history)
    if spent is None:
        return None
    failed = sum(save.outcome == "failed" for save in history.saves)
    faults = [
        counted(count, noun) for count, noun in ((failed, "failed save"), (len(history.stalls), "stall")) if count
    ]
    words = f"of {duration(spent.total)} was training"
    return "Goodput", f"{spent.share:.0%}", f"{words}{', ' + ', '.join(faults) if faults else ''}"


def starts_table(history: RunHistory) -> Markup:
    """Every start: what it took, what it could not take and why, and how it ended."""
    lost = {kill.session: kill.lost_steps for kill in history.kills}
    rows = [
        markup(
            "tr",
            markup("td", str(session.index + 1), class_="n"),
            markup("td", moment(session.start)),
            markup("td", "" if session.world_size is None else str(session.world_size), class_="n"),
            markup("td", *_origin(session)),
            markup("td", *_parts(session)),
            markup("td", _trained(session)),
            markup("td", *_end(session, lost.get(session.index, 0))),
        )
        for session in history.sessions[-_MOST_ROWS:]
    ]
    head = ("#", "Started", "Ranks", "From", "State", "Steps", "End")
    return _table(head, {0, 2}, rows, len(history.sessions), "start")


def _origin(session: Session) -> list[Markup]:
    resume = session.resume
    if resume is None:
        return [markup("p", "not recorded", class_="soft")]
    if resume.from_step is None:
        lines = [markup("p", "fresh start")]
    else:
        lines = [markup("p", f"step {resume.from_step}")]
        if resume.saved_world_size not in (None, session.world_size):
            lines.append(markup("p", f"saved by {counted(resume.saved_world_size or 0, 'rank')}", class_="soft"))
    for step in resume.skipped:
        words = f"not {Path(step.folder).name}{step.why and ': ' + step.why}"
        lines.append(markup("p", words, class_="warn"))
    lines += [markup("p", note, class_="soft") for note in resume.notes]
    return lines


def _parts(session: Session) -> list[Markup]:
    parts = session.resume.parts if session.resume is not None else ()
    lines = []
    for state, colour in (("restored", "good"), ("fresh", "warn"), ("skipped", "warn")):
        plain = [part.name for part in parts if part.state == state and not part.why]
        if plain:
            lines.append(markup("p", markup("b", f"{state} ", class_=colour), ", ".join(plain)))
        for part in parts:
            if part.state == state and part.why:
                lines.append(markup("p", markup("b", f"{state} ", class_=colour), f"{part.name}: {part.why}"))
    known = ("restored", "fresh", "skipped")
    lines += [markup("p", f"{part.state} {part.name}") for part in parts if part.state not in known]
    return lines


def _trained(session: Session) -> str:
    if session.first_step is None:
        return "none"
    return f"{session.first_step}" + (f"-{session.last_step}" if session.last_step != session.first_step else "")


def _end(session: Session, lost: int) -> list[Markup]:
    if session.end == "killed":
        words = f"killed, {counted(lost, 'step')} lost" if lost else "killed, nothing lost"
        return [markup("p", words, class_="bad"), markup("p", f"last sign {moment(session.last)}", class_="soft")]
    if session.end is None:
        lines = [markup("p", "no stop recorded", class_="warn")]
    else:
        colour = {"done": "good", "error": "bad"}.get(session.end)
        lines = [markup("p", session.ended, class_=colour)]
    if session.error is not None:
        lines.append(markup("p", session.error))
    return [*lines, markup("p", moment(session.last), class_="soft")]


def steps_table(history: RunHistory, on_disk: StepsOnDisk) -> Markup:
    """The steps on disk that were looked into, newest first, and how many others there are."""
    reward = {record.step: record.reward for record in history.kept_steps}
    seconds = {save.step: save.seconds for save in history.saves if save.outcome == "durable"}
    rows = []
    for step in list(reversed(on_disk.looked_into))[:_MOST_ROWS]:
        value, took = reward.get(step.step), seconds.get(step.step)
        state = markup("p", step.state, class_={"committed": "good", "foreign": "good"}.get(step.state, "bad"))
        rows.append(
            markup(
                "tr",
                markup("td", f"{step.step:,}", class_="n"),
                markup("td", step.folder),
                markup("td", state, markup("p", step.why, class_="soft") if step.why else None),
                markup("td", ", ".join(step.roles)),
                markup("td", "" if step.world_size is None else str(step.world_size), class_="n"),
                markup("td", file_size(step.bytes), class_="n"),
                markup("td", "" if step.created is None else moment(step.created)),
                markup("td", "" if took is None else duration(took), class_="n"),
                markup("td", "" if value is None else f"{value:.4g}", class_="n"),
            )
        )
    head = ("Step", "Folder", "State", "Roles", "Ranks", "Size", "Saved", "Write time", "Reward")
    table = _table(head, {0, 4, 5, 7, 8}, rows, len(on_disk.looked_into), "step")
    if not on_disk.listed:
        return table
    older = markup("p", f"Older, not looked into: steps {numbers(on_disk.listed)}.", class_="soft")
    return joined([table, older])


def _table(head: Sequence[str], numeric: set[int], rows: Sequence[Markup], total: int, noun: str) -> Markup:
    names = [
        markup("th", name, class_="n" if column in numeric else None, scope="col") for column, name in enumerate(head)
    ]
    table = markup("table", markup("thead", markup("tr", *names)), markup("tbody", *rows))
    left_out = total - len(rows)
    note = [markup("p", f"{counted(left_out, 'older ' + noun)} not shown.", class_="soft")] if left_out else []
    return joined([markup("div", table, class_="table"), *note])
