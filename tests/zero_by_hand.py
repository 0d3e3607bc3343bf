"""DeepSpeed's files written by hand with torch, after its rules: any shapes, ranks and sub-groups, and any fault.

tests/interop/test_deepspeed_reading.py holds these files against DeepSpeed's own reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Groups = Sequence[Mapping[str, torch.Tensor]]


def part(tensor: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """A rank's part of a tensor under ZeRO-3: flattened, filled up with zeros, cut evenly."""
    length = -(-tensor.numel() // world_size)
    padded = torch.cat([tensor.reshape(-1), tensor.new_zeros(length * world_size - tensor.numel())])
    return padded[rank * length : (rank + 1) * length].clone()


def sub_groups(group: Mapping[str, torch.Tensor], world_size: int, size: int) -> list[dict[str, torch.Tensor]]:
    """The weights of a parameter group in sub-groups: each is full once its parts of a rank have `size` elements."""
    found: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in group.items():
        if sum(part(held, world_size, 0).numel() for held in found[-1].values()) >= size:
            found.append({})
        found[-1][name] = tensor
    return found


def moment(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Moments that tell whose they are."""
    return tensor * 2 + 1 if kind == "exp_avg" else tensor * tensor + 0.5


def write_zero3(
    folder: Path,
    groups: Groups,
    world_size: int,
    *,
    sub_group_size: int = 1_000_000_000,
    frozen: Mapping[str, torch.Tensor] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    shared: Mapping[str, str] | None = None,
    step: Any = 3,
    client: Mapping[str, Any] | None = None,
    prefix: str = "bf16_",
) -> dict[str, torch.Tensor]:
    """The files of every rank of a ZeRO-3 save; returns what the index must hold, by its names."""
    folder.mkdir(parents=True, exist_ok=True)
    frozen, buffers, shared = frozen or {}, buffers or {}, shared or {}
    parts = [one for group in groups for one in sub_groups(group, world_size, sub_group_size)]
    names = [name for one in parts for name in one]
    for rank in range(world_size):
        model = {
            "module": {
                **{name: torch.empty(0, dtype=torch.bfloat16) for name in (*names, *frozen, *shared)},
                **buffers,
            },
            "buffer_names": list(buffers),
            "param_shapes": [{name: tensor.shape for name, tensor in one.items()} for one in parts],
            "frozen_param_shapes": {name: tensor.shape for name, tensor in frozen.items()},
            "frozen_param_fragments": {name: part(tensor, world_size, rank) for name, tensor in frozen.items()},
            "shared_params": dict(shared) if rank == 0 else {},
            "lr_scheduler": {"last_epoch": 3},
            "global_steps": 3,
            "dp_world_size": world_size,
            "mp_world_size": 1,
            "ds_version": "0.19.8",
            **(client or {}),
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")

        def flat(one: Mapping[str, torch.Tensor], rank: int = rank) -> torch.Tensor:
            return torch.cat([part(tensor, world_size, rank) for tensor in one.values()])

        state = {
            number: {
                "step": torch.tensor(float(step)) if isinstance(step, float) else step,
                **{
                    kind: flat({name: moment(tensor, kind) for name, tensor in one.items()})
                    for kind in ("exp_avg", "exp_avg_sq")
                },
            }
            for number, one in enumerate(parts)
        }
        optim = {
            "zero_stage": 3,
            "partition_count": world_size,
            "optimizer_state_dict": {"state": state, "param_groups": _param_groups(groups, len(parts))},
            "fp32_flat_groups": [flat(one) for one in parts],
        }
        torch.save({"optimizer_state_dict": optim}, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    tied = {
        alias: value
        for alias, name in shared.items()
        for one in (*groups, frozen)
        if (value := one.get(name)) is not None
    }
    return {**_expected(groups, step), **frozen, **buffers, **tied}


def write_zero12(
    folder: Path,
    groups: Groups,
    world_size: int,
    *,
    stage: int = 2,
    others: Mapping[str, torch.Tensor] | None = None,
    step: Any = 3,
    elastic: bool = False,
    aligned: int = 1,
) -> dict[str, torch.Tensor]:
    """The files of a ZeRO-1 or 2 save; returns what the index must hold, by its names.

    others:   frozen weights and buffers
    elastic:  the older form of the optimizer's state, without its padding
    aligned:  elements to which each weight of a group is aligned
    """
    folder.mkdir(parents=True, exist_ok=True)
    others = others or {}
    model = {
        "module": {
            **{name: tensor.bfloat16() for group in groups for name, tensor in group.items()},
            **others,
        },
        "buffer_names": [],
        "param_shapes": [{name: tensor.shape for name, tensor in group.items()} for group in groups],
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 3,
        "dp_world_size": world_size,
        "ds_version": "0.19.8",
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    paddings = [_alignment([tensor.numel() for tensor in group.values()], aligned) for group in groups]
    for rank in range(world_size):
        masters, lost, states = [], [], []
        for group, padding in zip(groups, paddings, strict=True):
            kept, left_out = _partition(list(group.values()), padding, world_size, rank)
            masters.append(kept)
            lost.append(left_out)
            state = {"step": torch.tensor(float(step)) if isinstance(step, float) else step}
            for kind in ("exp_avg", "exp_avg_sq"):
                values, _ = _partition([moment(tensor, kind) for tensor in group.values()], padding, world_size, rank)
                state[kind] = values if elastic else torch.cat([values, torch.zeros(left_out)])
            states.append(state)
        optim = {
            "zero_stage": stage,
            "partition_count": [world_size] * len(groups),
            "single_partition_of_fp32_groups": masters,
            "group_paddings": lost,
            "base_optimizer_state": (
                states
                if elastic
                else {"state": dict(enumerate(states)), "param_groups": _param_groups(groups, len(groups))}
            ),
            **({"param_alignment_paddings": paddings} if aligned > 1 else {}),
        }
        torch.save({"optimizer_state_dict": optim}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return {**_expected(groups, step), **others}


def _alignment(numels: Sequence[int], aligned: int) -> list[int]:
    """Elements left free behind each weight but the last, so that the next begins at a multiple of `aligned`."""
    paddings, position = [], 0
    for place, numel in enumerate(numels):
        position += numel
        paddings.append(0 if place == len(numels) - 1 else -position % aligned)
        position += paddings[-1]
    return paddings


def _partition(
    tensors: Sequence[torch.Tensor], paddings: Sequence[int], world_size: int, rank: int
) -> tuple[torch.Tensor, int]:
    """A rank's part of a group without the padding at the group's end, and how much padding that was."""
    whole = torch.cat([
        value for tensor, padding in zip(tensors, paddings, strict=True)
        for value in (tensor.reshape(-1), torch.zeros(padding))
    ])  # fmt: skip
    length = 2 * -(-whole.numel() // (2 * world_size))
    mine = whole[rank * length : (rank + 1) * length].clone()
    return mine, length - mine.numel()


def _param_groups(groups: Groups, count: int) -> list[dict[str, Any]]:
    numbers = iter(range(count))
    own = [{"lr": 0.1 * (place + 1), "betas": (0.9, 0.999), "params": []} for place in range(len(groups))]
    for number in numbers:
        own[min(number, len(own) - 1)]["params"].append(number)
    return own


def _expected(groups: Groups, step: Any) -> dict[str, torch.Tensor]:
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in ((name, tensor) for group in groups for name, tensor in group.items()):
        expected[name] = tensor
        for kind in ("exp_avg", "exp_avg_sq"):
            expected[f"optim/{name}/{kind}"] = moment(tensor, kind)
        expected[f"optim/{name}/step"] = torch.tensor(float(step))
    return expected
