"""Names of parts: what one tensor-parallel rank holds of a tensor, where no file says how it was cut.

Classic Megatron files hold pieces and do not say along which dimension, or whether at all, a tensor was cut. That is
known to whoever knows what the name means, which is the mapping's business and not a layout's. So an index of such
files has an entry for each piece, under the tensor's name with the rank's place behind it,

    decoder.layers.3.mlp.linear_fc1.weight@tp1

and `milepost.mapping.megatron` joins them. Without tensor parallelism names have no mark. Everything that the files
themselves tell is settled before: layers and experts are counted over the whole model (`numbers`), and what
several ranks hold alike is there once (`classic`).
"""

from __future__ import annotations

import re

from milepost.index import OPTIMIZER_PREFIX, moment_name

_PART = re.compile(r"(.+)@tp(\d+)", re.DOTALL)


def part_name(name: str, tp: int) -> str:
    """The entry that is the piece of tensor-parallel rank `tp`. In a moment's name it stands behind the weight."""
    if name.startswith(OPTIMIZER_PREFIX):
        weight, _, moment = name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
        return moment_name(part_name(weight, tp), moment)
    return f"{name}@tp{tp}"


def split_part(name: str) -> tuple[str, int | None]:
    """A name without its mark, and the tensor-parallel rank that the mark names; None where it has none."""
    match = _PART.fullmatch(name)
    return (name, None) if match is None else (match[1], int(match[2]))
