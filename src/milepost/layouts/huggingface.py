"""The Hugging Face layout: safetensors files, their index, and the model's small companion files.

    model.safetensors                          or model-0000i-of-0000n.safetensors + model.safetensors.index.json
    config.json generation_config.json tokenizer*, chat_template.jinja, *processor*.json, *.py

A safetensors file is a header (u64 length, JSON: name -> dtype, shape, data_offsets) and the tensors' bytes. A
directory with `pytorch_model.bin` is read too. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from milepost.errors import DamagedError, IncompleteError, NotFoundError
from milepost.fileio import open_to_read, unreadable
from milepost.index import DTYPES, Box, ByteSource, Chunk, TensorEntry, TensorIndex, contiguous_strides
from milepost.layouts.pickles import TensorRef
from milepost.layouts.torchfile import TorchFile

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TORCH_WEIGHTS = "pytorch_model.bin"
TORCH_WEIGHTS_INDEX = "pytorch_model.bin.index.json"
CHECKSUMS = "milepost_checksums.json"
"""Checksums of the files of an export, where they were asked for."""
ADAPTER_CONFIG = "adapter_config.json"
LORA_META = "lora_train_meta.json"
SUBDIRECTORY = "huggingface"
"""Where a role directory of other layouts keeps the companions."""

MAX_HEADER = 100_000_000
"""Longest header that safetensors' own reader takes, in bytes."""

_CONFIG_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        "model_type": ("a name", lambda value: isinstance(value, str)),
        "architectures": (
            "a list of names",
            lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        ),
        "text_config": ("a config", lambda value: isinstance(value, dict)),
    }
)
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_BY_CODE = {dtype.safetensors: dtype.name for dtype in DTYPES.values()}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp")


class HuggingFaceLayout:
    """Reader of a Hugging Face model directory."""

    name = "huggingface"

    def recognises(self, directory: Path) -> bool:
        """Whether weights in one of the known forms lie here."""
        return any((directory / name).exists() for name in (WEIGHTS, WEIGHTS_INDEX, TORCH_WEIGHTS, TORCH_WEIGHTS_INDEX))

    def open(self, directory: Path) -> TensorIndex:
        """The index of the weights under the names that the files have."""
        # The order in which transformers looks, so that what is read is what it would load.
        for single, index_name, read in (
            (WEIGHTS, WEIGHTS_INDEX, read_safetensors),
            (TORCH_WEIGHTS, TORCH_WEIGHTS_INDEX, _read_torch),
        ):
            if (directory / single).exists():
                return TensorIndex(read(directory / single), self.name, (directory / single,))
            if (directory / index_name).exists():
                weight_map = _weight_map(directory / index_name)
                files = tuple(directory / name for name in sorted(set(weight_map.values())))
                return TensorIndex(_read_shards(directory / index_name, weight_map, read), self.name, files)
        raise NotFoundError(f"{directory}: no {WEIGHTS} and no {WEIGHTS_INDEX} here")


def _read_shards(
    index: Path, weight_map: dict[str, str], read: Callable[[Path], dict[str, TensorEntry]]
) -> dict[str, TensorEntry]:
    """Entries of the files that an index names; each name of the index from the file that it gives."""
    files = sorted(set(weight_map.values()))
    missing = [file for file in files if not index.with_name(file).is_file()]
    if missing:
        raise IncompleteError(f"{index.parent}: {index.name} names {', '.join(missing)}, missing here")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        found = read(index.with_name(file))
        lost = [name for name, where in weight_map.items() if where == file and name not in found]
        if lost:
            raise IncompleteError(f"{index.parent}: {index.name} promises {lost[0]}, which {file} lacks")
        entries |= {name: entry for name, entry in found.items() if weight_map.get(name, file) == file}
    return entries


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except _MALFORMED as error:
        raise DamagedError(f"{path}: not an index of weights ({error})") from None
    for file in names.values():
        if Path(file).name != file or file in ("", ".."):
            raise DamagedError(f"{path}: names {file}, which is no file of this directory")
    return names


def read_safetensors(path: Path) -> dict[str, TensorEntry]:
    """Entries of one safetensors file, in the order of its header; every range is checked against the file."""
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size or length > MAX_HEADER:
            raise DamagedError(f"{path}: too short for its own header; it was truncated or is no safetensors file")
        try:
            header = json.loads(file.read(length))
            items = [(name, value) for name, value in header.items() if name != "__metadata__"]
            return {str(name): _safetensors_entry(path, name, value, 8 + length, size) for name, value in items}
        except _MALFORMED as error:
            raise DamagedError(f"{path}: its header cannot be read ({error})") from None


def _safetensors_entry(path: Path, name: str, value: dict[str, Any], base: int, size: int) -> TensorEntry:
    start, end = value["data_offsets"]
    dtype = _BY_CODE.get(value["dtype"])
    if dtype is None:
        raise DamagedError(f"{path}: {name} has the unknown type {value['dtype']}")
    shape = tuple(value["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise DamagedError(f"{path}: {name} has shape {shape} at {start}:{end}")
    source = ByteSource(str(path), base + start, contiguous_strides(shape))
    entry = TensorEntry(dtype, shape, (Chunk(Box.whole(shape), source),))
    if end - start != entry.nbytes or base + end > size:
        raise DamagedError(
            f"{path}: {name} should hold {entry.nbytes} bytes at {start}:{end}, the file ends at {size - base}"
        )
    return entry


def _read_torch(path: Path) -> dict[str, TensorEntry]:
    file = TorchFile(path)
    if not isinstance(file.root, dict) or not all(isinstance(name, str) for name in file.root):
        raise DamagedError(f"{path}: holds no state dict")
    entries: dict[str, TensorEntry] = {}
    first_name: dict[TensorRef, str] = {}
    for name, value in file.root.items():
        if not isinstance(value, TensorRef):
            raise DamagedError(f"{path}: {name} is no whole tensor, so these are no weights of a model")
        original = first_name.setdefault(value, name)
        entries[name] = replace(file.entry(value), alias_of=None if original == name else original)
    return entries


def companion_files(directory: Path) -> list[Path]:
    """The small files that travel with the weights, byte for byte: everything here that is no weight and no index of
    weights, such as configs, tokenizer, chat templates, processors and code named by the config. What describes an
    adapter stays behind: beside whole weights it would make transformers look for the adapter's."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith((*_WEIGHT_SUFFIXES, ".index.json"))
        and path.name not in _OURS
    )


_OURS = {"README.md", "training_args.bin", "milepost_base.json", ADAPTER_CONFIG, LORA_META, CHECKSUMS}
# What HF Trainer and NeMo note of a run beside the model's own files.
_OURS |= {"trainer_state.json", "fqn_to_file_index_mapping.json"}
# What DeepSpeed puts there: the name of the last tag, and its scripts.
_OURS |= {"latest", "zero_to_fp32.py", "zero_to_torch.py"}
# What Megatron and verl note beside a dist checkpoint.
_OURS |= {"metadata.json", "transformer_config.json", "ckpt_contents.json", "latest_checkpointed_iteration.txt"}
_OURS |= {f"{kind}_results.json" for kind in ("all", "train", "eval", "test")}


def find_companions(role_directory: Path) -> Path | None:
    """Where a role directory's companions lie: `huggingface/`, the older sibling `<role>_huggingface`, or itself.

    verl 0.9 has `model/huggingface/` under Megatron. Other trainers put them elsewhere: `.hf_metadata` beside the
    weights (NeMo Automodel), or one or two directories above (HF Trainer: `checkpoint-N/global_stepN`, the output
    directory of `checkpoint-N/pytorch_model_fsdp_0`).
    """
    candidates = (
        role_directory / SUBDIRECTORY,
        role_directory / "model" / SUBDIRECTORY,
        role_directory.with_name(f"{role_directory.name}_{SUBDIRECTORY}"),
        role_directory,
        *(role_directory / weights / ".hf_metadata" for weights in ("", "model", "weights/model")),
    )
    found = next((path for path in candidates if (path / CONFIG).is_file()), None)
    above = (path / name for path in role_directory.resolve().parents[:2] for name in ("", SUBDIRECTORY))
    return found or next((path for path in above if _is_model_config(path)), None)


def _is_model_config(directory: Path) -> bool:
    """Whether a config.json here is a model's: in a directory above, any program can have left one."""
    try:
        return "model_type" in json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of a directory."""
    path = directory / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file; give the model's directory with --hf_model_path") from None
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise DamagedError(f"{path}: not a JSON object")
    for key, (what, fits) in _CONFIG_FORMS.items():
        if config.get(key) is not None and not fits(config[key]):
            raise DamagedError(f"{path}: {key} is {config[key]!r:.40}, not {what}")
    return config


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The head of a safetensors file for (name, dtype, shape) in this order, and each tensor's byte offset in the file.

    The JSON is padded with spaces so that the data begins at a multiple of 8, as the format asks.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    position = 0
    for name, dtype, shape in tensors:
        nbytes = TensorEntry(dtype, shape, ()).nbytes
        header[name] = {
            "dtype": DTYPES[dtype].safetensors,
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        offsets[name] = position
        position += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + offset for name, offset in offsets.items()}


def is_model_directory(directory: Path) -> bool:
    """Whether transformers could load a model from here: a config and weights."""
    return (directory / CONFIG).is_file() and HuggingFaceLayout().recognises(directory)
