"""ShardedTensors of a pickle as boxes: how FSDP1 without a device mesh writes its weights.

A ShardedTensor pickles its state as five things: the shards of its rank, each a tensor and the box that it is; metadata
with the boxes of all ranks; the ranks of the writer in its process group and in the run; a sharding spec, which says
the boxes once more; and a flag. FSDP1 cuts along dimension 0, with whole rows in each part, into the chunks of
`torch.chunk` over the sharding group; ranks beyond the last chunk hold no shard at all. A replica of another sharding
group (HSDP) has the same boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milepost.errors import DamagedError
from milepost.index import DTYPES, Box, Shape
from milepost.layouts.pickles import SHARDED_TENSOR, Record, TensorRef


@dataclass(frozen=True, slots=True)
class ShardedTensorRef:
    """One rank's shards of a ShardedTensor.

    shards:      the rank's tensors, and the box that each is; none where the rank has nothing of it
    rank:        number of the writer in the run
    group_rank:  its number among the `group_size` ranks that share the tensor
    """

    dtype: str
    shape: Shape
    shards: tuple[tuple[TensorRef, Box], ...]
    rank: int
    group_rank: int
    group_size: int


def sharded_tensor_ref(value: Any) -> ShardedTensorRef | None:
    """What a value of a state dict says of its boxes, or None where it is no ShardedTensor.

    Raises DamagedError where its parts are missing or contradict each other.
    """
    if not isinstance(value, Record) or value.kind != SHARDED_TENSOR:
        return None
    try:
        return _sharded_tensor_ref(value)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"a ShardedTensor that cannot be read ({type(error).__name__})") from None


def _sharded_tensor_ref(value: Record) -> ShardedTensorRef:
    local, metadata, group, _spec, _rrefs = value.state
    shape = _sizes(metadata.field("size"))
    dtype = metadata.field("tensor_properties").state[0]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedError("a ShardedTensor of an unknown type")
    boxes = [_box(shard) for shard in metadata.field("shards_metadata")]
    for box in boxes:
        if len(box.sizes) != len(shape) or (box.volume and box.intersect(Box.whole(shape)) != box):
            raise DamagedError(f"a ShardedTensor of shape {list(shape)} with a shard {box}")
    if sum(box.volume for box in boxes) != Box.whole(shape).volume:
        raise DamagedError(f"a ShardedTensor whose shards do not make up its shape {list(shape)}")
    return ShardedTensorRef(
        dtype,
        shape,
        tuple(_shard(record, dtype, set(boxes)) for record in local),
        int(group.field("global_rank")),
        int(group.field("local_rank")),
        int(group.field("local_world_size")),
    )


def _shard(record: Record, dtype: str, boxes: set[Box]) -> tuple[TensorRef, Box]:
    tensor, box = record.field("tensor"), _box(record.field("metadata"))
    if not isinstance(tensor, TensorRef):
        raise DamagedError("a shard without a tensor")
    if tensor.shape != box.sizes or tensor.dtype != dtype:
        raise DamagedError(
            f"a shard of {tensor.dtype}{list(tensor.shape)} where its metadata give {dtype}{list(box.sizes)}"
        )
    if box not in boxes:
        raise DamagedError(f"a shard {box} that the metadata of all ranks do not list")
    return tensor, box


def _box(metadata: Record) -> Box:
    offsets, sizes = _sizes(metadata.field("shard_offsets")), _sizes(metadata.field("shard_sizes"))
    if len(offsets) != len(sizes):
        raise DamagedError("a shard with offsets and sizes of different length")
    return Box(offsets, sizes)


def _sizes(values: Any) -> Shape:
    sizes = tuple(int(value) for value in values)
    if any(size < 0 for size in sizes):
        raise DamagedError("a negative size or offset")
    return sizes
