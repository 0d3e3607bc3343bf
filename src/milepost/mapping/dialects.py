"""Whose names a checkpoint speaks. Most speak Hugging Face's, and then no table of the others is imported."""

from __future__ import annotations

import re

from milepost.index import TensorIndex
from milepost.mapping.moments import split

MEGATRON = "megatron"
"""The layout whose names are Megatron's, whatever they are."""
_MEGATRON_FIRST = ("decoder.layers.", "embedding.word_embeddings.")
TITAN_FIRST = "tok_embeddings.weight"
_TITAN_BLOCK = re.compile(r"layers\.\d+\.(?:attention\.(?:qkv_linear\.)?w|feed_forward\.w\d\.|moe\.)")


def speaks_megatron(index: TensorIndex) -> bool:
    """Whether the names are Megatron's."""
    return index.layout == MEGATRON or any(split(name)[0].startswith(_MEGATRON_FIRST) for name in index)


def speaks_titan(index: TensorIndex) -> bool:
    """Whether the names are torchtitan's own."""
    return TITAN_FIRST in index and any(_TITAN_BLOCK.match(name) for name in index)
