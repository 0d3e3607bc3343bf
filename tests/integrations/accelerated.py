"""Trainers of Hugging Face under accelerate on CPU, several engines one after the other in the same processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def accelerate_with(base: Path, stage: int | None, *, bf16: bool = True) -> Iterator[dict[str, Any]]:
    """Accelerate under DeepSpeed of this stage, or under DDP for None; yields what the trainer's arguments must say.

    On a CPU accelerate takes DeepSpeed only from the environment, and gloo only from a state made before it.
    """
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState

    from milepost.engines.cpu_compat import choose_cpu, leave_out_shared_memory_collectives

    choose_cpu()
    leave_out_shared_memory_collectives()
    before = dict(os.environ)
    # Asked for, though the process group is there already.
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    if stage is not None:
        config = base / f"deepspeed_{stage}_{os.environ['RANK']}.json"
        config.write_text(
            json.dumps(
                {
                    "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": False},
                    "bf16": {"enabled": bf16},
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_accumulation_steps": 1,
                    "gradient_clipping": 1.0,
                    "zero_allow_untested_optimizer": True,
                }
            )
        )
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        } | ({"ACCELERATE_MIXED_PRECISION": "bf16"} if bf16 else {})
    PartialState(cpu=stage is None, backend="gloo")
    try:
        yield {
            "use_cpu": stage is None,
            "bf16": False,
            "accelerator_config": {"use_configured_state": True},
            "report_to": "none",
            "disable_tqdm": True,
        }
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ |= before
