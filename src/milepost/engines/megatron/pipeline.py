"""Forwards and backwards of a Megatron model through its pipeline, with sequences as trainers have them.

A batch has padding on the left and on the right. Here each row is turned so that its first real token stands first:
then the causal mask alone hides all padding, positions are counted as transformers counts them, and what comes out is
turned back. Only the last stage sees outputs, so a function of them is called there; what it returns, all ranks of the
pipeline get.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  its usual name
from torch import Tensor

from milepost.engines.base import Inputs, Outputs
from milepost.engines.megatron.layers import whole_sequences
from milepost.engines.megatron.model import on_device
from milepost.engines.megatron.parallel import Parallel

Results = list[Any]


Function = Callable[[int, Outputs], Any]
"""Of the number of a micro-batch and its outputs."""


class PipelineModel:
    """This rank's chunks of a Megatron model, and the schedules in which micro-batches go through all stages.

    Args:
        chunks: of `model.build_chunks`.
        parallel: the sizes that they were built for.
        vocabulary: words without padding; None for a value model.
    """

    def __init__(self, chunks: Sequence[Any], parallel: Parallel, vocabulary: int | None, device: torch.device) -> None:
        self.chunks = list(chunks)
        self.parallel = parallel
        self.device = device
        self._vocabulary = vocabulary
        # Under sequence parallelism the ranks share out the tokens of a sequence in equal parts.
        self._multiple = parallel.tensor if self.chunks[0].config.sequence_parallel else 1
        self._state = importlib.import_module("megatron.core.parallel_state")
        self._schedules = importlib.import_module("megatron.core.pipeline_parallel")
        self._mappings = importlib.import_module("megatron.core.tensor_parallel")

    @property
    def training(self) -> bool:
        """Whether it is in the mode of training."""
        return bool(self.chunks[0].training)

    def train(self, mode: bool = True) -> PipelineModel:
        """Switch between training and evaluation."""
        for chunk in self.chunks:
            chunk.train(mode)
        return self

    def eval(self) -> PipelineModel:
        """Switch to evaluation."""
        return self.train(mode=False)

    @property
    def lockstep(self) -> bool:
        """Whether ranks with other sequences must go through as many forwards: experts lie on them."""
        return self.parallel.expert > 1

    @property
    def is_last_stage(self) -> bool:
        """Whether outputs come out here."""
        return bool(self._state.is_pipeline_last_stage())

    def forward_backward(self, batches: Sequence[Inputs], loss: Function) -> Results:
        """Add the gradients of micro-batches.

        loss: gives the loss of a micro-batch and a result. Called on the last stage, on every tensor-parallel rank.

        Returns the results, on every rank. All ranks call it together.
        """
        return self._shared(self._run(batches, loss, backward=True))

    @torch.no_grad()
    def forward_only(self, batches: Sequence[Inputs], function: Function) -> Results:
        """`function` of the outputs of every micro-batch, on every rank. All ranks call it together."""
        return self._shared(self._run(batches, function, backward=False))

    def one_of_peers(self, tensor: Tensor) -> Tensor:
        """The values of the first tensor-parallel rank, in place."""
        if self.parallel.tensor > 1:
            state = self._state
            dist.broadcast(
                tensor,
                src=state.get_tensor_model_parallel_src_rank(),
                group=state.get_tensor_model_parallel_group(),
            )
        return tensor

    @contextlib.contextmanager
    def remembering(self, rows: int, width: int, more: int) -> Iterator[Memory]:
        """Room for the keys and values of prompts and of the tokens behind them; it is given up at the end. All ranks
        enter it together.

        rows:   sequences
        width:  tokens of each prompt, with what pads it
        more:   tokens that may come behind it
        """
        was_training = self.training
        wide, high = self._largest(width), self._largest(rows)
        make = importlib.import_module("megatron.core.inference.contexts").StaticInferenceContext
        self.eval()
        try:
            with whole_sequences(self.chunks):
                yield Memory(high, wide - width, make(high, wide + more))
        finally:
            self.train(was_training)

    @torch.no_grad()
    def forward_next(self, memory: Memory, ids: Tensor, mask: Tensor, function: Function) -> Any:
        """`function` of the outputs [B, 1, C] behind the last token, on every rank. All ranks call it together.

        ids:   [B, n], at first the prompts, padded on the left; then the token that came behind each
        mask:  [B, S] of all tokens so far, 0 for what pads
        """
        context = memory.context
        known, count = context.sequence_len_offset, len(ids)
        new = F.pad(ids, (0 if known else memory.wider, 0, 0, memory.rows - count))
        real = F.pad(mask, (memory.wider, 0, 0, memory.rows - count)).bool()
        size, width = new.shape[1], real.shape[1]
        hidden = torch.ones(size, width, dtype=torch.bool, device=self.device).triu(width - size + 1)
        hidden = hidden[None, None] | ~real[:, None, None]
        # Positions are those in memory: what pads moves a row's tokens on together, and rotary embeddings tell
        # distances only.
        positions = torch.arange(known, width, device=self.device)[None].expand(memory.rows, -1)

        def forward(items: Iterator[bool], model: Any) -> tuple[Any, Any]:
            output = model(new, positions, hidden, inference_context=context, runtime_gather_output=True)
            return output, partial(finish, next(items))

        def finish(wanted: bool, output: Tensor) -> tuple[Tensor, Tensor, Any]:
            result = function(0, Outputs(output[:count, :, : self._vocabulary])) if wanted else None
            return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=self.device), result

        # Micro-batches that fill the pipeline up are the first again, and write into memory what is there.
        items = [True] + [False] * self._fill_up(1)
        found = self._scheduled(forward, items, size, memory.rows, backward=False)
        context.increment_sequence_len_offset(size)
        return self._shared(found[:1])[0]

    # Details

    def _run(self, batches: Sequence[Inputs], function: Function, *, backward: bool) -> Results:
        rows, width = self._common_shape(batches)
        turned = [_Turned.of(batch, rows, width) for batch in batches]
        filled = [*enumerate(turned), *((None, turned[0]) for _ in range(self._fill_up(len(turned))))]
        mask = torch.ones(width, width, dtype=torch.bool, device=self.device).triu(1)[None, None]
        positions = torch.arange(width, device=self.device)[None].expand(rows, -1)

        def forward(items: Iterator[tuple[int | None, _Turned]], model: Any) -> tuple[Any, Any]:
            number, batch = next(items)
            return model(batch.ids, positions, mask), partial(self._finish, number, batch, function, backward)

        found = self._scheduled(forward, filled, width, rows, backward=backward)
        kept = sorted(((number, value) for number, value in found if number is not None), key=lambda pair: pair[0])
        return [value for _, value in kept]

    def _scheduled(self, forward: Any, items: Sequence[Any], width: int, rows: int, *, backward: bool) -> list[Any]:
        """What the last stage's functions gave for each item, which is what tells a micro-batch from others."""
        several = len(self.chunks) > 1
        given = [iter(items) for _ in self.chunks]
        with on_device(self.device):
            found: list[Any] = self._schedules.get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=given if several else given[0],
                model=self.chunks if several else self.chunks[0],
                num_microbatches=len(items),
                seq_length=width,
                micro_batch_size=rows,
                forward_only=not backward,
            )
        return found

    def _finish(
        self, number: int | None, batch: _Turned, function: Function, backward: bool, output: Tensor
    ) -> tuple[Tensor, Tensor, tuple[int | None, Any]]:
        """The end of one micro-batch on the last stage: what Megatron calls the loss function."""
        tokens = torch.zeros((), dtype=torch.int, device=self.device)
        if number is None:  # fills the pipeline up
            return output.float().sum() * 0, tokens, (None, None)
        logits = batch.turned_back(output)
        if self._vocabulary is not None:
            logits = self._mappings.gather_from_tensor_model_parallel_region(logits)[..., : self._vocabulary]
        result = function(number, Outputs(logits))
        if not backward:
            return output.new_zeros(()), tokens, (number, result)
        loss, kept = result
        return loss, tokens, (number, kept)

    def _common_shape(self, batches: Sequence[Inputs]) -> tuple[int, int]:
        """Rows and tokens of every micro-batch: one shape for all stages, and where experts are dealt out for all
        ranks."""
        rows = self._largest(max(batch.input_ids.shape[0] for batch in batches))
        width = self._largest(max(batch.input_ids.shape[1] for batch in batches))
        return rows, width + -width % self._multiple

    def _largest(self, size: int) -> int:
        """A number of this rank; where ranks must go on together, the largest of all."""
        if not self.lockstep:
            return size
        sizes = torch.tensor(size, device=self.device)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        return int(sizes)

    def _fill_up(self, count: int) -> int:
        """How many micro-batches are missing to a number that the interleaved schedule takes."""
        return -count % self.parallel.pipeline if self.parallel.virtual_pipeline else 0

    def _shared(self, results: Results) -> Results:
        """The last stage's results, on all stages."""
        if self.parallel.pipeline == 1:
            return results
        source = self._state.get_pipeline_model_parallel_last_rank()
        group = self._state.get_pipeline_model_parallel_group()
        shapes: list[Any] = [[_described(result) for result in results]]
        dist.broadcast_object_list(shapes, src=source, group=group, device=self.device)
        shared = []
        for number, described in enumerate(shapes[0]):
            if not isinstance(described, _Shape):
                shared.append(described)
                continue
            if self.is_last_stage:
                value = results[number].contiguous()
            else:
                value = torch.empty(described.sizes, dtype=described.dtype, device=self.device)
            dist.broadcast(value, src=source, group=group)
            shared.append(value)
        return shared


@dataclass(frozen=True)
class Memory:
    """Keys and values of all tokens so far, as Megatron keeps them for each layer. [S, rows, groups, head_dim]

    rows:     sequences that go through the model, with those that are dropped again
    wider:    how many more tokens than here the prompts of some other rank have
    context:  Megatron's
    """

    rows: int
    wider: int
    context: Any


@dataclass(frozen=True)
class _Shape:
    sizes: tuple[int, ...]
    dtype: torch.dtype


def _described(result: Any) -> Any:
    """A tensor's shape and type, so that the others can make room for it; anything else itself."""
    return _Shape(tuple(result.shape), result.dtype) if isinstance(result, Tensor) else result


@dataclass(frozen=True)
class _Turned:
    """A micro-batch with each row's first real token at position 0.

    ids:    [rows, width], filled up with rows that are dropped again and with tokens that no real one sees
    first:  [B], where the first real token of each row stood
    shape:  B, S and how many of the last positions are wanted
    """

    ids: Tensor
    first: Tensor
    shape: tuple[int, int, int]

    @staticmethod
    def of(batch: Inputs, rows: int, width: int) -> _Turned:
        count, size = batch.input_ids.shape
        first = (batch.attention_mask.cumsum(-1) == 0).sum(-1)
        index = (torch.arange(size, device=first.device)[None] + first[:, None]) % size
        ids = batch.input_ids.new_zeros((rows, width))
        ids[:count, :size] = batch.input_ids.gather(1, index)
        return _Turned(ids, first, (count, size, batch.keep))

    def turned_back(self, output: Tensor) -> Tensor:
        """Of outputs [rows, width, C] those of the batch's own last positions, [B, keep, C]."""
        count, size, keep = self.shape
        places = (torch.arange(size - keep, size, device=output.device)[None] - self.first[:, None]) % size
        return output[torch.arange(count, device=output.device)[:, None], places]
