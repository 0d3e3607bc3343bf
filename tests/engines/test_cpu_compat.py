"""What names a CUDA device where there is none, and only inside of the context that is for it."""

from __future__ import annotations

import torch

from milepost.engines.cpu_compat import cuda_means_cpu


def test_a_call_that_names_cuda_gets_the_cpu() -> None:
    with cuda_means_cpu():
        made = torch.zeros(2, device="cuda"), torch.ones(2).to("cuda"), torch.ones(2).cuda()
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_tensors_give_themselves_out_for_those_of_cuda() -> None:
    """Megatron's optimizers compare these names; a cast by name stays one."""
    weights = torch.zeros(1), torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    with cuda_means_cpu():
        names = [weight.type() for weight in weights]
        cast = weights[0].type(torch.float64)
    assert names == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"]
    assert cast.dtype == torch.float64
    assert weights[0].type() == "torch.FloatTensor"
