"""Filling a Megatron model from a Hugging Face directory, each rank its own parts, without a model in between.

    milepost.load_pretrained(model_chunks, "Qwen2.5-7B")                       every rank sees the files
    milepost.load_pretrained(model_chunks, "Qwen2.5-7B", method="broadcast")   rank 0 alone sees them

`sharded`: every rank reads the boxes that it holds, and nothing is sent. `broadcast`: rank 0 reads tensor after
tensor, each byte once, and sends every box to the ranks that hold it, the first of each data-parallel group, which
passes it on to the others. No rank ever holds more than a window beside its own parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from milepost.checkpoint.comm import PATIENCE, Communicator, default_communicator, on_rank_0, together
from milepost.checkpoint.live import LiveSink
from milepost.checkpoint.meeting import meet_all
from milepost.checkpoint.passing import pass_on
from milepost.engines.base import LiveTensor
from milepost.engines.megatron.state import live_tensors, unwrapped
from milepost.errors import CallError, IncompleteError, MismatchError
from milepost.index import TensorIndex
from milepost.jobs.prepare import prepare
from milepost.layouts.huggingface import read_config
from milepost.mapping import Config, expected, value_head_config
from milepost.mapping.megatron import RULES, model_of
from milepost.mapping.megatron.families import ZERO_CENTRED
from milepost.transfer import execute, plan

T = TypeVar("T")
SHARDED, BROADCAST = "sharded", "broadcast"
WINDOW_BYTES = 8 << 20
"""Of a tensor that is on its way."""

_HEAD = "score."
_OF_LATENT_ATTENTION = 2
_FACTS = (
    ("layers", "num_layers", "num_hidden_layers"),
    ("columns of hidden states", "hidden_size", "hidden_size"),
    ("attention heads", "num_attention_heads", "num_attention_heads"),
    ("key/value heads", "num_query_groups", "num_key_value_heads"),
    ("rows a head", "kv_channels", "head_dim"),
)
"""In words, in Megatron's config, in config.json. In latent attention the last `_OF_LATENT_ATTENTION` are other
things."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank.

    tensors:   how many of Hugging Face's tensors it holds parts of
    read:      bytes that it asked files for, in the element type of the files
    received:  bytes that came from another rank
    fresh:     tensors that the directory does not hold, left as they were made: the head of a new critic
    seconds:   of the whole call
    """

    method: str
    tensors: int
    read: int
    received: int
    fresh: tuple[str, ...]
    seconds: float


def load_pretrained(
    model_chunks: Sequence[Any] | Any,
    hf_dir: str | PathLike[str],
    method: str = SHARDED,
    *,
    patience: float = PATIENCE,
) -> LoadReport:
    """Fill the parameters of a Megatron model with the weights of a Hugging Face directory. All ranks call it together.

    model_chunks:  GPTModel, or one for each virtual stage; wrappers (DistributedDataParallel, Float16Module) may be
                   around it. An optimizer that keeps copies of the parameters must take them over afterwards
                   (Megatron's: `optimizer.reload_model_params()`)
    hf_dir:        the model's directory; with "broadcast" only rank 0 looks at it
    method:        "sharded" or "broadcast", the same on all ranks
    patience:      seconds to wait for the last rank to make the call

    Values are cast to the parameters' element types. A model with a value head takes its head from the directory or,
    where that is a policy's, keeps the one it has.

    Raises, on every rank, before anything is read: MismatchError where config.json is another model's, or the weights
    are not what it describes; NotFoundError where there is no model; CallError for another method, or where a rank does
    not come.
    """
    begun = monotonic()
    directory = Path(hf_dir)
    chunks = list(model_chunks) if isinstance(model_chunks, Sequence) else [model_chunks]
    meet_all("load_pretrained", patience)  # before the first collective, which would wait for a rank that never comes
    comm = default_communicator()
    try:
        _agree(comm, method)
        if method == SHARDED:
            config = _on_each(comm, lambda: _config(directory))
        else:
            config = on_rank_0(comm, lambda: _config(directory))
        live = _boxes(comm, chunks, directory, config)
        if method == SHARDED:
            index = _on_each(comm, lambda: _opened(directory, live))
            there = {name: tensor for name, tensor in live.items() if name in index}
            read, received = _on_each(comm, lambda: _read(there, index)), 0
        else:
            weights = _on_each(comm, lambda: _opened(directory, live) if comm.rank == 0 else None)
            names = on_rank_0(comm, lambda: set(weights or ()))
            there = {name: tensor for name, tensor in live.items() if name in names}
            read, received = pass_on(comm, there, weights, WINDOW_BYTES)
    finally:
        comm.close()
    held = sum(1 for tensor in there.values() if tensor.boxes)
    fresh = tuple(name for name in live if name not in there)
    return LoadReport(method, held, read, received, fresh, monotonic() - begun)


def _agree(comm: Communicator, method: str) -> None:
    """Raise CallError on every rank where one was given a method that there is not, or another than rank 0."""

    def known() -> str:
        if method not in (SHARDED, BROADCAST):
            raise CallError(f"method={method!r}: choose from {SHARDED!r}, {BROADCAST!r}")
        return method

    first, *others = together(comm, known)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise CallError(f"the ranks disagree about method: rank 0 {first!r}, rank {rank} {other!r}")


def _on_each(comm: Communicator, act: Callable[[], T]) -> T:
    """Do `act` on every rank and return this one's result; if it raises on any, all raise."""
    own: list[T] = []
    together(comm, lambda: own.append(act()))
    return own[0]


def _config(directory: Path) -> Config:
    config = read_config(directory)
    kind = config.get("model_type", "(none)")
    if kind not in RULES:
        raise MismatchError(
            f"{directory}: a model of type {kind}; the types whose form in Megatron is known are {', '.join(RULES)}"
        )
    return config


def _boxes(comm: Communicator, chunks: list[Any], directory: Path, config: Config) -> dict[str, LiveTensor]:
    """This rank's boxes under the names of Hugging Face, with those of a value head where the model has one.

    Raises MismatchError where model and config.json are not of one shape, or a tensor of it is on no rank.
    """
    heads = [head for head in together(comm, lambda: _value_head(chunks)) if head is not None]
    true_config = value_head_config(config, *heads[0]) if heads else config

    def found() -> dict[str, LiveTensor]:
        _check(chunks, true_config, directory)
        try:
            return live_tensors(chunks, true_config)
        except MismatchError as error:
            raise MismatchError(f"{directory}: {error}") from None

    live = _on_each(comm, found)
    held = set().union(*together(comm, lambda: [name for name, tensor in live.items() if tensor.boxes]))
    lost = [name for name in live if name not in held]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise MismatchError(f"{directory}: its config.json describes {lost[0]}{more}, which the model has no place for")
    return live


def _value_head(chunks: list[Any]) -> tuple[int, bool] | None:
    """Labels of this rank's value head, and whether it has a bias; None where it has none."""
    import torch  # noqa: PLC0415  as everything here that asks for it

    for chunk in map(unwrapped, chunks):
        head = getattr(chunk, "output_layer", None)
        if isinstance(head, torch.nn.Linear):  # a policy's output layer is one of Megatron's own
            return head.out_features, head.bias is not None
    return None


def _check(chunks: list[Any], config: Config, directory: Path) -> None:
    """Raise MismatchError where the model was built for another config. What is cut alike from other numbers of heads
    has the same shapes, so shapes alone do not tell."""
    described = model_of(config)
    ties = getattr(expected(config), "tied", {})  # none in a value model
    for chunk in map(unwrapped, chunks):
        built = chunk.config
        facts = _FACTS[: -_OF_LATENT_ATTENTION if getattr(built, "multi_latent_attention", False) else None]
        wanted = [(what, getattr(built, ours), described.settings[theirs]) for what, ours, theirs in facts]
        wanted.append(("experts", built.num_moe_experts or 0, described.experts))
        for what, ours, theirs in wanted:
            if ours != theirs:
                raise MismatchError(f"{directory}: the model has {ours} {what}, config.json says {theirs}")
        centred = bool(getattr(built, "layernorm_zero_centered_gamma", False))
        if centred != (described.kind in ZERO_CENTRED):
            raise MismatchError(
                f"{directory}: norms of the model multiply by {'1 + weight' if centred else 'weight'}, those of a "
                f"{described.kind} do not (layernorm_zero_centered_gamma)"
            )
        words = described.settings["vocab_size"]
        if chunk.vocab_size < words:
            raise MismatchError(
                f"{directory}: the model has room for {chunk.vocab_size} words, config.json says {words}"
            )
        if chunk.share_embeddings_and_output_weights and not described.settings["tie_word_embeddings"]:
            raise MismatchError(
                f"{directory}: the model's output layer is its embedding, config.json says that they are two tensors"
            )
        if not chunk.share_embeddings_and_output_weights and "lm_head.weight" in ties:
            raise MismatchError(
                f"{directory}: the model's output layer is a tensor of its own, config.json says that it is the "
                "embedding (tie_word_embeddings): build the model with share_embeddings_and_output_weights"
            )


def _opened(directory: Path, live: Mapping[str, LiveTensor]) -> TensorIndex:
    """The weights of the directory, which are those of its config.json and hold all that the model needs."""
    index = prepare(directory, "huggingface").index
    missing = [name for name in live if name not in index and not name.startswith(_HEAD)]
    if missing:
        raise IncompleteError(f"{directory}: holds no {missing[0]}, which the model has")
    return index


def _read(live: Mapping[str, LiveTensor], index: TensorIndex) -> int:
    """Read this rank's boxes; returns the number of bytes."""
    sink = LiveSink(live)
    total = 0

    def count(nbytes: int) -> None:
        nonlocal total
        total += nbytes

    execute(plan(index, sink.wanted(), WINDOW_BYTES), sink, progress=count)
    return total
