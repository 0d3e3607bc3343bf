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

    What may be cut otherwise than the rest, as experts are over expert-tensor-parallel ranks, may have fewer pieces
    than there are ranks. Ranks are numbered so that the pieces follow each other again and again.

    Raises IncompleteError where pieces are missing, MismatchError where copies differ or sizes do not fit.
    """
    dim = rule.cut.dim if any(part.shape for part in parts.values()) else None
    count = 1 if dim is None else ranks
    if dim is not None and rule.cut.or_whole and extent:
        sizes = {_extent(part, dim) for part in parts.values()}
        size = min(sizes)
        if len(sizes) == 1 and size and extent % size == 0 and ranks % (extent // size) == 0:
            count = extent // size
    missing = [rank for rank in range(ranks) if rank not in parts]
    held: dict[int, tuple[int, TensorEntry]] = {}
    for rank in sorted(parts):
        first, piece = held.setdefault(rank % count, (rank, parts[rank]))
        if first != rank:
            require_equal(f"{name} of rank {rank}", parts[rank], f"{name} of rank {first}", piece, _ONE)
    if missing and not (rule.cut.or_whole and len(held) == count):
        raise IncompleteError(
            f"{name}: its parts of tensor-parallel rank{'s' if len(missing) > 1 else ''} {ranges(missing)} are missing"
        )
    if dim is None or count == 1:
        return held[0][1]
    pieces = [held[number][1] for number in sorted(held)]
    if any(len(part.shape) <= dim for part in pieces):
        raise MismatchError(f"{name} has shape {list(pieces[0].shape)}, which has no dimension {dim}")
    if not isinstance(rule.form, Gated):
        return concat(pieces, dim)
    if any(part.shape[0] % 2 for part in pieces):
        raise MismatchError(f"{name} has parts of {pieces[0].shape[0]} rows, which are no two halves")
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
