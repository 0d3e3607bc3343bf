"""What the calls of all verbs have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, Self, TypeVar

from milepost.jobs.prepare import ModelOptions
from milepost.settings import BACKEND, ROLE, made, setting

AnyPath = str | PathLike[str]
AnyCall = TypeVar("AnyCall", bound="Call")


@dataclass(frozen=True)
class Call(ModelOptions):
    """What every call may be told: what is meant inside a directory, and how it is to be read."""

    backend: str = setting("auto", BACKEND)
    role: str | None = setting(None, ROLE)

    def of_part(self, part: str | None) -> Self:
        """The same of one part of a state dict."""
        return replace(self, part=part) if part else self


def call_of(kind: type[AnyCall], model: ModelOptions | None, settings: dict[str, Any]) -> AnyCall:
    """A call from settings of the model, as one object, and settings by name, which have the last word."""
    said = {} if model is None else {f.name: getattr(model, f.name) for f in fields(ModelOptions)}
    part = said.pop("part", None)
    return made(kind, said | settings).of_part(part)
