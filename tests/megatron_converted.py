"""What megatron-core makes of a converted model, read by its own loader, and what `load_pretrained` makes of a Megatron
model. In real processes; a module of its own, so that ranks load no pytest."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_cpu
import torch
import torch.distributed as dist
from megatron_checkpoints import PADDED
from megatron_models import PADDING, Parallel, build, fill

import milepost
from milepost.checkpoint import passing
from milepost.checkpoint.files import StepFiles
from milepost.engines.megatron.dist_checkpoint import write_dist
from milepost.errors import MilepostError, MismatchError


@dataclass(frozen=True)
class Case:
    """A model of `megatron_checkpoints.MODELS`, and how it is cut.

    logits:  whether they are compared with transformers'
    half:    whether Megatron's weights are bfloat16, so that values are cast on the way
    source:  the model whose directory is loaded, where it is not the one that is built: a policy's for its critic
    apart:   whether Megatron asks for tensors of single layers, and the converter was told so
    """

    model: str
    at: Parallel
    logits: bool = True
    half: bool = False
    source: str = ""
    apart: bool = False

    @property
    def converted(self) -> str:
        """Name of the folder that the model was converted into."""
        return f"{self.model}-apart" if self.apart else self.model


CASES = (
    Case("llama", Parallel()),
    Case("llama", Parallel(tp=2)),
    Case("llama", Parallel(pp=2, vpp=2), logits=False),
    Case("qwen2", Parallel(pp=2)),
    Case("qwen3", Parallel(tp=2, pp=2)),
    Case("gemma", Parallel(tp=2)),
    Case("mixtral", Parallel(ep=2)),
    Case("qwen2_moe", Parallel(tp=2, ep=2, etp=1)),
    Case("qwen3_moe", Parallel(pp=2, ep=2)),
    Case("deepseek_v3", Parallel(tp=2, ep=2, etp=1), logits=False),
    Case("critic", Parallel(tp=2, pp=2), logits=False),
    Case("qwen3_moe", Parallel(tp=2, ep=2, etp=1), logits=False, half=True),
    Case("critic", Parallel(tp=2, pp=2), logits=False, source="llama"),
    Case("llama", Parallel(pp=2, vpp=2), logits=False, apart=True),
    Case("mixtral", Parallel(tp=2, ep=2, etp=1), logits=False, apart=True),
)


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("llama", {"hidden_size": 32}, "the model has 16 columns of hidden states, config.json says 32"),
    (
        "llama",
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 2},  # of the same shapes
        "the model has 4 attention heads, config.json says 8",
    ),
    ("llama", {"num_hidden_layers": 5}, "the model has 4 layers, config.json says 5"),
    ("llama", {"intermediate_size": 12}, "gate_proj.weight of shape [24, 16], config.json asks for shape [12, 16]"),
    ("llama", {"vocab_size": 80}, "the model has room for 64 words, config.json says 80"),
    ("llama", {"attention_bias": True}, "q_proj.bias and 15 more, which the model has no place for"),
    ("llama", {"model_type": "olmo2"}, "a model of type olmo2"),
    ("llama", {"model_type": "gemma"}, "norms of the model multiply by weight, those of a gemma do not"),
    ("mixtral", {"num_local_experts": 8}, "the model has 4 experts, config.json says 8"),
    ("qwen2", {"tie_word_embeddings": False}, "the model's output layer is its embedding"),
    ("llama", {"tie_word_embeddings": True}, "the model's output layer is a tensor of its own"),
)
"""Model, what another config.json says, and what a user should hear of."""


BROKEN = (
    ("llama", Parallel(tp=2, pp=2)),
    ("qwen2_moe", Parallel(tp=2, ep=2, etp=1)),
    ("mixtral", Parallel(ep=2)),
)
"""Models and layouts under which ranks pass on what rank 0 sends: to none, in data-parallel groups, and in other groups
for experts than for the rest."""
BROKEN_AFTER = (0, 10)
BROKEN_RANKS = (0, 3)


def load_all(models: str, converted: str, wrong: str) -> dict[str, Any]:
    """Called on four ranks. Returns what this rank found: of each case, and of each config.json in `wrong`."""
    megatron_cpu.install()
    torch.set_grad_enabled(False)
    found = [_load(Path(models), Path(converted) / case.converted, case) for case in CASES]
    said = _refused(Path(models), Path(wrong))
    broken = [_broken(Path(models) / model, Path(wrong) / "broken", at) for model, at in BROKEN]
    full = _full(Path(models) / "llama", Path(wrong))
    sizes = {case.model: _size(Path(models) / case.model) for case in CASES}
    apart = _apart(Path(models) / "llama")
    return {"cases": found, "refused": said, "sizes": sizes, "broken": broken, "full": full, "apart": apart}


def _apart(model: Path) -> list[str]:
    """What this rank hears when not all make the call; when one is given a method that there is not, another one."""
    said = ["was not there"]
    dist.barrier()
    if dist.get_rank() == 0:
        said = [_words(lambda: milepost.load_pretrained([], model, patience=0.3))]
    dist.barrier()
    for method in ("brodcast", "broadcast"):
        given = method if dist.get_rank() == 2 else "sharded"
        said.append(_words(lambda given=given: milepost.load_pretrained([], model, method=given)))
    return said


def _broken(model: Path, copy: Path, at: Parallel) -> list[str]:
    """What a broadcast says on this rank when the file on rank 0 becomes shorter while it is read, at the first window
    or at a later one; and when a rank cannot keep what came, or has no room for a window: the first, the last."""
    _, chunks = _made(model, at)
    wanted = passing.read_as
    said = []
    for after in BROKEN_AFTER:
        read = iter(range(1 << 20))

        def reads(*window: Any, read: Any = read, after: int = after) -> Any:
            if next(read) == after:
                os.truncate(copy / "model.safetensors", 8)
            return wanted(*window)

        if dist.get_rank() == 0:
            shutil.copytree(model, copy)
        with patch.object(passing, "read_as", reads):
            said.append(_said(chunks, copy if dist.get_rank() == 0 else Path("/nowhere")))
        if dist.get_rank() == 0:
            shutil.rmtree(copy)
    for failing in BROKEN_RANKS:
        fails = failing == dist.get_rank()
        with patch.object(passing.LiveSink, "places", _no_memory if fails else passing.LiveSink.places):
            said.append(_said(chunks, model if dist.get_rank() == 0 else Path("/nowhere")))
        with patch.object(passing._Rank, "make_room", _no_memory if fails else passing._Rank.make_room):
            said.append(_said(chunks, model if dist.get_rank() == 0 else Path("/nowhere")))
    return said


def _full(model: Path, root: Path) -> dict[str, str]:
    """What this rank hears when a dist checkpoint is written where one rank's disk takes no more: the kernel refuses
    files above a size. And the last time when all is well."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    _, (chunk,) = _made(model, Parallel(tp=2, pp=2))
    rank, said = dist.get_rank(), {}
    (root / "common").mkdir(exist_ok=True)
    (root / "common/common.pt").touch()
    dist.barrier()
    for name, failing, limit in (
        ("weights", 3, 1 << 12), ("common", 0, None), ("table", 0, None), ("good", None, None)
    ):  # fmt: skip
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state = {"model": chunk.sharded_state_dict(metadata=metadata), "iteration": 7}
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if failing == rank and limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        with patch.object(
            FileSystemWriterAsync, "finish", _no_space if name == "table" else FileSystemWriterAsync.finish
        ):
            said[name] = _words(lambda state=state, name=name: write_dist(state, StepFiles(root, root), name))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return said


def _no_space(writer: Any, *_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", f"{writer.checkpoint_dir}/.metadata")


def _no_memory(*_: Any) -> Any:
    raise MemoryError("no room for this window")


def _said(chunks: list[Any], model: Path) -> str:
    return _words(lambda: milepost.load_pretrained(chunks, model, method="broadcast"))


def _words(act: Callable[[], Any]) -> str:
    try:
        act()
    except MilepostError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def _size(model: Path) -> int:
    from safetensors.torch import load_file

    return sum(value.nbytes for value in load_file(model / "model.safetensors").values())


def _made(model: Path, at: Parallel, *, value: bool = False) -> tuple[Any, list[torch.nn.Module]]:
    """transformers' config, and chunks in which every number is a NaN."""
    from transformers import AutoConfig

    megatron_cpu.parallel(at.tp, at.pp, at.vpp, at.ep, at.etp)
    hf = AutoConfig.from_pretrained(model)
    chunks = build(hf, at, PADDED, value=value)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.fill_(float("nan"))
    return hf, chunks


def _load(models: Path, checkpoint: Path, case: Case) -> dict[str, Any]:
    """What differs from the model filled by `megatron_models`: after Megatron's own loader, and after each method of
    ours, with their reports; and the largest difference of logits where this rank has them."""
    from safetensors.torch import load_file

    model, source = models / case.model, models / (case.source or case.model)
    value = case.model == "critic"
    hf, ours = _made(model, case.at, value=value)
    filled = build(hf, case.at, PADDED, value=value)
    weights = load_file(source / "model.safetensors")
    if case.source:
        weights["score.weight"] = torch.full((1, hf.hidden_size), float("nan"))  # as it was
    fill(filled, hf, weights, PADDED)
    if case.half:
        for chunk in (*ours, *filled):
            chunk.bfloat16()
    found: dict[str, Any] = {"nbytes": sum(p.nbytes for chunk in ours for p in chunk.parameters())}
    for method in ("sharded", "broadcast"):
        hidden = method == "broadcast" and dist.get_rank() > 0
        report = milepost.load_pretrained(ours, "/nowhere" if hidden else source, method=method)
        found[method] = _differing(ours, filled), report
        for chunk in ours:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    if case.source:
        return found
    _load_as_megatron(ours, checkpoint, apart=case.apart)
    padded = [
        bool(value[other == PADDING].any())
        for mine, theirs in zip(ours, filled, strict=True)
        for value, other in zip(mine.parameters(), theirs.parameters(), strict=True)
    ]
    return {**found, "megatron": _differing(ours, filled), "padded": any(padded), "logits": _logits(ours, model, case)}


def _load_as_megatron(chunks: list[Any], checkpoint: Path, *, apart: bool) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    names = [f"model{n}" for n in range(len(chunks))] if len(chunks) > 1 else ["model"]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "non_homogeneous_layers": apart}
    wanted = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)}
    loaded = dist_checkpointing.load(wanted, str(checkpoint))
    for name, chunk in zip(names, chunks, strict=True):
        chunk.load_state_dict(loaded[name])


def _refused(models: Path, wrong: Path) -> list[list[str]]:
    """How both methods refuse a model whose config.json is another one's; every number must be as it was."""
    made = {
        name: _made(models / name, Parallel(ep=2) if name == "mixtral" else Parallel(tp=2, pp=2))[1]
        for name in ("mixtral", "qwen2", "llama")  # groups of the last one made stay: dense models need no others
    }
    said = []
    for number, (model, *_) in enumerate(WRONG):
        chunks, answers = made[model], []
        for method in ("sharded", "broadcast"):
            try:
                milepost.load_pretrained(chunks, wrong / str(number), method=method)
            except MismatchError as error:
                answers.append(str(error))
            untouched = all(bool(p.isnan().all()) for chunk in chunks for p in chunk.parameters())
            answers.append("nothing was read" if untouched else "something was read")
        said.append(answers)
    return said


def _differing(ours: list[Any], filled: list[Any]) -> list[str]:
    """Names of tensors that are not, bit for bit, those of the filled model; rows that pad the vocabulary aside."""
    return [
        name
        for mine, theirs in zip(ours, filled, strict=True)
        for (name, value), other in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True)
        if isinstance(value, torch.Tensor)
        and not torch.equal(_bits(value.masked_fill(other == PADDING, PADDING)), _bits(other))
    ]


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _logits(chunks: list[Any], directory: Path, case: Case) -> float | None:
    """The largest difference of Megatron's logits from those of transformers, as a share of the largest logit."""
    from megatron.core import parallel_state as state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    if not case.logits:
        return None
    (model,) = chunks
    tokens = torch.randint(33, (2, 7), generator=torch.Generator().manual_seed(0))
    positions, mask = torch.arange(7)[None].expand(2, -1), torch.ones(1, 1, 7, 7, dtype=torch.bool).tril().logical_not()
    if not state.is_pipeline_first_stage():
        before = torch.empty(7, 2, model.config.hidden_size)
        dist.recv(before, state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(before)
    out = model(tokens, positions, mask)
    if not state.is_pipeline_last_stage():
        dist.send(out.contiguous(), state.get_pipeline_model_parallel_next_rank())
        return None
    ours = gather_from_tensor_model_parallel_region(out)[..., :33]
    wanted = torch.load(directory / "logits.pt")
    return float((ours - wanted).abs().max() / wanted.abs().max().clamp(min=1))
