"""What a LoRA adapter makes of which tensor of the mapped base: the updates of `--lora merge`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from milepost.errors import MismatchError
from milepost.jobs.lora_training import Target, Training, shapes_in_memory, targets
from milepost.mapping import Mapped
from milepost.mapping.lora import Adapter, Factors, owner_of
from milepost.transfer.dora import Dora
from milepost.transfer.execute import Update
from milepost.transfer.lowrank import LowRank, Scaled, Stacked

_NO_PLAIN_PRODUCT = ("use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "arrow_config")
_FLOATS = ("float32", "bfloat16", "float16")


def updates(adapter: Adapter, training: Training, mapped: Mapped) -> dict[str, Update]:
    """The update of every tensor that an adapter changes.

    Raises MismatchError where the sum is neither LoRA's nor DoRA's, where the base is quantised, and where a tied
    weight would be changed for both of its uses.
    """
    special = [name for name in _NO_PLAIN_PRODUCT if training.config.get(name)]
    if special:
        raise MismatchError(f"{special[0]}: its merge is more than W + scale*B*A; --lora keep exports it")
    if training.config.get("alora_invocation_tokens"):
        raise MismatchError("an adapter that acts only after its invocation tokens cannot be merged; use --lora keep")
    found = targets(adapter, shapes_in_memory(mapped))
    turned = _turned(found, training)
    result: dict[str, Update] = {}
    for target in found:
        training.check_rank(target)
        scale = training.scale(target)
        for name, update in _of_weight(target, scale, turned[target.parameter], mapped):
            result[name] = update
        bias = target.factors.bias
        if bias is not None:
            name = _saved(f"{owner_of(target.module)}.bias", mapped)
            if name not in mapped.index or mapped.index[name].shape != bias.shape:
                raise MismatchError(
                    f"{target.module}: its LoRA bias has no bias {name} to be added to; use --lora keep"
                )
            _check_base(name, mapped)
            result[name] = Scaled(bias, scale)
    return result


def _turned(found: Iterable[Target], training: Training) -> Mapping[str, bool]:
    """Whether each parameter is kept as [in, out]. Its shape says so, or, of a square one, the others of its kind: all
    matrices of a model that were one layer class are kept alike, and so are all stacks of experts."""
    seen: dict[str, bool] = {}
    squares: list[Target] = []
    for target in found:
        sides = target.factors.b.shape[0], target.factors.a.shape[1]
        if target.factors.embedding:
            seen[target.parameter] = True
        elif sides[0] != sides[1]:
            seen[target.parameter] = target.shape[-2:] != sides
        else:
            squares.append(target)
    plain = [t for t in found if t.parameter in seen and not t.factors.embedding]
    for target in squares:
        alike = [seen[t.parameter] for t in plain if bool(t.experts) == bool(target.experts)]
        if target.experts and not alike:
            raise MismatchError(
                f"{target.module}: {target.parameter} {list(target.shape)} is a stack of squares, and nothing says "
                "whether its factors are for them or for them turned; --lora keep exports the adapter"
            )
        seen[target.parameter] = any(alike) or (not target.experts and bool(training.config.get("fan_in_fan_out")))
    return seen


def _of_weight(target: Target, scale: float, turned: bool, mapped: Mapped) -> Iterator[tuple[str, Update]]:
    """The tensors of the files that hold a parameter, each with its update."""
    factors, module = target.factors, target.module
    magnitude = factors.magnitude
    if target.experts:
        if magnitude is not None:
            raise MismatchError(f"{module}: DoRA of a stack of experts; milepost does not merge it, use --lora keep")
        each = [_of_expert(factors, place, target.experts, scale, turned) for place in range(target.experts)]
        fused = None if mapped.architecture is None else mapped.architecture.fused.get(target.parameter)
        if fused is None:
            name = _saved(target.parameter, mapped)
            _check_base(name, mapped)
            yield name, Stacked(tuple(each))
            return
        for parts, update in zip(fused, each, strict=True):
            rows = target.shape[1] // len(parts)
            for place, part in enumerate(parts):
                _check_base(part, mapped)
                yield part, update.rows_from(place * rows, rows)
        return
    name = _saved(target.parameter, mapped)
    _check_base(name, mapped)
    update = factors.update(scale, turned)
    if magnitude is None:
        yield name, update
        return
    # PEFT's norm goes along the inputs: one for each output, which of a weight kept [in, out] are its columns.
    dim = 1 if turned else 0
    if magnitude.shape != (target.shape[dim],):
        raise MismatchError(
            f"{module}: its DoRA magnitudes {list(magnitude.shape)} are not one for each of the {target.shape[dim]} "
            f"outputs of {name}"
        )
    yield name, Dora(name, mapped.index[name], update, magnitude, dim)


def _of_expert(factors: Factors, expert: int, experts: int, scale: float, turned: bool) -> LowRank:
    return factors.of_expert(expert, experts).update(scale, turned)


def _saved(memory: str, mapped: Mapped) -> str:
    return memory if mapped.architecture is None else mapped.architecture.renamed.get(memory, memory)


def _check_base(name: str, mapped: Mapped) -> None:
    shared = next((pair for pair in mapped.tied.items() if name in pair), None)
    if shared is not None:
        raise MismatchError(
            f"{shared[0]} and {shared[1]} are one tensor, and the adapter changes what one of its uses does, so no "
            "merged model equals it; use --lora keep"
        )
    dtype = mapped.index[name].dtype
    if dtype not in _FLOATS:
        raise MismatchError(f"{name} is {dtype}: a quantised base cannot take the adapter; use --lora keep")
