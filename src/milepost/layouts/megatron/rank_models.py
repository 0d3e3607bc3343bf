"""Which parameters each rank of a run had, in the order of its model, told from the weights of a dist checkpoint alone.

A dist checkpoint holds whole tensors in boxes, and each box is what one rank held of one tensor, one layer and one
expert: so the boxes tell how many tensor-parallel ranks there were and what each had. In which order a model has its
parameters is the order in which Megatron's modules make them; that differs with a few choices which no file tells
(`Order`), so there are several to try. Which layers a rank had is for `buckets` to find out.

    embedding | layers | final norm | layers that predict further tokens | output layer

Where layers are gated, a rank's `linear_fc1` is two boxes, its rows of the upper half and its rows of the lower one.
Source: megatron-core 0.16, `models/gpt/gpt_model.py`, `transformer/` (`transformer_layer`, `attention`,
`multi_latent_attention`, `mlp`, `moe/moe_layer`, `moe/experts`, `moe/shared_experts`, `multi_token_prediction`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from milepost.index import Box, Chunk, Shape, TensorEntry, contiguous_strides, itemsize, shifted
from milepost.layouts.flat_runs import boxes_of_run
from milepost.layouts.megatron.recovered import NO_PARAMETERS

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_FURTHER = re.compile(r"mtp\.layers\.(\d+)\.(.+)")
_INNER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias)(?:_[wv])?)")
_HALF = re.compile(r"(.+)_([wv])")
_FRONT = (EMBEDDING, "embedding.position_embeddings.weight")
_BACK = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")
_END = (OUTPUT, "output_layer.bias")

_ROUTED = "mlp.experts"

EACH, MATRICES, TURNED = "each", "matrices", "turned"
ALL, DENSE, EXPERTS = "all", "dense", "experts"
"""Parts of a model: experts that are dealt out to ranks have an optimizer of their own."""


@dataclass(frozen=True, slots=True)
class Order:
    """What of a model's order of parameters no file tells.

    fused:         the norm before attention is a part of the linear layer after it, as Transformer Engine has it
    latent_fused:  the norms inside of multi-latent attention are, too
    grouping:      `EACH`: one expert after the other; `MATRICES`: the first matrices of all, then the second ones;
                   `TURNED`: each of these as one parameter, in which the matrices lie turned (GroupedMLP)
    """

    fused: bool
    latent_fused: bool
    grouping: str


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a parameter, and the box of a weight that it is.

    name:    the weight
    chunk:   the weight's box, and its own bytes
    lead:    how many dimensions in front of it count layers and experts
    box:     where it lies in the parameter
    turned:  the last two dimensions are those of the weight, exchanged
    """

    name: str
    chunk: Chunk
    lead: int
    box: Box
    turned: bool = False

    def of_weight(self, part: Chunk) -> Chunk:
        """A part of the parameter inside of this region, as a part of the weight."""
        dims = len(self.chunk.box.sizes) - self.lead
        low = [a - b for a, b in zip(part.box.offsets, self.box.offsets, strict=True)][-dims:]
        sizes, strides = list(part.box.sizes[-dims:]), list(part.source.strides[-dims:])
        if self.turned:
            low, sizes, strides = low[::-1], sizes[::-1], strides[::-1]
        corner = self.chunk.box.offsets
        offsets = (*corner[: self.lead], *(a + b for a, b in zip(corner[self.lead :], low, strict=True)))
        box = Box(offsets, (1,) * self.lead + tuple(sizes))
        return Chunk(box, replace(part.source, strides=(1,) * self.lead + tuple(strides)))


@dataclass(frozen=True, slots=True)
class RankParameter:
    """A parameter of one rank: its shape, element type, and the boxes of weights that it is made of."""

    shape: Shape
    dtype: str
    regions: tuple[Region, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def parts(self, run: Chunk, start: int, dtype: str) -> Iterator[tuple[Region, Chunk]]:
        """What a run of the flattened parameter, from element `start` on, is of each of its regions, as a box of the
        weight."""
        at = 0
        for box in boxes_of_run(self.shape, start, run.box.sizes[0]):
            source = replace(
                run.source, offset=shifted(run.source, at * itemsize(dtype)), strides=contiguous_strides(box.sizes)
            )
            for region in self.regions:
                shared = box.intersect(region.box)
                if shared is not None:
                    yield region, region.of_weight(Chunk(box, source).narrow(shared, dtype))
            at += box.volume


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one rank held of a weight: the weight's name, its box, how many dimensions in front count."""

    name: str
    half: str
    chunk: Chunk
    lead: int

    @property
    def sizes(self) -> Shape:
        return self.chunk.box.sizes[self.lead :]


Key = tuple[int | None, int | None, str]
"""A layer's number, an expert's number, and the rest of the name; None where there is none."""


@dataclass(frozen=True)
class RankModels:
    """The pieces that all ranks held.

    pieces:   of which parameter -> of each tensor-parallel rank one or, of gated layers, two
    dtypes:   their element types
    further:  how many layers predict further tokens
    tp, etp:  tensor-parallel ranks, and those of experts
    """

    pieces: Mapping[Key, Sequence[_Piece]]
    dtypes: Mapping[Key, str]
    layers: int
    further: int
    experts: int
    tp: int
    etp: int
    _inside: Mapping[int | None, Sequence[Key]] = field(repr=False)

    def orders(self) -> list[Order]:
        """All that are possible, those of Transformer Engine first, with which most models are trained."""
        rests = {rest for _, _, rest in self.pieces}
        fused = (True, False) if any(r.startswith("self_attention.linear_qkv.") for r in rests) else (False,)
        latent = (True, False) if any(r.startswith("self_attention.linear_kv_up_proj.") for r in rests) else (False,)
        grouping = (MATRICES, EACH, TURNED) if self.experts else (EACH,)
        return [Order(*choice) for choice in itertools.product(fused, latent, grouping)]

    def ends(self, names: Sequence[str], tp: int) -> list[RankParameter]:
        """Those of these tensors that there are."""
        return [self._parameter((None, None, name), tp) for name in names if (None, None, name) in self.pieces]

    def front(self, tp: int) -> list[RankParameter]:
        """What a first stage begins with."""
        return self.ends(_FRONT, tp)

    def back(self, tp: int, *, copies: bool) -> list[RankParameter]:
        """What a last stage ends with, but for layers that predict further tokens.

        copies: the embedding lies on another stage, so where that is the output layer too, this one holds a copy
        """
        own = self.ends(_END, tp)
        return own or (self.ends(_FRONT[:1], tp) if copies else [])

    def final_norm(self, tp: int) -> list[RankParameter]:
        """What follows the last layer."""
        return self.ends(_BACK, tp)

    def layer(self, number: int, tp: int, order: Order, part: str, experts: range) -> list[RankParameter]:
        """A layer's parameters on one rank. Numbers below 0 are the layers that predict further tokens, from -1 down.

        part:     `ALL`, `DENSE` (all but the experts), or `EXPERTS` alone
        experts:  those that an expert-parallel rank holds
        """
        keys = self._inside.get(number, ())
        dense = sorted((_position(key[2], order), key) for key in keys if key[1] is None and part != EXPERTS)
        among = _position(_ROUTED, order)
        own = [key for key in keys if key[1] is not None and key[1] in experts and part != DENSE]
        return [
            *(self._parameter(key, tp) for position, key in dense if position < among),
            *self._experts(own, tp, order),
            *(self._parameter(key, tp) for position, key in dense if position > among),
        ]

    def _experts(self, keys: Sequence[Key], tp: int, order: Order) -> Iterator[RankParameter]:
        if order.grouping == EACH:
            for key in sorted(keys, key=lambda key: (key[1], key[2].replace("bias", "z"))):
                yield self._parameter(key, tp)
            return
        for rest in sorted({key[2] for key in keys}, key=lambda rest: rest.replace("bias", "z")):
            of_all = [self._parameter(key, tp) for key in sorted(keys, key=lambda key: key[1] or 0) if key[2] == rest]
            if order.grouping == TURNED and len(of_all[0].shape) == 2:
                yield _turned(of_all)
            else:
                yield from of_all

    def _parameter(self, key: Key, tp: int) -> RankParameter:
        pieces = self.pieces[key]
        ranks = self.tp if key[1] is None else self.etp
        own = pieces if len(pieces) == 1 else pieces[tp % ranks :: ranks]
        regions, reached = [], 0
        for piece in own:
            sizes = piece.sizes
            corner = (reached,) + (0,) * (len(sizes) - 1)
            regions.append(Region(piece.name, piece.chunk, piece.lead, Box(corner[: len(sizes)], sizes)))
            reached += sizes[0] if sizes else 0
        first = own[0].sizes
        return RankParameter((reached, *first[1:]) if first else (), self.dtypes[key], tuple(regions))


def rank_models(weights: Mapping[str, TensorEntry]) -> RankModels | str:
    """What the ranks held, or why that cannot be told."""
    pieces: dict[Key, list[_Piece]] = {}
    dtypes: dict[Key, str] = {}
    for name, entry in weights.items():
        if name.endswith(NO_PARAMETERS):
            continue
        for chunk in _cells(name, entry):
            layer, expert, rest, lead = _cell(name, chunk.box.offsets)
            half = _HALF.fullmatch(rest)
            key = layer, expert, half[1] if half else rest
            pieces.setdefault(key, []).append(_Piece(name, half[2] if half else "", chunk, lead))
            dtypes[key] = entry.dtype
    if (None, None, EMBEDDING) not in pieces:
        return "no embedding lies beside it"
    for held in pieces.values():
        held.sort(key=lambda piece: (piece.half == "v", piece.chunk.box.offsets))
    layers = [layer for layer, _, _ in pieces if layer is not None]
    experts = [expert for _, expert, _ in pieces if expert is not None]
    tp = len(pieces[None, None, EMBEDDING])
    second = [len(held) for key, held in pieces.items() if key[1] is not None and key[2] == "linear_fc2.weight"]
    etp = max(second, default=1)
    for key, held in pieces.items():
        reason = _fault(key, held, tp if key[1] is None else etp)
        if reason:
            return reason
    inside: dict[int | None, list[Key]] = {}
    for key in pieces:
        inside.setdefault(key[0], []).append(key)
    return RankModels(
        pieces,
        dtypes,
        layers=1 + max((-1, *layers)),
        further=-min((0, *layers)),
        experts=1 + max((-1, *experts)),
        tp=tp,
        etp=etp,
        _inside=inside,
    )


def _fault(key: Key, held: Sequence[_Piece], ranks: int) -> str | None:
    """Why it cannot be told what each of so many tensor-parallel ranks held of a parameter, and where that stands."""
    layer, expert, rest = key
    if len(held) > 1 and len(held) % ranks:
        return f"{held[0].name} lies in {len(held)} boxes, which are not those of {ranks} tensor-parallel ranks"
    if len(held) > ranks and any(p.sizes[1:] != held[0].sizes[1:] or not p.sizes for p in held):
        return f"{held[0].name} lies in boxes that no rank's parameter is made of"
    if layer is None and rest not in (*_FRONT, *_BACK, *_END):
        return f"where {held[0].name} stands in a model of Megatron's is not known"
    if layer is not None and expert is None and _position(rest, Order(False, False, EACH))[0] < 0:
        return f"where {held[0].name} stands in a layer of Megatron's is not known"
    return None


def _cells(name: str, entry: TensorEntry) -> Iterator[Chunk]:
    """The chunks of a weight, each of one layer and one expert: grouped experts of a rank lie in one box."""
    for chunk in entry.chunks:
        *_, lead = _cell(name, chunk.box.offsets)
        low, sizes = chunk.box.offsets, chunk.box.sizes
        for at in itertools.product(*(range(a, a + n) for a, n in zip(low[:lead], sizes, strict=False))):
            yield chunk.narrow(Box((*at, *low[lead:]), (1,) * lead + sizes[lead:]), entry.dtype)


def _cell(name: str, offsets: Shape) -> tuple[int | None, int | None, str, int]:
    """Layer, expert, rest of the name, and how many dimensions of a box count layers and experts."""
    further = _FURTHER.fullmatch(name)
    match = _LAYER.fullmatch(name)
    if match is None and further is None:
        return None, None, name, 0
    lead = 0
    if further is not None:
        layer, rest = -1 - int(further[1]), further[2]
    else:
        assert match is not None
        rest = match[2]
        layer = int(match[1]) if match[1] else offsets[0]
        lead = 0 if match[1] else 1
    inner = _INNER.fullmatch(rest) if further is not None else None
    expert = _EXPERT.fullmatch(inner[1] if inner else rest)
    if expert is None:
        return layer, None, rest, lead
    if expert[1]:
        return layer, int(expert[1]), expert[2], lead
    return layer, offsets[lead], expert[2], lead + 1


def _position(rest: str, order: Order) -> tuple[int, int]:
    """Where a parameter stands in its layer; below 0 where that is not known."""
    for position, pattern in enumerate(_patterns(order.fused, order.latent_fused)):
        match = pattern.fullmatch(rest)
        if match is not None:
            return position, 1 if match[1] == "bias" else 0
    return -1, 0


_NORM = r"(?:input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)(weight|bias)"
_Q_NORM = r"self_attention\.(?:q_layernorm\.|linear_q_up_proj\.layer_norm_)(weight|bias)"
_KV_NORM = r"self_attention\.(?:kv_layernorm\.|linear_kv_up_proj\.layer_norm_)(weight|bias)"


@lru_cache
def _patterns(fused: bool, latent_fused: bool) -> tuple[re.Pattern[str], ...]:
    def linear(name: str) -> str:
        return rf"self_attention\.{name}\.(weight|bias)"

    names = [linear("linear_proj"), _NORM] if fused else [_NORM, linear("linear_proj")]
    names += [linear("linear_qkv"), linear("linear_q_proj"), linear("linear_q_down_proj")]
    names += ([_Q_NORM] if latent_fused else []) + [linear("linear_q_up_proj"), linear("linear_kv_down_proj")]
    names += ([_KV_NORM] if latent_fused else []) + [linear("linear_kv_up_proj")]
    names += [] if latent_fused else [_Q_NORM, linear("k_layernorm"), _KV_NORM]
    names += [r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)(weight|bias)", r"mlp\.router\.(weight|bias)"]
    names += [r"mlp\.linear_fc1\.(weight|bias)", r"mlp\.linear_fc2\.(weight|bias)"]
    names += [f"({_ROUTED})", r"mlp\.shared_experts\.gate_(weight)"]
    names += [r"mlp\.shared_experts\.linear_fc1\.(weight|bias)", r"mlp\.shared_experts\.linear_fc2\.(weight|bias)"]
    inner = [rf"(?:transformer_layer\.|mtp_model_layer\.)?{name}" for name in names]
    before = [rf"{name}\.(weight|bias)" for name in ("enorm", "hnorm", "eh_proj")]
    return tuple(re.compile(name) for name in (*before, *inner, r"final_layernorm\.(weight|bias)"))


def _turned(matrices: Sequence[RankParameter]) -> RankParameter:
    """The same matrix of all experts as one parameter [experts, columns, rows]: the halves of a gated one side by
    side."""
    rows, columns = matrices[0].shape
    regions = []
    for number, matrix in enumerate(matrices):
        for region in matrix.regions:
            box = Box((number, 0, region.box.offsets[0]), (1, columns, region.box.sizes[0]))
            regions.append(replace(region, box=box, turned=True))
    return RankParameter((len(matrices), columns, rows), matrices[0].dtype, tuple(regions))
