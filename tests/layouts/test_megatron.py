"""Megatron's files as an index: which rank wrote what, and what its numbers mean."""

from __future__ import annotations

import argparse
import enum
import io
import json
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

from milepost.errors import CheckpointError, DamagedError, IncompleteError, RefusedError
from milepost.layouts import archives, describe, find_layout, open_directory
from milepost.layouts.megatron.numbers import offsets

FIRST, LAST = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"


def save(folder: Path, rank: str, content: Any, name: str = "model_optim_rng.pt") -> None:
    (folder / rank).mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / rank / name)


def stage(layers: list[int], first: bool = True, last: bool = True, value: float = 0.0) -> dict[str, torch.Tensor]:
    """The state dict of a stage; a layer's tensor says which it was told to be."""
    state = {f"decoder.layers.{n}.mlp.linear_fc2.weight": torch.full((2, 2), value + n) for n in layers}
    return ({FIRST: torch.ones(4, 2)} if first else {}) | state | ({LAST: torch.ones(2)} if last else {})


def layers_of(directory: Path) -> dict[int, float]:
    """Layer number in the index -> the value that its file was given."""
    return {
        int(name.split(".")[2]): float(entry.numpy().flat[0])
        for name, entry in open_directory(directory, "megatron").items()
        if ".layers." in name
    }


# Which layer a number means


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    local=st.booleans(),
    places=st.randoms(use_true_random=False),
)
def test_numbers_counted_anew_and_over_the_model_mean_the_same(counts: list[int], local: bool, places: Any) -> None:
    starts = [sum(counts[:n]) for n in range(len(counts))]
    numbers = {place: {n + (0 if local else starts[place]) for n in range(count)} for place, count in enumerate(counts)}
    shuffled = dict(places.sample(list(numbers.items()), len(numbers)))
    found = offsets(shuffled, range(len(counts)), "layer")
    meant = [number + found[place] for place in range(len(counts)) for number in sorted(numbers[place])]
    assert meant == list(range(sum(counts)))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([{0, 1}, {3, 4}], "0 has 0-1; 1 has 3-4"),
        ([{0, 1}, {1, 2}], "1 has 1-2"),
        ([{0, 2}, {0, 1}], "0 has 0, 2"),
    ],
)
def test_numbers_of_neither_kind_are_refused(numbers: list[set[int]], message: str) -> None:
    with pytest.raises(DamagedError, match=message):
        offsets(dict(enumerate(numbers)), range(len(numbers)), "layer")


@pytest.mark.parametrize(
    ("stages", "wanted"),
    [
        # pipeline rank 0 and 1; each a list of virtual stages; each a list of layer numbers in the file
        pytest.param([[[0, 1]], [[0, 1]]], {0: 0, 1: 1, 2: 100, 3: 101}, id="4 layers, PP 2, counted anew"),
        pytest.param([[[0, 1]], [[2, 3]]], {0: 0, 1: 1, 2: 102, 3: 103}, id="4 layers, PP 2, over the model"),
        pytest.param([[[0, 1, 2]], [[0, 1]]], {0: 0, 1: 1, 2: 2, 3: 100, 4: 101}, id="5 layers, uneven"),
        pytest.param([[[0], [0]], [[0], [0]]], {0: 0, 1: 100, 2: 10, 3: 110}, id="VPP 2, counted anew"),
        pytest.param([[[0], [2]], [[1], [3]]], {0: 0, 1: 101, 2: 12, 3: 113}, id="VPP 2, over the model"),
        pytest.param([[[]], [[0, 1]]], {0: 100, 1: 101}, id="a stage of the embedding alone"),
    ],
)
def test_layers_of_stages(tmp_path: Path, stages: list[list[list[int]]], wanted: dict[int, float]) -> None:
    """Case 68: layers 0 to N-1, each once. Values say where a layer lay: 100 a pipeline rank, 10 a virtual stage."""
    for pp, chunks in enumerate(stages):
        states = [
            stage(layers, pp == v == 0, pp == len(stages) - 1 and v == len(chunks) - 1, 100.0 * pp + 10 * v)
            for v, layers in enumerate(chunks)
        ]
        save(tmp_path / "model", f"mp_rank_00_{pp:03d}", states, "model.pt")
    assert layers_of(tmp_path) == wanted


def test_the_arguments_number_of_layers_is_compared(tmp_path: Path) -> None:
    args = argparse.Namespace(num_layers=4)
    save(tmp_path, "mp_rank_00", {"args": args, "model": stage([0, 1, 2])})
    with pytest.raises(DamagedError, match="speak of 4 layers, the files of all ranks hold 3"):
        open_directory(tmp_path)


# Which rank wrote what


def test_a_second_number_is_the_pipelines_or_the_experts(tmp_path: Path) -> None:
    """`mp_rank_00_001` is an expert-parallel rank where every rank holds a whole model."""
    expert = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc2.weight"
    for ep in range(2):
        experts = {expert.format(n): torch.full((2, 2), 10.0 * ep + n) for n in range(2)}
        save(tmp_path / "experts", f"mp_rank_00_{ep:03d}", {"model": stage([0]) | experts})
        save(tmp_path / "stages", f"mp_rank_00_{ep:03d}", {"model": stage([0], ep == 0, ep == 1, 5.0 + ep)})
    index = open_directory(tmp_path / "experts")
    assert [float(index[expert.format(n)].numpy()[0, 0]) for n in range(4)] == [0.0, 1.0, 10.0, 11.0]
    assert layers_of(tmp_path / "stages") == {0: 5.0, 1: 6.0}


@pytest.mark.parametrize(
    "spelling",
    [
        "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.weight{}",
    ],
)
def test_experts_counted_over_the_model_stay(tmp_path: Path, spelling: str) -> None:
    for ep in range(2):
        experts = {spelling.format(2 * ep + n): torch.full((2, 2), 2.0 * ep + n) for n in range(2)}
        save(tmp_path, f"mp_rank_00_{ep:03d}", {"model": stage([0]) | experts})
    index = open_directory(tmp_path)
    assert [float(index[spelling.format(n)].numpy()[0, 0]) for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_parts_of_tensor_parallel_ranks_are_entries_of_their_own(tmp_path: Path) -> None:
    for tp in range(2):
        save(tmp_path, f"mp_rank_{tp:02d}", {"model": {"module.module." + n: v + tp for n, v in stage([0]).items()}})
    index = open_directory(tmp_path)
    assert set(index) == {f"{n}@tp{tp}" for n in stage([0]) for tp in range(2)}
    assert index.world_size == 2 and index.layout == "megatron"
    assert float(index[f"{FIRST}@tp1"].numpy()[0, 0]) == 2.0


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (["00", "02"], "tensor-parallel rank 1"),
        (["00_000", "00_002"], "files of pipeline rank 1"),
        (["00_000", "01_000", "00_001"], "tensor-parallel rank 1 of pipeline rank 1"),
    ],
)
def test_ranks_that_are_missing_are_named(tmp_path: Path, ranks: list[str], message: str) -> None:
    for rank in ranks:
        pp = int(rank.partition("_")[2] or 0)
        save(tmp_path, f"mp_rank_{rank}", {"model": stage([0], first=pp == 0, last="_" not in rank)})
    with pytest.raises(IncompleteError, match=f"{message} are missing"):
        open_directory(tmp_path)


def test_a_rank_without_its_file_and_names_of_two_kinds(tmp_path: Path) -> None:
    save(tmp_path / "a", "mp_rank_00", {"model": stage([0])})
    (tmp_path / "a" / "mp_rank_01").mkdir()
    with pytest.raises(IncompleteError, match=r"no model_optim_rng\.pt .* in mp_rank_01"):
        open_directory(tmp_path / "a")
    (tmp_path / "a" / "mp_rank_01" / "optim.pt").touch()  # a data-parallel rank's, which has no model
    assert len(open_directory(tmp_path / "a")) == 3
    save(tmp_path / "b", "mp_rank_00", {"model": stage([0])})
    save(tmp_path / "b", "mp_rank_00_001", {"model": stage([0])})
    with pytest.raises(DamagedError, match="several checkpoints lie together"):
        open_directory(tmp_path / "b")


def test_ranks_of_one_stage_hold_the_same_tensors(tmp_path: Path) -> None:
    save(tmp_path, "mp_rank_00", {"model": stage([0, 1])})
    save(tmp_path, "mp_rank_01", {"model": stage([0])})
    with pytest.raises(DamagedError, match=r"decoder\.layers\.1.*mp_rank_00.*not in .*mp_rank_01"):
        open_directory(tmp_path)
    save(tmp_path, "mp_rank_01", [stage([0]), stage([1])])
    with pytest.raises(DamagedError, match="different saves"):
        open_directory(tmp_path)


@pytest.mark.parametrize("checksums", [True, False])
def test_copies_of_expert_parallel_ranks_are_compared(tmp_path: Path, checksums: bool) -> None:
    torch.serialization.set_crc32_options(checksums)
    try:
        for ep in range(2):
            save(tmp_path, f"mp_rank_00_{ep:03d}", {"model": stage([0])})
        assert set(open_directory(tmp_path)) == set(stage([0]))
        save(tmp_path, "mp_rank_00_001", {"model": stage([0], value=1e-3)})
        with pytest.raises(DamagedError, match=r"linear_fc2\.weight: .*they differ"):
            open_directory(tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)


# What else is in the files


class AttnBackend(enum.Enum):
    """Pickled as Megatron's own."""

    auto = 5


def test_arguments_and_extra_states_are_read_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's arguments name enums of Megatron, element types and signals; Transformer Engine's states are bytes
    in a buffer, a tensor of bytes, or nothing."""
    for name in ("megatron", "megatron.unknown", "megatron.unknown.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(AttnBackend, "__module__", "megatron.unknown.enums")
    monkeypatch.setattr(sys.modules["megatron.unknown.enums"], "AttnBackend", AttnBackend, raising=False)
    args = argparse.Namespace(num_layers=1, params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto, lr=1e-5)
    extra = {
        "decoder.layers.0.mlp.linear_fc1._extra_state": io.BytesIO(b"fp8"),
        "decoder.layers.0.mlp.linear_fc2._extra_state": torch.zeros(3, dtype=torch.uint8),
        "output_layer._extra_state": None,
    }
    rng = [{"np_rng_state": np.random.RandomState(0).get_state(), "torch_rng_state": torch.zeros(5, dtype=torch.uint8)}]
    content = {"args": args, "checkpoint_version": 3.0, "rng_state": rng, "model": stage([0]) | extra}
    save(tmp_path, "mp_rank_00", content | {"optimizer": {"fp32_from_fp16_params": [[torch.ones(2)]]}})
    index = open_directory(tmp_path)
    assert set(index) == set(stage([0]))
    assert index.objects["args"]["lr"] == 1e-5
    (skipped,), (unread,) = index.skipped, index.unread
    assert skipped.startswith("3 _extra_state entries") and unread.startswith("optimizer state")
    assert all(list(_bad(*archive)) == [] for archive in archives(index))


def _bad(path: Path, span: tuple[int, int] | None) -> Any:
    from milepost.layouts.torchfile import TorchFile

    return TorchFile(path, span).bad_records()


def test_signals_in_arguments_are_read(tmp_path: Path) -> None:
    save(tmp_path, "mp_rank_00", {"args": argparse.Namespace(exit_signal=signal.SIGTERM), "model": stage([0])})
    assert len(open_directory(tmp_path)) == 3


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_code_in_arguments_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, "mp_rank_00", {"args": argparse.Namespace(x=Evil()), "model": stage([0])})
    with pytest.raises(RefusedError, match=r"builtins\.print"):
        open_directory(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no state dict"),
        ({"model": [1]}, "no state dict"),
        ({"model": {"language_model": {}}}, "before Megatron-Core"),
        ({"model": {FIRST: 3}}, "is a int, not a tensor"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    save(tmp_path, "mp_rank_00", content)
    with pytest.raises(CheckpointError, match=message):
        open_directory(tmp_path)


def test_grouped_experts_are_told_apart(tmp_path: Path) -> None:
    """GroupedMLP reads weight1 as [experts, hidden, width] and weight2 as [experts, width, hidden]."""
    total, hidden, width = 4, 3, 5
    fc1, fc2 = torch.randn(total, 2 * width, hidden), torch.randn(total, hidden, width)
    args = argparse.Namespace(num_experts=total)
    prefix = "decoder.layers.0.mlp.experts."
    for ep in range(2):
        own = slice(2 * ep, 2 * ep + 2)
        grouped = {
            f"{prefix}weight1": fc1[own].transpose(1, 2).contiguous().view(hidden, -1),
            f"{prefix}weight2": fc2[own].transpose(1, 2).contiguous().view(-1, hidden),
        }
        save(tmp_path / "a", f"mp_rank_00_{ep:03d}", {"args": args, "model": stage([0]) | grouped})
        save(tmp_path / "b", f"mp_rank_00_{ep:03d}", {"model": stage([0]) | grouped})
    index = open_directory(tmp_path / "a")
    for expert in range(total):
        for name, value in (("linear_fc1", fc1[expert]), ("linear_fc2", fc2[expert])):
            assert torch.equal(index[f"{prefix}local_experts.{expert}.{name}.weight"].read(), value)
    with pytest.raises(RefusedError, match="grouped experts"):
        open_directory(tmp_path / "b")


# Dist checkpoints


def save_dist(folder: Path, tensors: dict[str, Any]) -> Path:
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 7, "args": argparse.Namespace(lr=0.5)}, folder / "common.pt")
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_keys_of_a_dist_checkpoint(tmp_path: Path) -> None:
    name = "decoder.layers.mlp.linear_fc2.weight"
    state = {
        name: torch.ones(2, 3, 4),
        f"optimizer.state.exp_avg.{name}": torch.ones(2, 3, 4),
        f"optimizer.state.param.{name}": torch.ones(2, 3, 4),
        f"chained_0.optimizer.state.exp_avg_sq.{name}": torch.ones(2, 3, 4),
        f"optimizer.state.fp32_param.{LAST}": torch.ones(4),
        LAST: torch.ones(4, dtype=torch.bfloat16),
        f"optimizer.state.exp_avg.{LAST}": torch.ones(1, 2, 2),  # flat runs of ranks
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_float32.bucket_idx_0.exp_avg": torch.ones(9),
        "decoder.layers.mlp.linear_fc2._extra_state/shard_0_2": io.BytesIO(b""),
        "rng_state/shard_0.0_1.1": io.BytesIO(b"rng"),
    }
    index = open_directory(save_dist(tmp_path / "iter_0000007", state))
    assert index.layout == "megatron"
    assert set(index) == {
        name, LAST, f"optim/{name}/exp_avg", f"optim/{name}/exp_avg_sq", f"optim/{name}/param", f"optim/{LAST}/param",
    }  # fmt: skip
    assert [line.split(" ", 1)[0] for line in index.unread] == ["1", "1", "optimizer"]
    assert "no count of its steps" in index.unread[-1]
    assert index.skipped[0].startswith("1 _extra_state entries")
    assert index.objects["common"]["iteration"] == 7 and index.objects["common"]["args"] == {"lr": 0.5}
    assert "rng_state/shard_0.0_1.1" in index.objects
    assert sum(1 for _ in archives(index)) >= 8


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_where_trainers_put_a_dist_checkpoint(tmp_path: Path) -> None:
    """And what is none: a torch DCP folder of another trainer stays DCP's."""
    weights, moments = {LAST: torch.ones(4)}, {f"optimizer.state.exp_avg.{LAST}": torch.ones(4)}
    for place in ("iter", "old/dist_ckpt", "new/model/dist_ckpt"):
        save_dist(tmp_path / place, weights)
    save_dist(tmp_path / "new" / "optimizer" / "dist_ckpt", moments)
    dcp.save(weights, checkpoint_id=tmp_path / "plain", no_dist=True)
    for place, words in (("iter", "a dist checkpoint of Megatron"), ("old", "in dist_ckpt"), ("new", "and optimizer/")):
        layout = find_layout(tmp_path / place)
        assert layout is not None and layout.name == "megatron"
        assert words in (describe(tmp_path / place, layout) or "")
    assert set(open_directory(tmp_path / "new")) == {LAST, f"optim/{LAST}/exp_avg"}
    plain = find_layout(tmp_path / "plain")
    assert plain is not None and plain.name == "dcp"
    assert find_layout(tmp_path / "plain", "megatron") is None
