"""Where a run's metrics go besides `events.jsonl`: the console, TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from milepost.sparkline import sparkline

REWARD = "critic/score/mean"
VALIDATION = "val/"
TENSORBOARD_DIR = "tensorboard"
_PLAIN_LINES = 20  # about so many lines for a whole run, where there is no terminal
_PLAIN_SECONDS = 30.0  # and one at least so often
_CURVE_WIDTH = 30


class Logger(Protocol):
    """Takes in what a run measures; only rank 0 has any."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a finished step."""

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a validation after `step` (0: before the first)."""

    def saved(self, step: int, metrics: Mapping[str, float]) -> None:
        """The bytes and seconds of a save of `step`, which has become durable, perhaps some steps later."""

    def close(self) -> None:
        """The run is over, well or not."""


@contextmanager
def warm_start_bar(console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Shows how far the making of the base model has come; takes (steps done, steps in all)."""
    console = console or Console()
    with Progress(
        TextColumn("making the base model"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=None)

        def show(done: int, total: int) -> None:
            if done == 1 and not console.is_terminal:
                console.print(f"making the base model: {total} supervised steps", highlight=False)
            progress.update(task, completed=done, total=total)

        yield show


class TensorBoardLogger:
    """Curves for TensorBoard in `directory`.

    A restart appends to the same curves: points from `next_step` on, left by a session that went further than its last
    saved step, are purged.
    """

    def __init__(self, directory: Path, next_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  slow to import, and only rank 0 needs it

        purge = next_step if next_step > 1 else None
        self._writer = SummaryWriter(str(directory), purge_step=purge)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)

    def saved(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, metrics)

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # A process that is killed flushes nothing more.
        self._writer.flush()


class ConsoleLogger:
    """A progress bar with the curve of the reward on a terminal; elsewhere a plain line now and then.

    Args:
        total_steps: the last step of the run.
        next_step: the first step of this session.
        rewards: the rewards of the steps before, for the curve.
    """

    def __init__(
        self, total_steps: int, next_step: int, rewards: Sequence[float] = (), console: Console | None = None
    ) -> None:
        self._console = console or Console()
        self._total = total_steps
        self._rewards = list(rewards)
        self._last_line = (next_step - 1, time.monotonic())
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=next_step - 1, said="")
            self._progress.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rewards.append(metrics[REWARD])
        if self._progress is not None:
            said = f"reward {metrics[REWARD]:.3f} {sparkline(self._rewards, _CURVE_WIDTH)}"
            self._progress.update(self._task, completed=step, said=said)
        elif self._due(step):
            self._last_line = (step, time.monotonic())
            self._print(
                f"step {step}/{self._total}  reward {metrics[REWARD]:.3f}  "
                f"response {metrics['response_length/mean']:.1f} tokens  {metrics['timing_s/step']:.2f} s"
            )

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        said = "  ".join(
            f"{name.removeprefix(VALIDATION)} {value:.3f}" for name, value in metrics.items() if "/mean" not in name
        )
        self._print(f"step {step}/{self._total}  held out: {said}")

    def saved(self, step: int, metrics: Mapping[str, float]) -> None:
        """Not a line for each: the reward would be lost among them. The diary and TensorBoard have them."""

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        elif self._rewards:
            self._print(f"reward {sparkline(self._rewards, _CURVE_WIDTH)} {self._rewards[-1]:.3f}")

    def _due(self, step: int) -> bool:
        before, when = self._last_line
        return (
            step == self._total
            or step - before >= max(1, self._total // _PLAIN_LINES)
            or time.monotonic() - when >= _PLAIN_SECONDS
        )

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
