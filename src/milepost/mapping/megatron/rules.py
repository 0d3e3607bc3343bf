"""The words in which Megatron's tensors of a model family are written down, readable in both directions.

A rule is one tensor of Megatron, the tensors of Hugging Face that it holds, how it holds them, and how tensor
parallelism cuts it:

    Rule("decoder.layers.{layer}.mlp.linear_fc1.weight",
         ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"), Gated(), ROWS)

`{layer}` and `{expert}` count over the whole model. A form takes a whole tensor apart (`apart`) and makes it of its
parts (`together`), the exact inverse. That a tensor is not cut is said as well: there is no default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from milepost.edits import concat, narrow
from milepost.errors import MismatchError
from milepost.index import TensorEntry
from milepost.mapping.rules import Settings


class Form(Protocol):
    """How a tensor of Megatron holds tensors of Hugging Face."""

    def apart(self, entry: TensorEntry, settings: Settings) -> tuple[TensorEntry, ...]:
        """The parts of a whole tensor. MismatchError where it does not have the sizes that the config gives it."""

    def together(self, parts: Sequence[TensorEntry], settings: Settings) -> TensorEntry:
        """The whole tensor of its parts."""


@dataclass(frozen=True, slots=True)
class Same:
    """One tensor, as it is."""

    def apart(self, entry: TensorEntry, settings: Settings) -> tuple[TensorEntry, ...]:
        """The tensor."""
        return (entry,)

    def together(self, parts: Sequence[TensorEntry], settings: Settings) -> TensorEntry:
        """The tensor."""
        return parts[0]


@dataclass(frozen=True, slots=True)
class Padded:
    """One tensor with rows after the last one that mean nothing: Megatron fills up the vocabulary so that it divides.

    key:  config key with the number of rows that mean something

    Rows that no file holds cannot be put on, so `together` gives the tensor without them; Megatron's loader adds them.
    """

    key: str

    def apart(self, entry: TensorEntry, settings: Settings) -> tuple[TensorEntry, ...]:
        """The rows that mean something."""
        return (narrow(entry, 0, 0, settings[self.key]),)

    def together(self, parts: Sequence[TensorEntry], settings: Settings) -> TensorEntry:
        """The tensor without padding."""
        return parts[0]


@dataclass(frozen=True, slots=True)
class Gated:
    """Two of one shape, one below the other: of a gated layer first what goes through the activation, then the rest."""

    def apart(self, entry: TensorEntry, settings: Settings) -> tuple[TensorEntry, ...]:
        """Upper and lower half."""
        rows, rest = divmod(entry.shape[0], 2)
        if rest:
            raise MismatchError(f"{entry.shape[0]} rows are no two halves")
        return narrow(entry, 0, 0, rows), narrow(entry, 0, rows, rows)

    def together(self, parts: Sequence[TensorEntry], settings: Settings) -> TensorEntry:
        """One below the other."""
        return concat(parts, 0)


@dataclass(frozen=True, slots=True)
class QueryGroups:
    """Queries, keys and values: for each group of heads the rows of its queries, then its key, then its value."""

    def apart(self, entry: TensorEntry, settings: Settings) -> tuple[TensorEntry, ...]:
        """All queries, all keys, all values."""
        groups, heads, size = self._sizes(settings)
        each = (heads + 2) * size
        if entry.shape[0] != groups * each:
            raise MismatchError(
                f"{entry.shape[0]} rows are not {groups} groups of {heads} queries, a key and a value of {size} rows "
                "each, as config.json describes"
            )
        rows = [narrow(entry, 0, group * each, each) for group in range(groups)]
        places = ((0, heads), (heads, 1), (heads + 1, 1))
        q, k, v = (concat([narrow(row, 0, at * size, count * size) for row in rows], 0) for at, count in places)
        return q, k, v

    def together(self, parts: Sequence[TensorEntry], settings: Settings) -> TensorEntry:
        """Group by group."""
        groups, heads, size = self._sizes(settings)
        pieces = [
            narrow(part, 0, group * count * size, count * size)
            for group in range(groups)
            for part, count in zip(parts, (heads, 1, 1), strict=True)
        ]
        return concat(pieces, 0)

    def _sizes(self, settings: Settings) -> tuple[int, int, int]:
        heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
        if heads % groups:
            raise MismatchError(f"config.json has {heads} heads and {groups} key/value heads, which do not divide")
        return groups, heads // groups, settings["head_dim"]


@dataclass(frozen=True, slots=True)
class Cut:
    """How tensor parallelism cuts a tensor.

    dim:       the dimension; None: every rank holds all of it
    or_whole:  writers differ, and a rank may as well hold all of it; the sizes in the config tell which
    """

    dim: int | None
    or_whole: bool = False


REPLICATED = Cut(None)
ROWS = Cut(0)
COLUMNS = Cut(1)
ROWS_OR_WHOLE = Cut(0, or_whole=True)
COLUMNS_OR_WHOLE = Cut(1, or_whole=True)


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor of Megatron, or one of every layer or expert.

    name:         its name in Megatron, in the spelling of `spelling.canonical`
    huggingface:  the tensors of Hugging Face that it holds
    form:         how it holds them
    cut:          how tensor parallelism cuts it
    """

    name: str
    huggingface: tuple[str, ...]
    form: Form
    cut: Cut


def one(name: str, huggingface: str, cut: Cut, form: Form | None = None) -> tuple[Rule, ...]:
    """A tensor that is one in both."""
    return (Rule(name, (huggingface,), Same() if form is None else form, cut),)
