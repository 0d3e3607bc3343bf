"""Masters: an optimizer's own float32 copies of weights that a model computes with in 16 bits.

The copy of highest precision is the weight. Where training goes on, it is therefore the master that is loaded, whoever
trains; a merge, which others read, takes the model's own weights (`mapping.megatron.names.remarks` says so).
"""

from __future__ import annotations

from milepost.index import TensorIndex
from milepost.mapping.moments import split

MASTER = "param"
"""The moment that is no moment."""


def with_masters(index: TensorIndex) -> TensorIndex:
    """The index with each weight's master in its place, where it has one, and no other."""
    found = {weight: entry for name, entry in index.items() for weight, moment in [split(name)] if moment == MASTER}
    if not found:
        return index
    entries = {name: entry for name, entry in index.entries.items() if split(name)[1] != MASTER}
    fitting = {n: master for n, master in found.items() if n in entries and entries[n].shape == master.shape}
    return index.with_entries(entries | fitting)
