"""Whole moments by number, as Megatron's optimizer for 16-bit models writes them where it is not distributed.

    iter_0000123/mp_rank_.../model_optim_rng.pt, in it under `optimizer`
        optimizer              torch's own: state (number -> step, exp_avg, exp_avg_sq), param_groups (numbers)
        fp32_from_fp16_params  for each group the float32 copies of its parameters

of which there is a list of two where experts are dealt out to ranks. Each group has its parameters in the model's
order; vectors and biases are in the one without weight decay (`recovered` has how that is proved). Of a model
in float32 there are no copies, so nothing proves the order, and such files are left. Source: megatron-core 0.16,
`optimizer/optimizer.py`, `optimizer/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from milepost.layouts.inert import TensorRef
from milepost.layouts.megatron.files import RankFile
from milepost.layouts.megatron.recovered import (
    FROZEN,
    MASTER,
    MOMENTS,
    Parameter,
    Recovered,
    States,
    counted,
    is_master,
    optimizers_of,
    parameters_of,
)
from milepost.layouts.torchfile import TorchFile

COPIES = "fp32_from_fp16_params"


def read_numbered(ranks: Sequence[RankFile]) -> Recovered:
    """The numbered state in the files of ranks; nothing where they have none, or none that could be proved."""
    found: dict[int, tuple[TorchFile, States]] = {}
    counts: set[float] = set()
    for number, rank in enumerate(ranks):
        states: dict[Parameter, Mapping[str, TensorRef]] = {}
        for part, saved in optimizers_of(rank):
            if COPIES not in saved:
                continue
            own = _states(rank, parameters_of(rank, part), saved)
            if own is None:
                return Recovered(
                    unread=f"optimizer state: {rank.file.path} numbers its parameters, in no order of its model that "
                    f"Megatron is known to write, {FROZEN}"
                )
            states |= own
            counts |= set(_counts(rank.file, saved))
        if states:
            found[number] = (rank.file, states)
    return counted(found, counts) if found else Recovered()


def _states(rank: RankFile, parameters: Sequence[Parameter], saved: Mapping[str, Any]) -> States | None:
    """What of one optimizer is each parameter's; None where that cannot be told."""
    groups, state, copies = _groups(saved), _state(saved), saved[COPIES]
    found: dict[Parameter, Mapping[str, TensorRef]] = {}
    for group, masters in zip(groups, copies if isinstance(copies, list) else [], strict=False):
        members = [p for p in parameters if len(groups) == 1 or _decays(rank, p) == (_decay(group) != 0)]
        numbers = group.get("params")
        if not isinstance(masters, list) or not isinstance(numbers, list):
            return None
        if not len(members) == len(numbers) == len(masters):
            return None
        for (stage, name), number, master in zip(members, numbers, masters, strict=True):
            weight, moments = rank.chunks[stage][name], state.get(number, {})
            refs = {MASTER: master, **{kind: moments.get(kind) for kind in MOMENTS}}
            fitting = all(isinstance(ref, TensorRef) and ref.shape == weight.shape for ref in refs.values())
            if not fitting or not is_master(rank.file, master, rank.file, weight):
                return None
            found[stage, name] = refs
    return found if len(found) == len(parameters) else None


def _groups(saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = saved.get("optimizer")
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _state(saved: Mapping[str, Any]) -> dict[Any, Mapping[str, Any]]:
    inner = saved.get("optimizer")
    state = inner.get("state") if isinstance(inner, dict) else None
    items = state.items() if isinstance(state, dict) else ()
    return {number: of_one for number, of_one in items if isinstance(of_one, dict)}


def _decays(rank: RankFile, parameter: Parameter) -> bool:
    """Whether Megatron lets a parameter decay."""
    stage, name = parameter
    return len(rank.chunks[stage][name].shape) != 1 and not name.endswith(".bias")


def _decay(group: Mapping[str, Any]) -> Any:
    return group.get("wd_mult", group.get("weight_decay"))


def _counts(file: TorchFile, saved: Mapping[str, Any]) -> Iterator[float]:
    """The counts of steps: torch's AdamW has one for each parameter, others one for each group."""
    for group in _groups(saved):
        if isinstance(group.get("step"), int | float):
            yield float(group["step"])
    for state in _state(saved).values():
        step = state.get("step")
        if isinstance(step, TensorRef):
            step = file.entry(step).numpy().item()
        if isinstance(step, int | float):
            yield float(step)
