"""What a run says on the console."""

from __future__ import annotations

import io

from rich.console import Console

from milepost.trainer.logging import ConsoleLogger, warm_start_bar


def metrics(reward: float) -> dict[str, float]:
    return {"critic/score/mean": reward, "response_length/mean": 3.0, "timing_s/step": 0.5}


def logged(total: int, first: int, *, terminal: bool, rewards: tuple[float, ...] = ()) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    logger = ConsoleLogger(total, first, rewards, console)
    logger.validation(first - 1, {"val/test_score/additions": 0.5, "val/response_length/mean": 2.0})
    for step in range(first, total + 1):
        logger.step(step, metrics(step / total))
    logger.close()
    return out.getvalue()


def test_without_a_terminal_a_run_is_about_twenty_plain_lines_whatever_its_length() -> None:
    lines = logged(1000, 1, terminal=False).splitlines()
    steps = [int(line.split()[1].partition("/")[0]) for line in lines if "reward 0." in line or "reward 1." in line]
    assert steps == list(range(50, 1001, 50))
    assert lines[0] == "step 0/1000  held out: test_score/additions 0.500"
    assert lines[1] == "step 50/1000  reward 0.050  response 3.0 tokens  0.50 s"
    assert lines[-1].startswith("reward ▁") and lines[-1].endswith("█ 1.000")
    assert "\x1b" not in "".join(lines)


def test_a_short_run_has_a_line_for_each_step_and_always_for_the_last() -> None:
    assert [line.split()[1] for line in logged(7, 5, terminal=False).splitlines()[1:-1]] == ["5/7", "6/7", "7/7"]


def test_on_a_terminal_there_is_a_bar_with_the_curve_of_all_sessions() -> None:
    shown = logged(4, 3, terminal=True, rewards=(0.0, 0.25))
    assert "4/4" in shown and "▁▃▇█" in shown


def test_making_the_base_model_is_told_once_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    with warm_start_bar(Console(file=out)) as show:
        for done in (1, 2, 3):
            show(done, 3)
    assert out.getvalue() == "making the base model: 3 supervised steps\n"
