"""Buckets of Megatron's DistributedOptimizer by hand: orders that models of Transformer Engine have, which is not here,
and files that do not go together. Those that Megatron makes itself are in `tests/interop/test_megatron_reading.py` and
`tests/engines/test_megatron_optimizers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from milepost.checkpoint.restore import fit
from milepost.engines.base import LiveTensor
from milepost.errors import MismatchError
from milepost.index import Box, TensorEntry, moment_name
from milepost.layouts import open_directory
from milepost.layouts.dcp.metadata import read_contents
from milepost.layouts.dcp.reader import DcpLayout
from milepost.layouts.megatron.buckets import is_bucket, places, read_buckets

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize(
    ("sizes", "buckets", "found"),
    [
        # last first, each at a multiple of 64
        ([100, 64, 3], [228], [(0, 128), (0, 64), (0, 0)]),
        ([100, 70, 3], [134, 100], [(1, 0), (0, 64), (0, 0)]),
        # one that takes a bucket of its own ends the one before, with the padding up to where it would have begun
        ([100, 70, 3], [192, 100], [(1, 0), (0, 64), (0, 0)]),
        ([100, 70, 3], [3, 70, 100], [(2, 0), (1, 0), (0, 0)]),
        ([100, 64, 3], [227], None),
        ([100, 64, 3], [229], None),
        ([100, 64, 3], [128, 100, 1], None),
        ([100, 64, 3], [128], None),
        ([], [], []),
    ],
)
def test_places(sizes: list[int], buckets: list[int], found: Any) -> None:
    assert places(sizes, buckets) == found


LAYER = "decoder.layers.0"
Order = Sequence[tuple[str, tuple[int, ...]]]
FRONT: Order = [("embedding.word_embeddings.weight", (6, 4))]
ATTENTION: Order = [
    ("self_attention.linear_proj.weight", (4, 4)),
    ("self_attention.linear_qkv.layer_norm_weight", (4,)),
    ("self_attention.linear_qkv.weight", (8, 4)),
    ("self_attention.linear_qkv.bias", (8,)),
    ("self_attention.q_layernorm.weight", (2,)),
    ("self_attention.k_layernorm.weight", (2,)),
]
LATENT: Order = [
    ("input_layernorm.weight", (4,)),
    ("self_attention.linear_proj.weight", (4, 4)),
    ("self_attention.linear_q_down_proj.weight", (3, 4)),
    ("self_attention.linear_q_up_proj.layer_norm_weight", (3,)),
    ("self_attention.linear_q_up_proj.weight", (4, 3)),
    ("self_attention.linear_kv_down_proj.weight", (3, 4)),
    ("self_attention.linear_kv_up_proj.layer_norm_weight", (3,)),
    ("self_attention.linear_kv_up_proj.weight", (4, 3)),
]
MLP: Order = [
    ("mlp.linear_fc1.layer_norm_weight", (4,)),
    ("mlp.linear_fc1.weight", (10, 4)),
    ("mlp.linear_fc2.weight", (4, 5)),
]
EXPERTS: Order = [
    ("pre_mlp_layernorm.weight", (4,)),
    ("mlp.router.weight", (2, 4)),
    ("mlp.experts.experts.0.linear_fc1.weight", (6, 4)),
    ("mlp.experts.experts.1.linear_fc1.weight", (6, 4)),
    ("mlp.experts.experts.0.linear_fc2.weight", (4, 3)),
    ("mlp.experts.experts.1.linear_fc2.weight", (4, 3)),
    ("mlp.shared_experts.gate_weight", (1, 4)),
    ("mlp.shared_experts.linear_fc1.weight", (4, 4)),
    ("mlp.shared_experts.linear_fc2.weight", (4, 2)),
]
PREDICTING: Order = [("enorm", (4,)), ("hnorm", (4,)), ("eh_proj", (4, 8)), ("final_layernorm", (4,))]
NORM: Order = [("decoder.final_layernorm.weight", (4,))]
BACK: Order = [("output_layer.weight", (6, 4))]


def _model(*layers: Order, further: Order = ()) -> dict[str, torch.Tensor]:
    """Parameters in bfloat16's precision and beyond, in the order of a model of these layers; `further`: those of one
    more, which predicts further tokens."""
    own = [(f"mtp.layers.0.{name}.weight", shape) for name, shape in (PREDICTING if further else ())]
    inner = [(f"mtp.layers.0.transformer_layer.{rest}", shape) for rest, shape in further]
    named = ((f"decoder.layers.{n}.{rest}", s) for n, layer in enumerate(layers) for rest, s in layer)
    shapes = [*FRONT, *named, *NORM, *own[:3], *inner, *own[3:], *BACK]
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As Megatron lays them out: last first, each from a multiple of 64 on; what lies between means nothing."""
    pieces: list[torch.Tensor] = []
    for tensor in reversed(tensors):
        reached = sum(piece.numel() for piece in pieces)
        pieces += [torch.full((-reached % 64,), torch.nan), tensor.reshape(-1)]
    return torch.cat(pieces)


KEY = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"


def _save(directory: Path, model: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """A dist checkpoint of one rank; `changes`: of the state dict, by key without the part that all buckets have."""
    halves = {}
    for name, value in model.items():
        if name.endswith("linear_fc1.weight"):  # each half is a box of its own; here a tensor of its own, as some write
            halves |= {f"{name}_w": value[: len(value) // 2], f"{name}_v": value[len(value) // 2 :]}
        else:
            halves[name] = value
    weights = {name: value.bfloat16().contiguous() for name, value in halves.items()}
    masters = list(model.values())
    kinds = {"param": masters, "exp_avg": [m * 0.5 for m in masters], "exp_avg_sq": [m.square() for m in masters]}
    state = weights | {f"{KEY}.{kind}": _flat(values) for kind, values in kinds.items()}
    state |= changes
    _save_dist(directory, {key: value for key, value in state.items() if value is not None})
    return directory


def _save_dist(directory: Path, state: dict[str, torch.Tensor]) -> None:
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"optimizer": {"optimizer": {"param_groups": [{"lr": 0.5, "step": 7}]}}}, directory / "common.pt")


@pytest.mark.parametrize(
    ("layers", "further"),
    [
        pytest.param([[*ATTENTION, *MLP], [*ATTENTION, *MLP]], [], id="fused-norms"),
        pytest.param([[*ATTENTION, *MLP], [*ATTENTION, *EXPERTS]], [], id="grouped-experts"),
        pytest.param([[*LATENT, *MLP], [*LATENT, *EXPERTS]], [], id="latent-attention"),
        pytest.param([[*LATENT, *EXPERTS]], [*LATENT, *EXPERTS], id="further-tokens"),
    ],
)
def test_models_of_transformer_engine(tmp_path: Path, layers: list[Order], further: Order) -> None:
    """Its linear layers hold the norm before them, as their first parameter; its grouped experts first all first
    matrices."""
    model = _model(*layers, further=further)
    index = open_directory(_save(tmp_path, model))
    assert index.unread == ()
    for name, value in model.items():
        parts = {name: value}
        if name.endswith("linear_fc1.weight"):
            parts = {f"{name}_w": value[: len(value) // 2], f"{name}_v": value[len(value) // 2 :]}
        for part, whole in parts.items():
            for kind, wanted in (("param", whole), ("exp_avg", whole * 0.5), ("exp_avg_sq", whole.square())):
                np.testing.assert_array_equal(index[moment_name(part, kind)].numpy(), wanted.numpy(), err_msg=part)
            assert index[moment_name(part, "step")].numpy() == 7


PLAIN = [[*ATTENTION, *MLP]]


def test_an_optimizer_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """As verl has it since 0.9."""
    model = _model(*PLAIN)
    whole = open_directory(_save(tmp_path / "whole", model))
    tensors = {name: entry.read() for name, entry in whole.items() if not name.startswith("optim/")}
    _save_dist(tmp_path / "model" / "dist_ckpt", tensors)
    masters = list(model.values())
    kinds = {"param": masters, "exp_avg": [m * 0.5 for m in masters], "exp_avg_sq": [m.square() for m in masters]}
    _save_dist(tmp_path / "optimizer" / "dist_ckpt", {f"{KEY}.{kind}": _flat(of) for kind, of in kinds.items()})
    index = open_directory(tmp_path)
    assert (set(index), index.unread) == (set(whole), ())
    assert all(np.array_equal(index[name].bits(), whole[name].bits()) for name in whole)


SWAPPED = [(n, s) for n, s in PLAIN[0] if "bias" not in n] + [("self_attention.linear_qkv.bias", (8,))]
SHORT = torch.ones(64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{KEY}.exp_avg": None}, "a bucket holds no exp_avg"),
        ({f"{KEY}.exp_avg": SHORT}, "a bucket holds tensors of several lengths"),
        ({f"{KEY.replace('bucket_idx_0', 'bucket_idx_2')}.{k}": SHORT for k in ("param", "exp_avg", "exp_avg_sq")},
         "buckets are missing"),
        ({f"{KEY.replace('group_idx_0', 'group_idx_1')}.{k}": SHORT for k in ("param", "exp_avg", "exp_avg_sq")},
         "in no order"),
        ({f"{KEY}.{k}": SHORT for k in ("param", "exp_avg", "exp_avg_sq")}, "in no order"),
        ({"embedding.word_embeddings.weight": None}, "no embedding lies beside it"),
        ({"decoder.final_layernorm.weight": None}, "in no order"),
        ({"decoder.layers.0.mlp.adapter.weight": SHORT},
         "where decoder.layers.0.mlp.adapter.weight stands in a layer of Megatron's is not known"),
        ({"adapter.weight": SHORT}, "where adapter.weight stands in a model of Megatron's is not known"),
        # of another step
        ({"decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(4, 5)}, "in no order"),
        ({"decoder.layers.0.mlp.linear_fc2.weight": torch.zeros(4, 5).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_leaves_a_reason_and_is_not_resumed(
    tmp_path: Path, changes: Mapping[str, Any], words: str
) -> None:
    index = open_directory(_save(tmp_path, _model(*PLAIN), **changes))
    assert not any(name.startswith("optim/") for name in index)
    (reason,) = index.unread
    assert words in reason and "--dist-ckpt-optim-fully-reshardable" in reason
    live = {name: LiveTensor(name, (0,), "float32", ()) for name in ("w", "optim/w/exp_avg")}
    with pytest.raises(MismatchError, match="buckets of optimizer state"):
        fit("actor", index, live)


def test_another_order_of_parameters_does_not_pass(tmp_path: Path) -> None:
    """A mutant with the right number of elements: the bias of queries, keys and values after all else of its layer."""
    index = open_directory(_save(tmp_path, _model(SWAPPED)))
    assert not any(name.startswith("optim/") for name in index) and "in no order" in index.unread[0]


def _in_groups(directory: Path, model: Mapping[str, torch.Tensor], groups: Mapping[str, Sequence[str]]) -> Path:
    """A dist checkpoint of several groups of ranks: `<optimizer>.<group>` -> its parameters, in the model's order. Each
    group has an object, as Megatron writes it."""
    state: dict[str, Any] = {name: value.bfloat16() for name, value in model.items()}
    for place, names in groups.items():
        optimizer, group = place.split(".")
        key = f"{optimizer}.{KEY}".replace("group_idx_0", f"group_idx_{group}")
        state[f"{key.partition('.gbuf')[0]}.per_bucket_numel_unpadded/shard_0_1"] = len(names)
        masters = [model[name] for name in names]
        if masters:
            kinds = {
                "param": masters,
                "exp_avg": [m * 0.5 for m in masters],
                "exp_avg_sq": [m.square() for m in masters],
            }
            state |= {f"{key}.{kind}": _flat(values) for kind, values in kinds.items()}
    _save_dist(directory, state)
    return directory


@pytest.mark.parametrize("dense", [0, 1])
def test_a_stage_without_experts(tmp_path: Path, dense: int) -> None:
    """Two stages of a layer, two expert-parallel ranks: a stage of a dense layer has groups in which nothing lies."""
    attention, routed = [(n, s) for n, s in ATTENTION if "layernorm" not in n], EXPERTS[:6]
    plain = [("pre_mlp_layernorm.weight", (4,)), ("mlp.linear_fc2.weight", (4, 5))]
    model = _model(*([*attention, *(plain if layer == dense else routed)] for layer in (0, 1)))
    experts = {n: [name for name in model if f".experts.{n}." in name] for n in (0, 1)}
    shared = [name for name in model if ".experts." not in name]
    cut = next(number for number, name in enumerate(shared) if ".layers.1." in name)
    groups = {"chained_0.0": shared[:cut], "chained_0.1": shared[cut:]}
    for group in range(4):
        groups[f"chained_1.{group}"] = [] if group // 2 == dense else experts[group % 2]
    index = open_directory(_in_groups(tmp_path, model, groups))
    assert index.unread == ()
    for name, value in model.items():
        np.testing.assert_array_equal(index[moment_name(name, "exp_avg")].numpy(), (value * 0.5).numpy(), err_msg=name)


def test_two_orders_that_fit_alike_are_not_chosen_between(tmp_path: Path) -> None:
    """The norm before attention and the matrix after it, as long and in bfloat16 the same: which of them lies first
    depends on whether the norm is fused, and only their copies differ."""
    proj, norm = ATTENTION[0][0], ATTENTION[1][0]
    model = _model([(proj, (4, 1)), *ATTENTION[1:], *MLP])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    model |= {f"{LAYER}.{proj}": weight[:, None], f"{LAYER}.{norm}": weight * (1 + 2**-12)}
    index = open_directory(_save(tmp_path, model))
    assert not any(name.startswith("optim/") for name in index)
    assert "several orders of the model's parameters fit them" in index.unread[0]


def _parts(directory: Path) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """Buckets and weights of a dist checkpoint, as DCP has them."""
    stored = DcpLayout().open(directory)
    weights = {key: entry for key, entry in stored.items() if not is_bucket(key)}
    return {key: entry for key, entry in stored.items() if is_bucket(key)}, weights


@pytest.mark.parametrize("where", [-1, 1])
def test_an_empty_run_hides_none_that_begins_where_it_does(tmp_path: Path, where: int) -> None:
    """As a rank of whose run nothing is left notes it."""
    buckets, weights = _parts(_save(tmp_path, _model(*PLAIN)))
    for key, entry in buckets.items():
        (chunk,) = entry.chunks
        empty = replace(chunk, box=Box((0,), (0,)))
        buckets[key] = replace(entry, chunks=(chunk, empty)[::where])
    state = read_buckets(buckets, weights, ())
    assert isinstance(state, dict)
    for name, kinds in state.items():
        for kind, entry in kinds.items():
            entry.check_tiling(f"{name} {kind}")


def test_a_parameter_that_no_run_holds_is_not_proved(tmp_path: Path) -> None:
    """The first 64 elements are the output layer's."""
    buckets, weights = _parts(_save(tmp_path, _model(*PLAIN)))
    for key, entry in buckets.items():
        (chunk,) = entry.chunks
        part = chunk.narrow(Box((64,), (entry.numel - 64,)), entry.dtype)
        buckets[key] = replace(entry, chunks=(part,))
    reason = read_buckets(buckets, weights, ())
    assert isinstance(reason, str) and "in no order" in reason


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([7, 8], "have different counts of its steps"),
        ([], "have no count of its steps"),
        (None, "the steps that it has counted cannot be read: .*common.pt"),
    ],
)
def test_steps_that_are_not_one_number_leave_a_reason(tmp_path: Path, steps: list[int] | None, words: str) -> None:
    """None: a file that is damaged."""
    model = _save(tmp_path, _model(*PLAIN))
    if steps is None:
        (model / "common.pt").write_bytes(b"PK")
    else:
        groups = [{"lr": 0.5, "step": step} for step in steps]
        torch.save({"optimizer": {"optimizer": {"param_groups": groups}}}, model / "common.pt")
    index = open_directory(tmp_path)
    (reason,) = index.unread
    assert re.search(words, reason) and not any(name.endswith("/step") for name in index)
    assert index[f"{LAYER}.mlp.linear_fc2.weight"].bits().size == 20


def _spoil(directory: Path, key: str) -> None:
    """Write over the archive that holds a tensor."""
    span = read_contents(directory).tensors[key].spans[0]
    with span.file.open("r+b") as file:
        file.seek(span.start)
        file.write(bytes(span.length))


def test_a_damaged_bucket_stops_no_weights(tmp_path: Path) -> None:
    model = _model(*PLAIN)
    _spoil(_save(tmp_path, model), f"{KEY}.param")
    index = open_directory(tmp_path)
    assert not any(name.startswith("optim/") for name in index)
    assert "__0_0.distcp" in index.unread[0] and "fully-reshardable" not in index.unread[0]
    for name, entry in index.items():
        assert np.array_equal(entry.bits(), DcpLayout().open(tmp_path)[name].bits())
    with pytest.raises(MismatchError, match=r"3 buckets of optimizer state.*distcp"):
        fit("actor", index, {name: LiveTensor(name, (0,), "float32", ()) for name in ("w", "optim/w/exp_avg")})
