"""megatron-core on a machine without an accelerator: what it must be told so that its models run and save on CPU.

Only for processes of tests; nothing here is undone. Facts: megatron-core 0.16.1.
"""

from __future__ import annotations

import queue
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

CPU = torch.device("cpu")
GROUPED = tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 17)
"""Whether megatron-core has experts that lie in one tensor (GroupedMLP), as it had before 0.17."""


def install() -> None:
    """Make `torch.cuda`, as far as megatron-core asks it, answer for the CPU. Before anything of Megatron is built."""
    torch._dynamo.config.disable = True  # Megatron compiles small functions, which costs seconds a process
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # without Transformer Engine these two name what was never defined
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    if GROUPED:  # such experts are made and saved here, not computed with
        from megatron.core.transformer.moe import grouped_gemm_util

        grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None


def parallel(tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None) -> Any:
    """Megatron's process groups of these sizes over all ranks, in place of any before. Megatron makes dozens, and most
    of the time goes into that, so they are made once."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    sizes = (tp, pp, vpp, ep, etp)
    if sizes not in _GROUPS:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            create_gloo_process_groups=False,  # beside the others, which are gloo's there already
        )
        _GROUPS[sizes] = {
            name: value
            for name, value in vars(parallel_state).items()
            if name.startswith("_") and not name.startswith("__") and not callable(value)
        }
    vars(parallel_state).update(_GROUPS[sizes])
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    return parallel_state


_GROUPS: dict[Any, dict[str, Any]] = {}


def save(content: dict[str, Any], directory: Path) -> None:
    """Megatron's own saver, with one writer a rank and no process that keeps its results: it forks a process for each
    writer, and what one costs in time is most of a small save."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(content, str(directory), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))


def latent_core_attention() -> type:
    """Attention for multi-latent attention: the local one takes no sizes of keys and values of its own."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentAttention(DotProductAttention):
        def __init__(self, *args: Any, k_channels: Any = None, v_channels: int | None = None, **options: Any) -> None:
            super().__init__(*args, **options)
            if v_channels:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return LatentAttention
