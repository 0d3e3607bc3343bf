"""`milepost.save_policy`: one model out of a wrapped, sharded one, as a Hugging Face directory.

    milepost.save_policy(engine, "my-policy", processing_class=tokenizer)
    milepost.save_policy(engine, "my-value-model", prefix="value_model.")

The same line works under DeepSpeed ZeRO-1, 2 and 3, DDP, FSDP2 and without any of them. Every rank makes the call.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import xxhash

from milepost.checkpoint.comm import agree, default_communicator, on_rank_0, together
from milepost.checkpoint.meeting import meet_all
from milepost.errors import CallError, MismatchError, WriteError
from milepost.index import TensorIndex
from milepost.integrations import adapter, gather
from milepost.integrations.live import LiveModel, find_model, is_deepspeed_engine, unwrap
from milepost.integrations.methods import (
    DIRECT,
    GATHER,
    METHODS,
    PATIENCE,
    STREAM,
    PolicyOptions,
    write_weights,
)
from milepost.jobs.merge import MergeReport, main_dtype, part_dtypes
from milepost.jobs.output import output_directory
from milepost.jobs.prepare import under_cast
from milepost.layouts import open_directory
from milepost.layouts.huggingface import CONFIG
from milepost.layouts.safetensors import with_dtype
from milepost.units import parse_bytes

_CALL = "save_policy"


def save_policy(
    engine: Any,
    output_dir: str | os.PathLike[str],
    prefix: str = "policy.",
    method: str = STREAM,
    *,
    dtype: str = "keep",
    memory_limit: str | int = "256MiB",
    max_shard_size: str | int = "5GB",
    processing_class: Any = None,
    overwrite: bool = False,
    patience: float = PATIENCE,
) -> MergeReport:
    """Save one model of a wrapped, sharded one as a Hugging Face directory, which appears whole or not at all.

    Args:
        engine: DeepSpeed's engine, DDP, an FSDP2 model or a plain one.
        output_dir: where to; only rank 0 writes.
        prefix: in front of the names of the model's tensors ("policy.", "value_model."); empty for the whole model.
        method: three ways to the same file. "stream" gathers as many parameters as `memory_limit` holds, at least one,
            writes them to their place and drops them. "gather" takes the engine's consolidated state dict, which holds
            every model of the engine in rank 0's memory. "direct" gathers this one model on every rank and lets its own
            `save_pretrained` write it.
        dtype: "keep" writes what the model computes with, as Hugging Face does: bfloat16 under a bf16 engine. "fp32"
            writes the optimizer's float32 copies where the engine keeps any (method "stream"); "bf16" and "fp16" cast.
        memory_limit: for "stream"; a parameter that is larger is gathered alone.
        max_shard_size: of a file.
        processing_class: tokenizer or processor to put beside the model.
        overwrite: replace an older export in `output_dir`.
        patience: seconds to wait for the last rank to make the call.

    An adapter of PEFT around the model is saved as PEFT saves it, without the base model.

    Raises MilepostError on all ranks alike: CallError where a rank does not come or the call cannot be served,
    WriteError where the disk refuses, MismatchError or IncompleteError where the tensors are not those of the model's
    config. Nothing is left behind then.
    """
    options = PolicyOptions(
        prefix=prefix,
        method=method,
        dtype=dtype,
        memory_limit=parse_bytes(str(memory_limit)),
        max_shard_size=parse_bytes(str(max_shard_size)),
        processing_class=processing_class,
        patience=patience,
    )
    target = Path(output_dir)
    return write_policy(engine, target, options, lambda: output_directory(target, overwrite=overwrite))


def write_policy(
    engine: Any, target: Path, options: PolicyOptions, place: Callable[[], AbstractContextManager[Path]]
) -> MergeReport:
    """`save_policy` into the directory that `place` yields on rank 0; `target` is its name to the user."""
    begun = monotonic()
    meet_all(_CALL, options.patience)
    comm = default_communicator()
    found: list[LiveModel | adapter.LiveAdapter] = []
    together(comm, lambda: found.append(_find(engine, options)))
    model = found[0]
    wanted = {"prefix": options.prefix, "method": options.method, "dtype": options.dtype}
    agree(comm, target, **wanted, tensors=_outline(model.index))
    with ExitStack() as stack:
        building = on_rank_0(comm, lambda: stack.enter_context(place()))
        try:
            if isinstance(model, adapter.LiveAdapter):
                written = adapter.write_adapter(model, building, comm)
            else:
                written = write_weights(engine, model, options, building, comm)
        except WriteError as error:
            raise WriteError(f"{target}: was not saved: {error}") from None
        on_rank_0(comm, lambda: _finish(model, written, options, building))
        on_rank_0(comm, stack.pop_all().close)
    files = on_rank_0(comm, lambda: sorted(path.name for path in target.iterdir() if path.is_file()))
    # Not after an error: other ranks may be gone then, and to give back what is shared with them could wait for ever.
    comm.close()
    return MergeReport(
        target=target,
        tensors=len(written),
        nbytes=written.nbytes,
        dtypes=dict(Counter(entry.dtype for entry in written.entries.values())),
        files=tuple(files),
        seconds=monotonic() - begun,
    )


def _find(engine: Any, options: PolicyOptions) -> LiveModel | adapter.LiveAdapter:
    """What is to be saved; CallError where the method cannot serve it."""
    method = options.method
    if method not in METHODS:
        raise CallError(f"method={method!r}: choose from {', '.join(METHODS)}")
    wrapped = unwrap(engine)
    if getattr(engine, "autotp_size", lambda: 0)() > 1:
        raise CallError("the engine cuts parameters for tensor parallelism too, and these are not put together here")
    if adapter.is_adapter(wrapped, options.prefix):
        return adapter.find_adapter(wrapped, options.prefix)
    model = find_model(wrapped, options.prefix)
    under_cast(model.index, options.dtype)  # refuses an unknown one
    if method == DIRECT and options.dtype != "keep":
        raise CallError("method='direct' writes what the model holds; for another dtype choose method='stream'")
    if method == DIRECT and not hasattr(model.module, "save_pretrained"):
        raise CallError(f"{type(model.module).__name__} has no save_pretrained; choose method='stream'")
    if method == GATHER and options.dtype == "fp32" and gather.has_masters(model.tensors):
        raise CallError("method='gather' has the 16-bit weights only; for the float32 copies choose method='stream'")
    sharded = any(hasattr(tensor, "ds_id") for tensor in model.tensors.values())
    if method == GATHER and sharded and not is_deepspeed_engine(engine):
        raise CallError(
            f"method='gather' needs DeepSpeed's engine, and this is the {type(engine).__name__} inside it; "
            "give the engine, or choose method='stream'"
        )
    return model


def _finish(
    model: LiveModel | adapter.LiveAdapter, written: TensorIndex, options: PolicyOptions, building: Path
) -> None:
    """Config, generation config, code and tokenizer; and a look at what lies there now."""
    if isinstance(model, LiveModel):
        _write_configs(model, written, building)
        _check_written(model, written, building)
    if options.processing_class is not None:
        options.processing_class.save_pretrained(building)


def _write_configs(model: LiveModel, written: TensorIndex, building: Path) -> None:
    module: Any = model.module
    config = dict(model.config)
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype" if hasattr(module.config, "dtype") else "torch_dtype"] = None
    config = with_dtype(config, main_dtype(written), part_dtypes(written, config))
    (building / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if getattr(module, "generation_config", None) is not None and module.can_generate():
        module.generation_config.save_pretrained(building)
    if getattr(module, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save  # noqa: PLC0415

        custom_object_save(module, building, config=module.config)


def _check_written(model: LiveModel, written: TensorIndex, building: Path) -> None:
    """Raise unless the files hold exactly the tensors that they should: others than ours may have written them."""
    found = open_directory(building, "huggingface")
    seen = {name: (entry.dtype, entry.shape) for name, entry in found.items()}
    wanted = {name: (entry.dtype, entry.shape) for name, entry in written.items()}
    wrong = [name for name in dict.fromkeys((*wanted, *seen)) if seen.get(name) != wanted.get(name)]
    if wrong:
        raise MismatchError(
            f"{type(model.module).__name__}.save_pretrained wrote other tensors than the model holds: "
            f"{', '.join(wrong[:5])}; choose method='stream'"
        )


def _outline(index: TensorIndex) -> str:
    lines = (f"{name} {entry.dtype} {entry.shape}\n" for name, entry in index.items())
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())
