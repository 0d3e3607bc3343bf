"""Over how many ranks Megatron cuts a model, and along what: sizes, process groups, the layers of each stage."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from milepost.engines import cpu_compat, rng
from milepost.errors import CallError


@dataclass(frozen=True)
class Parallel:
    """Over how many ranks a model is cut, and along what. What is left of the world is data-parallel.

    tensor:            ranks that each hold a part of every matrix
    pipeline:          stages
    virtual_pipeline:  chunks of layers that each stage holds, in turn; None: one
    expert:            ranks over which the experts are dealt out; they are among the data-parallel ones
    expert_tensor:     ranks that each hold a part of an expert: a divisor of `tensor`; None: as `tensor`
    sequence:          cut what lies between the matrices along the sequence, over the tensor-parallel ranks; None:
                       where experts are trained, which Megatron does in no other way
    first, last:       layers of the first and the last stage; None: as many as each of the others
    count_embedding, count_loss: divide the stages as if embedding and loss were a layer each
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool | None = None
    first: int | None = None
    last: int | None = None
    count_embedding: bool = False
    count_loss: bool = False


def start(parallel: Parallel, device: torch.device, seed: int) -> None:
    """Make Megatron's process groups and random states. All ranks call it together, once; a second call with other
    sizes is an error of the caller.

    Raises CallError where the sizes do not go into the number of ranks.
    """
    size = dist.get_world_size()
    model = parallel.tensor * parallel.pipeline
    if size % model:
        raise CallError(
            f"tensor_model_parallel_size={parallel.tensor} times pipeline_model_parallel_size={parallel.pipeline} is "
            f"{model}, which does not go into {size} processes; change --nproc or the sizes"
        )
    etp = parallel.tensor if parallel.expert_tensor is None else parallel.expert_tensor
    if size % (parallel.expert * etp * parallel.pipeline):
        raise CallError(
            f"expert_model_parallel_size={parallel.expert} times expert_tensor_parallel_size={etp} times "
            f"pipeline_model_parallel_size={parallel.pipeline} does not go into {size} processes"
        )
    if parallel.tensor % etp:
        raise CallError(
            f"expert_tensor_parallel_size={etp} does not divide tensor_model_parallel_size={parallel.tensor}; an "
            "expert is cut as the rest, or less"
        )
    if parallel.virtual_pipeline is not None and parallel.pipeline == 1:
        raise CallError("virtual_pipeline_model_parallel_size needs a pipeline_model_parallel_size above 1")
    if device.type == "cpu":
        cpu_compat.megatron_answers()
    else:
        torch.cuda.set_device(device)
    state = importlib.import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(
        parallel.tensor,
        parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        create_gloo_process_groups=device.type != "cpu",  # beside the others, which are gloo's there already
    )
    with rng.isolated():  # it seeds the generator of the device, which is torch's own on the CPU
        importlib.import_module("megatron.core.tensor_parallel.random").model_parallel_cuda_manual_seed(
            seed, force_reset_rng=True
        )


def layers_of_stages(layers: int, parallel: Parallel) -> list[int]:
    """How many layers each stage of the pipeline has, by Megatron's own rules.

    Raises CallError where they do not divide so.
    """
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline or 1
    counted = parallel.count_embedding or parallel.count_loss
    named = {stage: n for stage, n in ((0, parallel.first), (stages - 1, parallel.last)) if n is not None}
    if named and counted:
        raise CallError(
            "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage say it all: leave out "
            "account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split"
        )
    if stages == 1 and (named or counted):
        raise CallError("uneven stages need a pipeline_model_parallel_size above 1")
    unnamed = stages - len(named)
    rest = layers + parallel.count_embedding + parallel.count_loss - sum(named.values())
    found = [named.get(stage, rest // max(unnamed, 1)) for stage in range(stages)]
    chunk = [n // chunks for n in found]  # the smallest of each stage
    chunk[0] -= parallel.count_embedding
    chunk[-1] -= parallel.count_loss
    if sum(found) != rest + sum(named.values()) or any(n % chunks for n in found) or min(chunk) < 1:
        raise CallError(
            f"num_hidden_layers={layers} does not divide by the {stages * chunks} stages of "
            "pipeline_model_parallel_size times virtual_pipeline_model_parallel_size"
            + (f", where they have {found} layers" if named else "")
            + (", embedding and loss counted as asked for" if counted else "")
            + ("" if named or counted else "; override_transformer_config makes them uneven")
        )
    found[0] -= parallel.count_embedding
    found[-1] -= parallel.count_loss
    return found
