"""The Hugging Face layout: bytes as the safetensors library reads and writes them, sharded directories, companions."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import DamagedError, IncompleteError, MilepostError, NotFoundError
from milepost.index import DTYPES, TensorIndex, itemsize
from milepost.layouts import find_layout, open_directory
from milepost.layouts.huggingface import (
    TORCH_WEIGHTS,
    TORCH_WEIGHTS_INDEX,
    WEIGHTS,
    WEIGHTS_INDEX,
    HuggingFaceLayout,
    companion_files,
    find_companions,
    header_bytes,
    is_model_directory,
    read_config,
    read_safetensors,
)


def _open(directory: Path) -> TensorIndex:
    return HuggingFaceLayout().open(directory)


def _tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    raw = torch.arange(count * itemsize(name), dtype=torch.uint8) % (2 if name == "bool" else 120)
    return raw.view(getattr(torch, name)).reshape(shape)


def _same(index: Any, expected: dict[str, torch.Tensor]) -> None:
    assert set(index) == set(expected)
    for name, tensor in expected.items():
        read = index[name].read()
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


EVERYTHING = {
    f"{name}{list(shape)}": _tensor(name, shape) for name in DTYPES for shape in ((), (0,), (3,), (2, 5), (2, 0, 3))
}


# Headers


def test_a_header_byte_by_byte() -> None:
    head, offsets = header_bytes([("a", "float32", (2, 3)), ("b", "bfloat16", ())])
    text = (
        b'{"__metadata__":{"format":"pt"},'
        b'"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]}}'
    )
    assert len(text) == 143
    assert head == (144).to_bytes(8, "little") + text + b" " * 1
    assert offsets == {"a": 152, "b": 176}


def test_no_tensors_make_a_header_too(tmp_path: Path) -> None:
    head, offsets = header_bytes([])
    assert offsets == {}
    (tmp_path / "f").write_bytes(head)
    assert safetensors.torch.load_file(tmp_path / "f") == {}
    assert read_safetensors(tmp_path / "f") == {}


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
SPECS = st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=3).map(tuple))


@given(st.dictionaries(NAMES.filter(lambda name: name != "__metadata__"), SPECS, max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_library_reads_what_the_header_says(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    values = {name: _tensor(dtype, shape) for name, (dtype, shape) in tensors.items()}
    head, offsets = header_bytes((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    assert len(head) % 8 == 0
    data = bytearray(head)
    for name, tensor in values.items():
        assert offsets[name] == len(data)
        data += tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    loaded = safetensors.torch.load(bytes(data))
    assert set(loaded) == set(values)
    for name, tensor in values.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(EVERYTHING, tmp_path / WEIGHTS, {"format": "pt"})
    index = _open(tmp_path)
    _same(index, EVERYTHING)
    index.check_tiling()
    assert (index.layout, index.world_size, index.files) == ("huggingface", 1, (tmp_path / WEIGHTS,))


def test_numpys_files_of_the_library_are_read_in_the_order_of_the_file(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"b": np.arange(3), "a": np.eye(2, dtype=np.float16)}, tmp_path / WEIGHTS)
    with safetensors.safe_open(tmp_path / WEIGHTS, "np") as file:
        assert list(_open(tmp_path)) == file.offset_keys()


# Damaged files


def _header(tmp_path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / WEIGHTS).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return tmp_path / WEIGHTS


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = safetensors.torch.save({"a": torch.arange(6.0), "b": torch.arange(5)})
    for length in range(len(whole)):
        (tmp_path / WEIGHTS).write_bytes(whole[:length])
        with pytest.raises(DamagedError, match=rf"{WEIGHTS}: "):
            _open(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(whole)
    assert len(_open(tmp_path)) == 2


SPEC = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b"[" * 200_000,
        {"a": None},
        {"a": {}},
        {"a": SPEC | {"dtype": "F4"}},
        {"a": SPEC | {"dtype": ["F32"]}},
        {"a": SPEC | {"shape": [3]}},
        {"a": SPEC | {"shape": [-1, -2]}},
        {"a": SPEC | {"shape": ["2"]}},
        {"a": SPEC | {"shape": [2.0]}},
        {"a": SPEC | {"shape": None}},
        {"a": SPEC | {"data_offsets": [0, 4]}},
        {"a": SPEC | {"data_offsets": [-8, 0]}},
        {"a": SPEC | {"data_offsets": [0.0, 8.0]}},
        {"a": SPEC | {"data_offsets": [8, 16]}},
        {"a": SPEC | {"data_offsets": [0]}},
        {"a": SPEC | {"data_offsets": [1 << 70, (1 << 70) + 8]}},
    ],
    ids=lambda header: repr(header)[:40],
)
def test_headers_that_are_wrong(header: Any, tmp_path: Path) -> None:
    path = _header(tmp_path, header, bytes(8))
    with pytest.raises(DamagedError, match=rf"{WEIGHTS}: "):
        read_safetensors(path)


def test_a_header_of_a_length_that_no_reader_takes(tmp_path: Path) -> None:
    path = _header(tmp_path, {}, length=(1 << 63) + 5)
    with pytest.raises(DamagedError, match="too short for its own header"):
        read_safetensors(path)
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    with pytest.raises(DamagedError):
        read_safetensors(path)


def test_spoilt_bytes_give_an_error_of_ours_or_a_valid_index(tmp_path: Path) -> None:
    dice = random.Random(5)
    whole = safetensors.torch.save({"a": torch.arange(6.0), "b.weight": torch.arange(5), "c": torch.tensor(True)})
    outcomes = {"read": 0, "error": 0}
    for _ in range(1000):
        spoilt = bytearray(whole)
        for _ in range(dice.choice((1, 1, 3))):
            spoilt[dice.randrange(len(whole) - 60)] = dice.choice((dice.randrange(256), *b'0123456789[]{}",:-'))
        (tmp_path / WEIGHTS).write_bytes(spoilt)
        try:
            index = _open(tmp_path)
            for name in index:
                index[name].read()
            index.check_tiling()
            outcomes["read"] += 1
        except MilepostError:
            outcomes["error"] += 1
    assert outcomes["read"] > 50
    assert outcomes["error"] > 100


# Directories of several files


def _shards(
    directory: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None
) -> None:
    for file, tensors in shards.items():
        safetensors.torch.save_file(tensors, directory / file)
    names = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map or names}
    (directory / WEIGHTS_INDEX).write_text(json.dumps(index))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B = torch.arange(3.0), torch.arange(4)


def test_a_sharded_model(tmp_path: Path) -> None:
    _shards(tmp_path, {ONE: {"a": A}, TWO: {"b": B}})
    index = _open(tmp_path)
    _same(index, {"a": A, "b": B})
    assert index.files == (tmp_path / ONE, tmp_path / TWO)


def test_missing_shards_are_all_named(tmp_path: Path) -> None:
    _shards(tmp_path, {ONE: {"a": A}, TWO: {"b": B}})
    (tmp_path / TWO).unlink()
    with pytest.raises(IncompleteError, match=rf"{WEIGHTS_INDEX} names {TWO}, missing here"):
        _open(tmp_path)
    (tmp_path / ONE).unlink()
    with pytest.raises(IncompleteError, match=rf"{ONE}, {TWO}"):
        _open(tmp_path)


def test_an_index_that_promises_more_than_there_is(tmp_path: Path) -> None:
    _shards(tmp_path, {ONE: {"a": A}, TWO: {"b": B}}, {"a": ONE, "b": TWO, "c": TWO})
    with pytest.raises(IncompleteError, match=rf"promises c, which {TWO} lacks"):
        _open(tmp_path)


def test_a_name_counts_in_the_file_that_the_index_gives(tmp_path: Path) -> None:
    # A shard of an older export, in which the tensor lay elsewhere.
    _shards(tmp_path, {ONE: {"a": A, "b": B * 10}, TWO: {"b": B}}, {"a": ONE, "b": TWO})
    _same(_open(tmp_path), {"a": A, "b": B})
    _shards(tmp_path, {ONE: {"a": A}, TWO: {"a": A * 10, "b": B}}, {"a": ONE, "b": TWO})
    _same(_open(tmp_path), {"a": A, "b": B})
    _shards(tmp_path, {ONE: {"a": A, "b": B * 10}, TWO: {"b": B}}, {"a": TWO, "b": ONE})
    with pytest.raises(IncompleteError, match=rf"promises a, which {TWO} lacks"):
        _open(tmp_path)


def test_a_single_file_beside_a_stale_index_is_what_transformers_would_load(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        vocab_size=5,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    Qwen2Model(config).save_pretrained(tmp_path, max_shard_size=200)
    assert (tmp_path / WEIGHTS_INDEX).exists()
    model = Qwen2Model(config)
    safetensors.torch.save_file(model.state_dict(), tmp_path / WEIGHTS, {"format": "pt"})
    loaded = Qwen2Model.from_pretrained(tmp_path).state_dict()
    assert torch.equal(loaded["embed_tokens.weight"], model.state_dict()["embed_tokens.weight"])
    _same(_open(tmp_path), loaded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "[" * 100_000])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_INDEX).write_text(text)
    with pytest.raises(DamagedError, match=f"{WEIGHTS_INDEX}: not an index of weights"):
        _open(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ""])
def test_an_index_that_points_out_of_its_directory(file: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(DamagedError, match="no file of this directory"):
        _open(tmp_path)


# pytorch_model.bin


def test_a_directory_of_torchs_own_files(tmp_path: Path) -> None:
    weights = {"a": A, "turned": torch.arange(6).reshape(2, 3).t(), "p": torch.nn.Parameter(torch.ones(2)), "tied": A}
    torch.save(weights, tmp_path / TORCH_WEIGHTS)
    index = _open(tmp_path)
    _same(index, {name: tensor.detach().contiguous() for name, tensor in weights.items()})
    assert [name for name, entry in index.items() if entry.alias_of] == ["tied"]
    assert index["tied"].alias_of == "a"


def test_torchs_own_files_in_shards(tmp_path: Path) -> None:
    torch.save({"a": A}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": B}, tmp_path / "pytorch_model-00002-of-00002.bin")
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / TORCH_WEIGHTS_INDEX).write_text(json.dumps({"weight_map": names}))
    _same(_open(tmp_path), {"a": A, "b": B})


@pytest.mark.parametrize("weights", [{"state_dict": {"a": A}}, {"a": A, "epoch": 3}, [A], {1: A}], ids=str)
def test_a_file_of_torch_that_holds_other_things_is_not_read_in_part(weights: Any, tmp_path: Path) -> None:
    torch.save(weights, tmp_path / TORCH_WEIGHTS)
    with pytest.raises(DamagedError, match=TORCH_WEIGHTS):
        _open(tmp_path)


def test_safetensors_go_before_torchs_own_files(tmp_path: Path) -> None:
    torch.save({"a": A * 2}, tmp_path / TORCH_WEIGHTS)
    safetensors.torch.save_file({"a": A}, tmp_path / WEIGHTS)
    _same(_open(tmp_path), {"a": A})


def test_a_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not HuggingFaceLayout().recognises(tmp_path)
    assert not is_model_directory(tmp_path)
    with pytest.raises(NotFoundError):
        _open(tmp_path)
    safetensors.torch.save_file({"a": A}, tmp_path / WEIGHTS)
    assert is_model_directory(tmp_path)
    assert find_layout(tmp_path) is not None
    assert set(open_directory(tmp_path)) == {"a"}


# Companions


def test_companions_are_all_but_weights(tmp_path: Path) -> None:
    companions = [
        "added_tokens.json", "chat_template.jinja", "config.json", "generation_config.json", "merges.txt",
        "modeling_custom.py", "preprocessor_config.json", "special_tokens_map.json", "spiece.model", "tokenizer.json",
        "tokenizer_config.json", "vocab.json",
    ]  # fmt: skip
    others = [
        WEIGHTS,
        ONE,
        WEIGHTS_INDEX,
        TORCH_WEIGHTS,
        TORCH_WEIGHTS_INDEX,
        "model.gguf",
        "README.md",
        ".gitattributes",
    ]
    for name in companions + others:
        (tmp_path / name).touch()
    (tmp_path / "onnx").mkdir()
    assert [path.name for path in companion_files(tmp_path)] == companions


def test_companions_lie_within_beside_or_in_the_role_directory(tmp_path: Path) -> None:
    role = tmp_path / "actor"
    places = (role, tmp_path / "actor_huggingface", role / "huggingface")
    role.mkdir()
    assert find_companions(role) is None
    for place in places:  # from the least to the most preferred
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text("{}")
        assert find_companions(role) == place


def test_a_config_is_read_or_its_fault_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json: no such file; give .* --hf_model_path"):
        read_config(tmp_path)
    for text in ("", "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(DamagedError, match=r"config\.json: not "):
            read_config(tmp_path)
    for key, values in {
        "model_type": (5, ["llama"], {}),
        "architectures": (7, "LlamaForCausalLM", [7], {}),
        "text_config": (5, [1], "x"),
    }.items():
        for value in values:
            (tmp_path / "config.json").write_text(json.dumps({key: value}))
            with pytest.raises(DamagedError, match=rf"config\.json: {key} is "):
                read_config(tmp_path)
    config = {"model_type": "qwen2", "architectures": None, "text_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == config
