"""Which steps stay: small policies, each a pure function of what the disk says of the steps, and their union.

    AnyOf((KeepLast(3), KeepEvery(100), KeepBest("val/reward"), Pinned())).keeps(steps)     # step -> why it stays

`decide` has the last word: a step of another program stays, and so do the newest step that is whole and what is newer.
Source of the shape: orbax's preservation policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from milepost.errors import ConfigError
from milepost.settings import setting

MODES = ("max", "min")


class Step(Protocol):
    """What the disk says of one step. A property may be read when first asked for: policies ask no more than needed."""

    @property
    def step(self) -> int:
        """Its number."""

    @property
    def own(self) -> bool:
        """Whether milepost wrote it: it has a manifest."""

    @property
    def whole(self) -> bool:
        """Whether training could go on from it."""

    @property
    def pinned(self) -> bool:
        """Whether somebody asked that it stays."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured when it was saved."""

    @property
    def has_export(self) -> bool:
        """Whether weights in Hugging Face's form lie in it, beside the role's own."""


class Policy(Protocol):
    """Says which steps stay."""

    def keeps(self, steps: Sequence[Step]) -> Mapping[int, str]:
        """From milepost's own steps in numeric order to the numbers of those that stay, and why each does."""


@dataclass(frozen=True)
class KeepLast:
    """The `count` newest whole steps.

    A damaged step saves no older one from being needed: it uses none of the budget, and goes only once it is older than
    all that stay.
    """

    count: int

    def __post_init__(self) -> None:
        _at_least_one("keep_last", self.count)

    def keeps(self, steps: Sequence[Step]) -> Mapping[int, str]:
        """See `Policy`."""
        kept: dict[int, str] = {}
        left = self.count
        for step in reversed(steps):
            if not left:
                break
            left -= step.whole
            among = f"one of the last {self.count}" if self.count > 1 else "the last"
            kept[step.step] = among if step.whole else f"not whole, but newer than {among}"
        return kept


@dataclass(frozen=True)
class KeepEvery:
    """The steps whose number is a multiple of `count`."""

    count: int

    def __post_init__(self) -> None:
        _at_least_one("keep_every", self.count)

    def keeps(self, steps: Sequence[Step]) -> Mapping[int, str]:
        """See `Policy`. Whether they are whole is not asked: there may be thousands."""
        return {step.step: f"a multiple of {self.count}" for step in steps if step.step % self.count == 0}


@dataclass(frozen=True)
class KeepBest:
    """The `count` whole steps with the best value of `metric`; of two that are equal the newer.

    A step without the metric is none of the best. Where no step has it (a misspelled name, a validation that has not
    run yet) all stay: what cannot be judged is not deleted.
    """

    metric: str
    count: int = 1
    mode: str = "max"

    def __post_init__(self) -> None:
        _at_least_one("keep_best_count", self.count)
        if self.mode not in MODES:
            raise ConfigError(f"keep_best_mode={self.mode}: choose from {', '.join(MODES)}")

    def keeps(self, steps: Sequence[Step]) -> Mapping[int, str]:
        """See `Policy`."""
        sign = 1 if self.mode == "max" else -1
        measured = [
            (sign * value, step) for step in steps if math.isfinite(value := step.metrics.get(self.metric, math.nan))
        ]
        if not measured:
            return {step.step: f"no step has the metric {self.metric}" for step in steps}
        kept: dict[int, str] = {}
        for value, step in sorted(measured, key=lambda one: (one[0], one[1].step), reverse=True):
            if step.whole:
                place = "the best" if self.count == 1 else f"one of the best {self.count}"
                kept[step.step] = f"{place} by {self.metric} ({sign * value:.4g})"
            if len(kept) == self.count:
                break
        return kept


@dataclass(frozen=True)
class Pinned:
    """The steps that somebody pinned."""

    def keeps(self, steps: Sequence[Step]) -> Mapping[int, str]:
        """See `Policy`."""
        return {step.step: "pinned" for step in steps if step.pinned}


@dataclass(frozen=True)
class AnyOf:
    """What any of several policies keeps; the reasons of all that do."""

    policies: tuple[Policy, ...]

    def keeps(self, steps: Sequence[Step]) -> Mapping[int, str]:
        """See `Policy`."""
        reasons: dict[int, list[str]] = {}
        for policy in self.policies:
            for step, why in policy.keeps(steps).items():
                reasons.setdefault(step, []).append(why)
        return {step: "; ".join(whys) for step, whys in reasons.items()}


@dataclass(frozen=True)
class Retention:
    """What a user says of the steps that stay; all None: all do.

    Exports have a budget of their own: a step stays without the weights in Hugging Face's form.
    """

    keep_last: int | None = setting(None, "So many of the newest whole steps stay.", metavar="N", least=1)
    keep_every: int | None = setting(None, "Steps whose number is a multiple of this stay.", metavar="N", least=1)
    keep_best: str | None = setting(None, "The step with the best value of this metric stays.", metavar="METRIC")
    keep_best_count: int = setting(1, "How many of the best stay.", metavar="N", least=1)
    keep_best_mode: str = setting("max", "What is best: max or min.")
    keep_exports: int | None = setting(
        None, "In so many of the newest steps the Hugging Face weights (hf_model) stay too.", metavar="N", least=0
    )

    def __post_init__(self) -> None:
        if self.keep_exports is not None and self.keep_exports < 0:
            raise ConfigError(f"keep_exports={self.keep_exports}: a number of steps is 0 or more")
        if self.keep_best is None:
            for name, default in (("keep_best_count", 1), ("keep_best_mode", "max")):
                if (value := getattr(self, name)) != default:
                    raise ConfigError(f"{name}={value} says nothing without keep_best: say by which metric")
        self.policy  # noqa: B018  it refuses what cannot be

    @property
    def policy(self) -> Policy | None:
        """Which steps stay; None: all."""
        made: list[Policy] = []
        if self.keep_last is not None:
            made.append(KeepLast(self.keep_last))
        if self.keep_every is not None:
            made.append(KeepEvery(self.keep_every))
        if self.keep_best is not None:
            made.append(KeepBest(self.keep_best, self.keep_best_count, self.keep_best_mode))
        return AnyOf((*made, Pinned())) if made else None

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever deleted."""
        return self.policy is None and self.keep_exports is None

    def __str__(self) -> str:
        said = []
        if self.keep_last is not None:
            said.append(f"the last {self.keep_last}" if self.keep_last > 1 else "the last")
        if self.keep_every is not None:
            said.append(f"every multiple of {self.keep_every}")
        if self.keep_best is not None:
            count = f" {self.keep_best_count}" if self.keep_best_count > 1 else ""
            said.append(f"the best{count} by {self.keep_best} ({self.keep_best_mode})")
        steps = ", ".join([*said, "what is pinned"]) if said else "all steps"
        exports = "" if self.keep_exports is None else f"; exports of the last {self.keep_exports}"
        return steps + exports

    def as_json(self) -> dict[str, Any]:
        """As the diary has it."""
        return asdict(self)

    @staticmethod
    def from_json(content: Any) -> Retention | None:
        """What `as_json` wrote; None where it is nothing of the kind."""
        try:
            return Retention(**content)
        except (TypeError, ConfigError):
            return None


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one step, and why."""

    step: int
    kept: bool
    why: str


def decide(steps: Iterable[Step], policy: Policy | None) -> tuple[Decision, ...]:
    """Say for every step whether it stays and why, in numeric order.

    Whatever the policy says: a step of another program stays; so does the newest own step that is whole, and all that
    are newer (they may be about to be looked at, or saved while this is read). Without a policy all do.
    """
    ordered = sorted(steps, key=lambda step: step.step)
    own = [step for step in ordered if step.own]
    reasons = {} if policy is None else policy.keeps(own)
    newest = None if policy is None else next((step.step for step in reversed(own) if step.whole), None)

    def verdict(step: Step) -> tuple[bool, str]:
        if not step.own:
            return True, "not written by milepost, which deletes only its own"
        if policy is None:
            return True, "all are kept"
        if step.step in reasons:
            return True, reasons[step.step]
        if newest is None:
            return True, "no step here is whole"
        if step.step >= newest:
            return True, "the newest that is whole" if step.step == newest else "newer than the newest that is whole"
        return False, "nothing keeps it"

    return tuple(Decision(step.step, *verdict(step)) for step in ordered)


def exports_to_drop(steps: Iterable[Step], count: int | None) -> tuple[int, ...]:
    """The steps, in numeric order, whose weights in Hugging Face's form go: all but those of the `count` newest whole
    steps that have them, and of pinned ones. None: none go."""
    if count is None:
        return ()
    having = [step for step in sorted(steps, key=lambda step: step.step) if step.own and step.has_export]
    whole = [step.step for step in having if step.whole]
    kept = set(whole[len(whole) - count :] if count else ())
    return tuple(step.step for step in having if step.whole and step.step not in kept and not step.pinned)


def _at_least_one(name: str, count: int) -> None:
    if count < 1:
        raise ConfigError(f"{name}={count}: at least one step must stay; leave it out to keep all")
