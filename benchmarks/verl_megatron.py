"""verl's merger of Megatron checkpoints on a machine without a GPU and without Transformer Engine.

    python benchmarks/verl_megatron.py merge --backend megatron --local_dir DIR --target_dir DIR

Its own command line and its own code; what it would ask CUDA is answered for the CPU, and the model that it builds to
load into has Megatron's own layers in the place of Transformer Engine's, which hold the same weights.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from verl.utils import device

from milepost.engines import cpu_compat


def main() -> None:
    """Run verl's command."""
    usual = gpt_layer_specs.get_gpt_decoder_block_spec

    def of_local_layers(config: Any, use_transformer_engine: bool, **options: Any) -> Any:
        config.bias_dropout_fusion = config.masked_softmax_fusion = False
        return usual(config, use_transformer_engine=False, normalization="RMSNorm", **options)

    gpt_layer_specs.get_gpt_decoder_block_spec = of_local_layers  # before verl takes it by name
    device.get_nccl_backend, device.get_device_name = (lambda: "gloo"), (lambda: "cpu")
    device.get_torch_device = lambda: torch.cpu
    cpu_compat.megatron_answers()
    with cpu_compat.cuda_means_cpu():
        from verl.model_merger.__main__ import main as merge  # noqa: PLC0415

        merge()


if __name__ == "__main__":
    main()
