"""megatron-core on a machine without an accelerator: what it must be told so that its models run and save on CPU.

Only for processes of tests; nothing here is undone. Facts: megatron-core 0.16.1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")


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


def parallel(tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None) -> Any:
    """Megatron's process groups of these sizes over all ranks, in place of any before."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    for group in set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}:
        dist.destroy_process_group(group)  # each has threads of its own, and Megatron makes dozens
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    return parallel_state


def end_saver() -> None:
    """End the process in which Megatron's saver keeps its results: it would outlive a rank that is killed."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue, filesystem_async._results_queue = filesystem_async._results_queue, None
    if queue is not None:
        queue._manager.shutdown()


def latent_core_attention() -> type:
    """Attention for multi-latent attention: the local one takes no sizes of keys and values of its own."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentAttention(DotProductAttention):
        def __init__(self, *args: Any, k_channels: Any = None, v_channels: int | None = None, **options: Any) -> None:
            super().__init__(*args, **options)
            if v_channels:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return LatentAttention
