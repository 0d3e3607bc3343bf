"""Forwards and backwards of a Megatron model through its pipeline, with sequences as trainers have them.

A batch has padding on the left and on the right. Here each row is turned so that its first real token stands first:
then the causal mask alone hides all padding, positions are counted as transformers counts them, and what comes out is
turned back. Only the last stage sees outputs, so a function of them is called there; what it returns, all ranks of the
pipeline get.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.engines.base import Inputs, Outputs
from milepost.engines.megatron_model import Parallel, on_device

Results = list[Any]


Function = Callable[[int, Outputs], Any]
"""Of the number of a micro-batch and its outputs."""


class PipelineModel:
    """This rank's chunks of a Megatron model, and the schedules in which micro-batches go through all stages.

    Args:
        chunks: of `megatron_model.build_chunks`.
        parallel: the sizes that they were built for.
        vocabulary: words without padding; None for a value model.
    """

    def __init__(self, chunks: Sequence[Any], parallel: Parallel, vocabulary: int | None, device: torch.device) -> None:
        self.chunks = list(chunks)
        self.parallel = parallel
        self.device = device
        self._vocabulary = vocabulary
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

        several = len(self.chunks) > 1
        with on_device(self.device):
            found = self._schedules.get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(filled) for _ in self.chunks] if several else iter(filled),
                model=self.chunks if several else self.chunks[0],
                num_microbatches=len(filled),
                seq_length=width,
                micro_batch_size=rows,
                forward_only=not backward,
            )
        kept = sorted(((number, value) for number, value in found if number is not None), key=lambda pair: pair[0])
        return [value for _, value in kept]

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
        rows = max(batch.input_ids.shape[0] for batch in batches)
        width = max(batch.input_ids.shape[1] for batch in batches)
        if not self.lockstep:
            return rows, width
        shape = torch.tensor([rows, width], device=self.device)
        dist.all_reduce(shape, op=dist.ReduceOp.MAX)
        return int(shape[0]), int(shape[1])

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
