"""Training engines as milepost sees them: live state in named boxes.

base        the protocol, the whole of what a save or a resume asks of an engine
fsdp        PyTorch's FSDP2 (`fully_shard`)
megatron    megatron-core's models and optimizers
deepspeed   DeepSpeed's ZeRO
optim       what optimizers have in common
companions  config and tokenizer, saved beside a role
rng         the random number generators of a process
cpu_compat  what Megatron needs on a machine without GPU

Each engine's module imports its framework, so import the one that is used:
`from milepost.engines.fsdp import FsdpEngine`.
"""

from milepost.engines.base import Engine, LiveTensor, RoleFiles

__all__ = ["Engine", "LiveTensor", "RoleFiles"]
