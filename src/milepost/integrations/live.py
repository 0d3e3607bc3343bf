"""A live model as an index: names, element types and global shapes, and where the bytes of each tensor are.

The index is what a layout would draw of the same model's files, so the mapping to Hugging Face, with its checks, is the
one of `milepost merge`. The `file` of a byte source is the name of the tensor in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from milepost.errors import CallError, MismatchError
from milepost.index import DTYPES, Box, ByteSource, Chunk, Shape, TensorEntry, TensorIndex, contiguous_strides
from milepost.mapping import names
from milepost.mapping.architectures import expected
from milepost.mapping.wrappers import HEAD, PRETRAINED, VALUE, take_part

_FSDP1 = "FullyShardedDataParallel"


@dataclass(frozen=True)
class LiveModel:
    """One model inside a wrapped one, as it is to lie in a Hugging Face directory.

    module:   the Hugging Face model
    prefix:   in front of the names of `tensors` in the wrapped model's state dict
    inner:    in front of the module's own names in `tensors`, where a value head of TRL's stands beside it
    tensors:  name in the module's state dict -> the parameter or buffer itself, perhaps sharded
    index:    what is to be written; its sources name `tensors`
    config:   what config.json must say, element type not yet made true
    """

    module: nn.Module
    prefix: str
    inner: str
    tensors: Mapping[str, torch.Tensor]
    index: TensorIndex
    config: Mapping[str, Any]

    def sources(self) -> list[str]:
        """The tensors in memory that hold what is to be written, in the model's order, each once."""
        wanted = {chunk.source.file for entry in self.index.entries.values() for chunk in entry.chunks}
        return [name for name in self.tensors if name in wanted]


def unwrap(model: Any) -> nn.Module:
    """The model inside DeepSpeed's engine, DDP and torch.compile.

    Raises CallError for what is no model, and for FSDP1, whose parameters have lost their shapes.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or is_deepspeed_engine(model):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        else:
            break
    if not isinstance(model, nn.Module):
        raise CallError(f"{type(model).__name__} is no model; give the engine, or the wrapped model")
    if any(type(module).__name__ == _FSDP1 for module in model.modules()):
        raise CallError(
            "the model is under FSDP1, whose flat parameters cannot be taken apart here; use FSDP2, or save a "
            "checkpoint and run `milepost merge` on it"
        )
    return model


def is_deepspeed_engine(model: Any) -> bool:
    """Whether this is a DeepSpeed engine."""
    return hasattr(model, "zero_optimization_stage") and hasattr(model, "module")


def find_model(wrapped: nn.Module, prefix: str) -> LiveModel:
    """The model whose tensors have `prefix` in front of their names; the whole of `wrapped` for an empty one.

    Raises CallError where there is none, or where it is no Hugging Face model; MismatchError or IncompleteError where
    it does not hold exactly what its config asks for.
    """
    model = submodule(wrapped, prefix)
    path = next(name for name, module in wrapped.named_modules() if module is model)
    state = nn.Module.state_dict(model, keep_vars=True)
    held = {name: tensor for name, tensor in state.items() if _is_tensor(name, tensor)}
    index = _picture(held, prefix)
    inner = ""
    beside: Mapping[str, TensorEntry] = {}
    if {PRETRAINED, HEAD} <= {name for name, _ in model.named_children()}:
        part = take_part(index, VALUE)
        index, beside, inner = part.index, part.beside, f"{PRETRAINED}."
        model = submodule(model, inner)
    config = true_config(model)
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    index = index.with_entries({name: entry for name, entry in index.items() if name not in unsaved})
    _check_ties(index, config)
    mapped = names.to_huggingface(index, config)
    entries = {**mapped.index, **beside}
    return LiveModel(model, f"{path}." if path else "", inner, held, mapped.index.with_entries(entries), mapped.config)


def submodule(wrapped: nn.Module, prefix: str) -> nn.Module:
    """The part whose tensors have `prefix` in front of their names. CallError where there is none."""
    try:
        return unwrap(wrapped.get_submodule(prefix.rstrip(".")))
    except AttributeError:
        children = ", ".join(f"{name}." for name, _ in wrapped.named_children())
        raise CallError(
            f"the model ({type(wrapped).__name__}) has no part {prefix!r}; it has {children}; "
            "give one of these as prefix, or an empty one for the whole model"
        ) from None


def true_config(model: nn.Module) -> dict[str, Any]:
    """What `save_pretrained` writes as config.json, the model's own class in it."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise CallError(
            f"{type(model).__name__} has no config of transformers, so it cannot be written as a Hugging Face model"
        )
    content: dict[str, Any] = json.loads(config.to_json_string())
    # What torch's FSDP2 makes of a class while it shards a model.
    content["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    return content


def global_shape(tensor: torch.Tensor) -> Shape:
    """The shape of the whole tensor: ZeRO-3 leaves a placeholder of size 0 in the place of a parameter."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's name of the element type."""
    return str(tensor.dtype).removeprefix("torch.")


def _is_tensor(name: str, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if name.endswith("_extra_state"):
        return False
    raise CallError(f"{name} is a {type(value).__name__}, which a safetensors file cannot hold")


def _picture(held: Mapping[str, torch.Tensor], prefix: str) -> TensorIndex:
    first: dict[Any, str] = {}
    entries: dict[str, TensorEntry] = {}
    for name, tensor in held.items():
        shape, dtype = global_shape(tensor), dtype_name(tensor)
        if not all(shape) or tensor.is_meta:
            where = " on the meta device" if tensor.is_meta else ""
            raise CallError(
                f"{prefix}{name} has no values here (shape {list(shape)}{where}): "
                "a placeholder of a parameter that is kept elsewhere; give the engine that holds it"
            )
        if dtype not in DTYPES:
            raise CallError(f"{prefix}{name} is {dtype}, which a safetensors file cannot hold")
        source = first.setdefault(_memory(tensor), name)
        chunk = Chunk(Box.whole(shape), ByteSource(source, 0, contiguous_strides(shape)))
        entries[name] = TensorEntry(dtype, shape, (chunk,), None if source == name else source)
    return TensorIndex(entries, "live")


def _memory(tensor: torch.Tensor) -> Any:
    """The same for two names of one tensor. A sharded one has no memory to tell it by, so the object itself counts."""
    if type(tensor.data) is torch.Tensor and tensor.numel():
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return id(tensor)


def _check_ties(index: TensorIndex, config: Mapping[str, Any]) -> None:
    """Raise where the config says that two tensors are one and in memory they are two."""
    for alias, original in names.ties(index, config, expected(config)).items():
        if alias in index and original in index:
            sources = {chunk.source.file for name in (alias, original) for chunk in index[name].chunks}
            if len(sources) > 1:
                raise MismatchError(
                    f"{alias} and {original} are two tensors in memory, but the model's config says that they are one; "
                    "set config.tie_word_embeddings to what is true"
                )
