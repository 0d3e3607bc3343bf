"""LoRA runs: which tensors of a state dict are the base model's, and which the adapter's.

PEFT's names, below `base_model.model.` (absent where transformers itself added the adapter):

    X.base_layer.weight                   the frozen weight of a module with an adapter
    X.lora_A.default.weight [r, in]       its two factors, `default` being the adapter's name
    X.lora_B.default.weight [out, r]
    X.lora_embedding_A.default [r, rows]  of an embedding: weight + scale * (B @ A)^T
    X.lora_embedding_B.default [width, r]
    X.lora_B.default.bias [out]           what is added to the module's bias
    X.lora_magnitude_vector.default.weight [out]  of DoRA: what the rows of the sum are long
    X.lora_A.default.weight [experts*r, in]   of a parameter X.P [experts, out, in] of a module without layers of its
    X.lora_B.default.weight [out, r*experts]  own: expert e has rows e*r to (e+1)*r of A, columns e, e+experts, ... of B
    X.base_layer.lora_A.default.weight        the same of another parameter of X, when two have an adapter
    X.modules_to_save.default.weight      a module that was trained whole ...
    X.original_module.weight              ... and what it was before

Source: the layers of peft 0.21.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from milepost.edits import every, narrow, permute
from milepost.errors import MismatchError
from milepost.index import Shape, TensorEntry, TensorIndex
from milepost.mapping.wrappers import regroup
from milepost.transfer.lowrank import LowRank

PREFIX = "base_model.model."
DEFAULT = "default"
BASE_LAYER = "base_layer"
_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_MAGNITUDE = "lora_magnitude_vector"
_BIAS = "bias"
_PAIRS = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


@dataclass(frozen=True)
class Factors:
    """What an adapter holds of one module.

    a:          [r, in], or [experts * r, in] of a stack of experts
    b:          [out, r], or [out, r * experts]
    embedding:  whether they are factors of the transposed weight
    magnitude:  DoRA's, [out]; None where it is LoRA alone
    bias:       what is added to the module's bias, [out]; None where nothing is
    """

    a: TensorEntry
    b: TensorEntry
    embedding: bool = False
    magnitude: TensorEntry | None = None
    bias: TensorEntry | None = None

    @property
    def rank(self) -> int:
        """r; of a stack of experts, r times their number."""
        return self.a.shape[0]

    def fits(self, shape: Shape) -> bool:
        """Whether a parameter of this shape, or a stack of them, can be what they are the factors of."""
        sides = self.b.shape[0], self.a.shape[1]
        if len(shape) not in (2, 3) or shape[-2:] not in (sides, sides[::-1]):
            return False
        return len(shape) == 2 or (shape[0] > 0 and self.rank % shape[0] == 0)

    def update(self, scale: float, turned: bool) -> LowRank:
        """What they add to the module's weight; `turned` where that is [in, out]."""
        if turned or self.embedding:
            return LowRank(permute(self.a, (1, 0)), permute(self.b, (1, 0)), scale)
        return LowRank(self.b, self.a, scale)

    def of_expert(self, expert: int, experts: int) -> Factors:
        """Those of one expert of a stack."""
        rank = self.rank // experts
        return Factors(narrow(self.a, 0, expert * rank, rank), every(self.b, 1, expert, experts))


@dataclass(frozen=True)
class Adapter:
    """One adapter.

    modules:  module -> what it holds of it, in the state dict's order; `base_layer` is part of a name where a module
              has several adapted parameters
    tensors:  all its tensors, under the names of PEFT's `adapter_model.safetensors`
    whole:    modules that were trained whole
    """

    modules: Mapping[str, Factors]
    tensors: Mapping[str, TensorEntry]
    whole: tuple[str, ...]

    @property
    def dora(self) -> bool:
        """Whether it has magnitudes beside its factors."""
        return any(factors.magnitude is not None for factors in self.modules.values())

    @property
    def biased(self) -> bool:
        """Whether it adds to biases."""
        return any(factors.bias is not None for factors in self.modules.values())


def owner_of(module: str) -> str:
    """The model's own name of an adapter's module."""
    return ".".join(part for part in module.split(".") if part != BASE_LAYER)


def parameter_of(module: str, factors: Factors, shapes: Mapping[str, Shape]) -> str:
    """The parameter that a module's factors change.

    shapes:  the parameters of the model, under its names in memory

    It is `weight` where the module has one. A module without layers of its own (a stack of experts) holds parameters of
    other names, and which of them is meant shows in the shapes alone. MismatchError where none fits or several do.
    """
    owner = owner_of(module)
    weight = f"{owner}.weight"
    own = [weight] if weight in shapes else [n for n in shapes if n.rpartition(".")[0] == owner and len(shapes[n]) > 1]
    fitting = [name for name in own if factors.fits(shapes[name])]
    if len(fitting) == 1:
        return fitting[0]
    sides = f"[{factors.b.shape[0]}, {factors.rank}] and [{factors.rank}, {factors.a.shape[1]}]"
    if fitting:
        raise MismatchError(f"{module}: factors {sides} fit {' and '.join(fitting)}, and nothing says which is meant")
    found = ", ".join(f"{name} {list(shapes[name])}" for name in own) or f"there is no {weight}"
    raise MismatchError(f"{module}: no parameter of the base fits its LoRA factors {sides}: {found}")


@dataclass(frozen=True)
class LoraRun:
    """A state dict with an adapter, taken apart.

    base:     the model as it was before, under its own names
    trained:  the tensors of modules that were trained whole, under the names that they replace
    biases:   the base's biases, under the names that an adapter's file would give them: training may have changed them
    adapter:  the adapter
    notes:    what was left out, one line each
    """

    base: TensorIndex
    trained: Mapping[str, TensorEntry]
    biases: Mapping[str, TensorEntry]
    adapter: Adapter
    notes: tuple[str, ...]


def take_apart(index: TensorIndex) -> LoraRun:
    """Base and adapter of a state dict that `has_adapter`; weights only, wrappers stripped.

    Raises MismatchError for adapters of other kinds (AdaLoRA, trained tokens), for several adapters with none called
    `default`, and for a factor without its other.
    """
    index = index.with_entries(regroup(index, lambda name: name.removeprefix(PREFIX)))
    places = {name: _Place.of(name) for name in index}
    adapters = Counter(place.adapter for place in places.values() if place.adapter)
    if DEFAULT not in adapters and len(adapters) != 1:
        raise MismatchError(f"holds the adapters {', '.join(sorted(adapters))}, and none of them is called {DEFAULT}")
    chosen = DEFAULT if DEFAULT in adapters else next(iter(adapters))
    others = sorted(name for name in adapters if name != chosen)
    notes = [f"left out: the adapter {name}, {adapters[name]} tensors" for name in others]
    base = regroup(index, lambda name: places[name].base)
    trained = regroup(index, lambda name: places[name].trained if places[name].adapter == chosen else None)
    own = {place.key: index[name] for name, place in places.items() if place.adapter == chosen}
    biases = {PREFIX + name: index[name] for name, place in places.items() if place.base and name.endswith(".bias")}
    return LoraRun(index.with_entries(base), trained, biases, _adapter(places, chosen, index, own), tuple(notes))


@dataclass(frozen=True)
class _Place:
    """What one tensor of the state dict is: of the base (`base`: its name there), or of an adapter (`key`: its name in
    the adapter's file; `module` and `kind` for LoRA's own; `trained`: the base's tensor that it replaces)."""

    base: str | None = None
    adapter: str = ""
    key: str = ""
    module: str = ""
    kind: str = ""
    trained: str | None = None

    @staticmethod
    def of(name: str) -> _Place:
        parts = name.split(".")
        if "token_adapter" in parts or any(part.startswith("trainable_tokens") for part in parts):
            raise MismatchError(f"{name}: an adapter of single tokens, which milepost does not read")
        if "modules_to_save" in parts:
            at = parts.index("modules_to_save")
            plain = ".".join((*parts[:at], *parts[at + 2 :]))
            return _Place(adapter=parts[at + 1], key=PREFIX + plain, module=".".join(parts[:at]), trained=plain)
        at = next((i for i, part in enumerate(parts) if part.startswith("lora_")), -1)
        if at < 0:
            return _Place(base=".".join(part for part in parts if part not in (BASE_LAYER, "original_module")))
        kind, rest = parts[at], parts[at + 1 :]
        if kind not in (*_FACTORS, _MAGNITUDE):
            raise MismatchError(f"{name}: {kind} is of another kind of adapter than LoRA, which milepost does not read")
        adapter = rest.pop(0) if rest and rest[0] not in ("weight", "bias") else DEFAULT
        if kind == _MAGNITUDE:
            rest = []
        module = ".".join(parts[:at])
        return _Place(adapter=adapter, key=".".join((f"{PREFIX}{module}.{kind}", *rest)), module=module, kind=kind)


def _adapter(
    places: Mapping[str, _Place], chosen: str, index: TensorIndex, tensors: Mapping[str, TensorEntry]
) -> Adapter:
    found: dict[str, dict[str, TensorEntry]] = {}
    whole: dict[str, None] = {}
    for name, place in places.items():
        if place.adapter != chosen:
            continue
        if place.trained is not None:
            whole[place.module] = None
        else:
            kind = _BIAS if place.key.endswith(".bias") else place.kind
            found.setdefault(place.module, {})[kind] = index[name]
    return Adapter({module: _factors(module, kinds) for module, kinds in found.items()}, tensors, tuple(whole))


def _factors(module: str, kinds: Mapping[str, TensorEntry]) -> Factors:
    for name_a, name_b in _PAIRS:
        if name_a in kinds and name_b in kinds:
            a, b = kinds[name_a], kinds[name_b]
            if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
                raise MismatchError(
                    f"{module}: factors of shape {list(a.shape)} and {list(b.shape)} make no LoRA update of a matrix"
                )
            return Factors(a, b, name_a != "lora_A", kinds.get(_MAGNITUDE), kinds.get(_BIAS))
    raise MismatchError(f"{module}: holds {', '.join(sorted(kinds))} and lacks the other factor")
