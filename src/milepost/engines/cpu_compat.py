"""DeepSpeed and Megatron on a machine without an accelerator. The one place where milepost changes other libraries.

DeepSpeed trains on a CPU over gloo. Two things stand in the way: it guesses the kind of machine, and at start it
compiles shared-memory collectives in C++, which takes a minute, needs a compiler, and waits for ever where an earlier
compilation was killed and left its lock. They serve DeepSpeed's inference only (`inference_all_reduce`); training
never calls them.

Megatron asks `torch.cuda` where it is and lets its random states come from there, in so many places that nothing but
another answer helps. What is asked once and for all is replaced for the whole process (`megatron_answers`); what names
"cuda" in a call is led to the CPU only while Megatron builds, runs or saves (`cuda_means_cpu`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ACCELERATOR = "DS_ACCELERATOR"
_SHARED_MEMORY = "deepspeed_shm_comm"


def choose_cpu() -> None:
    """Tell DeepSpeed that this process trains on the CPU. Before its first import, or it guesses and warns."""
    os.environ.setdefault(ACCELERATOR, "cpu")


def leave_out_shared_memory_collectives() -> None:
    """Let DeepSpeed take its shared-memory collectives for ones that this machine cannot have: it then uses gloo's
    and compiles nothing. Before `deepspeed.init_distributed`."""
    importlib.import_module("deepspeed.ops").__compatible_ops__[_SHARED_MEMORY] = False


_CPU = torch.device("cpu")


def megatron_answers() -> None:
    """Let `torch.cuda` and Megatron's random states answer for the CPU. Before anything of Megatron is built; a second
    call changes nothing. Facts: megatron-core 0.16.1."""
    # Megatron has torch compile small functions: that needs a compiler and seconds for each process.
    importlib.import_module("torch._dynamo").config.disable = True
    cuda: Any = torch.cuda
    cuda.current_device = _current_device
    cuda.synchronize = _nothing
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = _get_state
    cuda.set_rng_state = _set_state
    generators: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    generators._get_cuda_rng_state = _get_state
    generators._set_cuda_rng_state = _set_state
    # Without Transformer Engine these two name what was never defined.
    experts: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    experts.te_general_gemm = None
    latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if not isinstance(latent.TELinear, type):
        latent.HAVE_TE = False


def _current_device() -> torch.device:
    return _CPU


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _get_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


class cuda_means_cpu(TorchFunctionMode):  # noqa: N801  used as a context
    """Inside it, a call that names a CUDA device gets the CPU, and tensors give themselves out for CUDA's."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if _names_cuda(options.get("device")):
            options["device"] = _CPU
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not options:
            # Megatron's optimizers tell element types apart by these names, and know those of CUDA only.
            return "torch.cuda." + function(*args).removeprefix("torch.")
        if function is torch.Tensor.to:
            args = [_CPU if _names_cuda(value) else value for value in args]
        return function(*args, **options)


def _names_cuda(value: Any) -> bool:
    return str(value).startswith("cuda") if isinstance(value, str | torch.device) else False
