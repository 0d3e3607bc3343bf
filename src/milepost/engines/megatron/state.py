"""What a rank of Megatron holds, as boxes of Hugging Face's tensors: views of its parameters, under canonical names.

The same rules that read Megatron's files (`milepost.mapping.megatron`) are applied to memory. Each parameter is drawn
as an entry of an index: its tensor of the whole model, with one chunk for what this rank holds, whose source is the
parameter itself. Taking such an entry apart gives the boxes of q_proj, k_proj and v_proj that lie in a `linear_qkv`,
with offset and strides of each; so a box is a view, and what is written into it is in the parameter.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from milepost.engines.base import LiveTensor
from milepost.engines.megatron.updates import Part
from milepost.errors import MismatchError
from milepost.index import Box, ByteSource, Chunk, Shape, TensorEntry, contiguous_strides, itemsize
from milepost.layouts.flat_runs import boxes_of_run
from milepost.layouts.megatron.numbers import is_expert
from milepost.mapping import Config, expected
from milepost.mapping.megatron.families import VALUE_HEAD
from milepost.mapping.megatron.names import Model, model_of, pattern_of
from milepost.mapping.megatron.rules import Gated, Padded, Rule
from milepost.mapping.megatron.spelling import canonical

if TYPE_CHECKING:
    import torch

EXTRA_STATE = "_extra_state"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)(?=\.)")


@dataclass(frozen=True)
class View:
    """A box of a Hugging Face tensor inside of a parameter: where it begins, in elements, and its strides."""

    box: Box
    offset: int
    strides: Shape

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a parameter, or of a moment that is laid out like it."""
        return tensor.detach().as_strided(self.box.sizes, self.strides, tensor.storage_offset() + self.offset)

    def within(self, part: Part) -> Iterator[tuple[Box, torch.Tensor]]:
        """What a rank that holds a part of the parameter holds of the box: boxes of the Hugging Face tensor, each with
        a view of its place in the part."""
        sizes, dense = self.box.sizes, contiguous_strides(self.box.sizes)
        outer = next((n for n in range(len(sizes)) if self.strides[n:] == dense[n:]), len(sizes))
        for place in itertools.product(*map(range, sizes[:outer])):
            first = self.offset + sum(index * stride for index, stride in zip(place, self.strides, strict=False))
            inner = (1,) * outer + sizes[outer:]
            start, stop = max(first, part.start), min(first + math.prod(inner), part.stop)
            if start >= stop:
                continue
            run = part.values.view(-1)[start - part.start : stop - part.start]
            corner = tuple(a + b for a, b in zip(self.box.offsets, (*place, *(0,) * len(sizes)), strict=False))
            for box in boxes_of_run(inner, start - first, stop - start):
                offsets = tuple(a + b for a, b in zip(corner, box.offsets, strict=True))
                yield Box(offsets, box.sizes), run[: box.volume].view(box.sizes)
                run = run[box.volume :]


@dataclass(frozen=True)
class Held:
    """A Hugging Face tensor, and what this rank holds of it.

    parameter:  Megatron's name of the parameter that holds it, counted over the whole model; None: another rank's
    views:      in box order; none where the rank holds nothing of it
    """

    shape: Shape
    parameter: str | None
    views: tuple[View, ...]


def live_tensors(chunks: Sequence[Any], config: Config) -> dict[str, LiveTensor]:
    """The weights of this rank's model chunks under Hugging Face's names, each box a writable view of a parameter.

    Every name of the model is there, also those of other pipeline stages, with no boxes. Rows that pad the vocabulary
    are in no box. A tied output layer on a stage of its own is another copy of the embedding, under the same name.

    chunks:  GPTModel, one for each virtual stage; wrappers are looked through
    config:  the parsed config.json, true to the head that the model has

    Raises MismatchError where a parameter has no rule, or sizes that config.json does not give.
    """
    tensors = named_tensors(chunks, config)
    return show(held_tensors(tensors, config), tensors)


def show(held: Mapping[str, Held], tensors: Mapping[str, torch.Tensor]) -> dict[str, LiveTensor]:
    """Live tensors of what `held_tensors` found; `tensors` by the parameters' names, or others of the same layout."""
    usual = next((str(t.dtype).removeprefix("torch.") for t in tensors.values()), "float32")
    live = {}
    for name, place in held.items():
        tensor = None if place.parameter is None else tensors[place.parameter]
        dtype = usual if tensor is None else str(tensor.dtype).removeprefix("torch.")
        boxes = () if tensor is None else tuple((view.box, view.of(tensor)) for view in place.views)
        live[name] = LiveTensor(name, place.shape, dtype, boxes)
    return live


def show_parts(held: Mapping[str, Held], parts: Mapping[str, Part]) -> dict[str, LiveTensor]:
    """The same where a rank holds parts of the parameters; a whole one gives the same boxes."""
    usual = next((str(part.values.dtype).removeprefix("torch.") for part in parts.values()), "float32")
    live = {}
    for name, place in held.items():
        part = None if place.parameter is None else parts.get(place.parameter)
        boxes = () if part is None else tuple(found for view in place.views for found in view.within(part))
        live[name] = LiveTensor(name, place.shape, usual, tuple(sorted(boxes, key=lambda found: found[0].offsets)))
    return live


def named_tensors(chunks: Sequence[Any], config: Config) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of this rank, layers and experts counted over the whole model, in the names of
    local layers. `_extra_state` of Transformer Engine is none of them."""
    model = model_of(config)
    found: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        bare = unwrapped(chunk)
        for name, tensor in _own(bare):
            whole = canonical(global_name(bare, name), model.layers)
            found[_EXPERT.sub(_counted(model), whole)] = tensor
    return found


def global_name(chunk: Any, name: str) -> str:
    """The name of a chunk's tensor with its layer counted over the whole model."""
    match = _LAYER.match(name)
    if match is None:
        return name
    number: int = chunk.decoder.layers[int(match[1])].layer_number - 1
    return f"decoder.layers.{number}.{name[match.end() :]}"


def unwrapped(chunk: Any) -> Any:
    """The GPTModel inside of DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _own(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            whole = f"{prefix}.{name}" if prefix else name
            # `tokens_per_expert` counts what a router did since its bias was last moved: no state of the model.
            counts = name.endswith(("tokens_per_expert", EXTRA_STATE))
            if name not in module._non_persistent_buffers_set and not counts:
                yield whole, buffer


def _counted(model: Model) -> Any:
    from megatron.core import parallel_state  # noqa: PLC0415  this room is imported without Megatron

    each = model.experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * each
    return lambda match: f"{match[1]}{int(match[2]) + first}"


def held_tensors(tensors: Mapping[str, torch.Tensor], config: Config) -> dict[str, Held]:
    """Every tensor of the model in Hugging Face's files, and what this rank's `named_tensors` hold of it."""
    model = model_of(config)
    architecture = expected(config)
    if architecture is None:
        raise MismatchError(f"milepost does not know the class {config.get('architectures')} of config.json")
    found: dict[str, Held] = {}
    unknown = []
    for name, tensor in tensors.items():
        rule, layer, expert = _rule(name, model, is_value="score.weight" in architecture.tensors)
        if rule is None:
            unknown.append(name)
            continue
        entry = _drawn(name, rule, tensor, model.extent(rule, layer, expert))
        for theirs, part in zip(rule.huggingface, rule.form.apart(entry, model.settings), strict=True):
            own = theirs.format(layer=layer, expert=expert)
            own = architecture.tied.get(own, own)
            shape = architecture.tensors.get(own)
            if shape != part.shape:
                wanted = "no such tensor" if shape is None else f"shape {list(shape)}"
                raise MismatchError(
                    f"{name}: the model makes {own} of shape {list(part.shape)}, config.json asks for {wanted}"
                )
            if own not in found or not found[own].views:
                found[own] = Held(part.shape, name, _views(part))
    if unknown:
        raise MismatchError(f"no rule says what {', '.join(unknown[:8])} of the Megatron model are in Hugging Face's")
    return {name: found.get(name, Held(shape, None, ())) for name, shape in architecture.tensors.items()}


def _rule(name: str, model: Model, *, is_value: bool) -> tuple[Rule | None, int | None, int | None]:
    pattern, layer, expert = pattern_of(name)
    rule = VALUE_HEAD.get(pattern) if is_value else None
    return rule or model.rules.get(pattern), layer, expert


def _drawn(name: str, rule: Rule, tensor: torch.Tensor, extent: int | None) -> TensorEntry:
    """A parameter as an entry of the whole tensor with the chunks that this rank holds."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    local = tuple(tensor.shape)
    rank, ranks = _tensor_parallel(name)
    dim = rule.cut.dim
    if dim is None or ranks == 1 or (rule.cut.or_whole and local[dim] == extent):
        return TensorEntry(dtype, local, (Chunk(Box.whole(local), ByteSource(name, 0, contiguous_strides(local))),))
    whole = _with(local, dim, local[dim] * ranks)
    pieces = 2 if isinstance(rule.form, Gated) else 1
    size = local[dim] // pieces
    chunks = []
    for piece in range(pieces):
        offsets = _with((0,) * len(local), dim, (piece * ranks + rank) * size)
        strides = contiguous_strides(local)
        source = ByteSource(name, piece * size * strides[dim] * itemsize(dtype), strides)
        chunks.append(Chunk(Box(offsets, _with(local, dim, size)), source))
    return TensorEntry(dtype, whole, tuple(chunks))


def _tensor_parallel(name: str) -> tuple[int, int]:
    """This rank's place among those that a tensor is cut over; experts may be cut otherwise than the rest."""
    from megatron.core import parallel_state  # noqa: PLC0415

    if is_expert(name):
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _views(part: TensorEntry) -> tuple[View, ...]:
    size = itemsize(part.dtype)
    chunks = sorted((chunk for chunk in part.chunks if chunk.box.volume), key=lambda chunk: chunk.box.offsets)
    return tuple(View(chunk.box, chunk.source.start() // size, chunk.source.strides) for chunk in chunks)


def _with(values: Shape, position: int, value: int) -> Shape:
    return (*values[:position], value, *values[position + 1 :])


def cut_parameters(tensors: Mapping[str, torch.Tensor], config: Config) -> set[str]:
    """Parameters of which this rank holds a part; those of other names it holds whole."""
    model = model_of(config)
    is_value = "score.weight" in getattr(expected(config), "tensors", {})
    found = set()
    for name, tensor in tensors.items():
        rule, layer, expert = _rule(name, model, is_value=is_value)
        whole = tensor.shape if rule is None else _drawn(name, rule, tensor, model.extent(rule, layer, expert)).shape
        if whole != tensor.shape:
            found.add(name)
    return found


def padding(tensors: Mapping[str, torch.Tensor], config: Config) -> dict[str, int]:
    """Parameters of this rank that end in rows without meaning, and where in each these begin."""
    model = model_of(config)
    is_value = "score.weight" in getattr(expected(config), "tensors", {})
    found = {}
    for name, tensor in tensors.items():
        rule, _, _ = _rule(name, model, is_value=is_value)
        if rule is not None and isinstance(rule.form, Padded):
            rank, _ = _tensor_parallel(name)
            begin = max(0, model.settings[rule.form.key] - rank * tensor.shape[0])
            if begin < tensor.shape[0]:
                found[name] = begin
    return found
