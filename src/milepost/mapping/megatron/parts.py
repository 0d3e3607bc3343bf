"""Pieces of tensor-parallel ranks and the whole tensor: joined when classic files are read, cut when ranks load.

The piece of a gated layer is not one range of rows: each rank holds its rows of the upper half, then its rows of the
lower one.
"""

from __future__ import annotations

from collections.abc import Mapping

from milepost.edits import concat, narrow
from milepost.errors import IncompleteError, MismatchError
from milepost.index import TensorEntry
from milepost.mapping.equality import require_equal
from milepost.mapping.megatron.rules import Gated, Rule
from milepost.wording import ranges

_ONE = "tensor-parallel ranks hold it whole, so their copies are one tensor"


def join(name: str, rule: Rule, parts: Mapping[int, TensorEntry], ranks: int, extent: int | None) -> TensorEntry:
    """The whole tensor.

    parts:   tensor-parallel rank -> its piece
    ranks:   how many there are; experts alone may be on some of them only
    extent:  what the whole has along the dimension that is cut, as config.json tells it; None where it does not

    Raises IncompleteError where pieces are missing, MismatchError where copies differ or sizes do not fit.
    """
    dim = rule.cut.dim if any(part.shape for part in parts.values()) else None
    copies = dim is None or (rule.cut.or_whole and all(_extent(part, dim) == extent for part in parts.values()))
    missing = [rank for rank in range(ranks) if rank not in parts]
    if missing and not (copies and rule.cut.or_whole):
        raise IncompleteError(
            f"{name}: its parts of tensor-parallel rank{'s' if len(missing) > 1 else ''} {ranges(missing)} are missing"
        )
    (first, piece), *others = sorted(parts.items())
    if copies or dim is None:
        for rank, other in others:
            require_equal(f"{name} of rank {rank}", other, f"{name} of rank {first}", piece, _ONE)
        return piece
    pieces = [parts[rank] for rank in sorted(parts)]
    if any(len(part.shape) <= dim for part in pieces):
        raise MismatchError(f"{name} has shape {list(piece.shape)}, which has no dimension {dim}")
    if not isinstance(rule.form, Gated):
        return concat(pieces, dim)
    if any(part.shape[0] % 2 for part in pieces):
        raise MismatchError(f"{name} has parts of {piece.shape[0]} rows, which are no two halves")
    upper = [narrow(part, 0, 0, part.shape[0] // 2) for part in pieces]
    lower = [narrow(part, 0, part.shape[0] // 2, part.shape[0] // 2) for part in pieces]
    return concat([*upper, *lower], 0)


def cut(name: str, rule: Rule, entry: TensorEntry, rank: int, ranks: int) -> TensorEntry:
    """The piece of one of `ranks` tensor-parallel ranks: the inverse of `join`.

    Raises MismatchError where the tensor does not divide.
    """
    dim = rule.cut.dim
    if dim is None or ranks == 1:
        return entry
    halves = rule.form.apart(entry, {}) if isinstance(rule.form, Gated) else (entry,)
    pieces = []
    for half in halves:
        size, rest = divmod(_extent(half, dim), ranks)
        if rest:
            raise MismatchError(
                f"{name} has shape {list(entry.shape)}, which {ranks} tensor-parallel ranks do not divide"
            )
        pieces.append(narrow(half, dim, rank * size, size))
    return pieces[0] if len(pieces) == 1 else concat(pieces, 0)


def _extent(entry: TensorEntry, dim: int) -> int:
    return entry.shape[dim] if dim < len(entry.shape) else 0
