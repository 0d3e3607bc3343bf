"""Hugging Face Trainers that milepost records, under several engines: six steps without a stop, and three and three."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from integrations.accelerated import accelerate_with
from wrapped import TINY

from milepost.errors import MilepostError
from milepost.integrations.transformers import CheckpointCallback

STEPS, STOP = 6, 3


def model_of(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**TINY, attention_dropout=0.3))


def train(
    base: Path,
    root: Path,
    arguments: dict[str, Any],
    *,
    seed: int,
    stop: int = STEPS,
    mode: str | None = "auto",
    give: bool = True,
    evaluate: bool = False,
    accumulation: int = 1,
    save_steps: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """One process's life: a new model, a new Trainer, on from where the record says, to step `stop`.

    mode:  None where the user does not ask the record
    give:  whether the Trainer is told what the record said
    """
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= stop

    data = Dataset.from_dict(
        {name: [[(3 * i + j) % 32 + 1 for j in range(6)] for i in range(32)] for name in ("input_ids", "labels")}
    )
    args = TrainingArguments(
        str(base / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=options.pop("max_steps", STEPS),
        learning_rate=1e-2,
        warmup_steps=2,
        weight_decay=0.1,
        save_steps=save_steps,
        logging_steps=1,
        save_strategy="steps",
        **arguments,
        **options,
    )
    record = CheckpointCallback(root, keep_last=2)
    trainer = Trainer(
        model=model_of(seed),
        args=args,
        train_dataset=data,
        eval_dataset=data if evaluate else None,
        callbacks=[record, Stop()],
    )
    found = None if mode is None else record.resume(mode)
    trainer.train(resume_from_checkpoint=found if give else None)
    logs = [
        (entry["step"], entry["loss"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry
    ]
    return {
        "from": record.report.step,
        "lines": record.report.lines(),
        "weights": weights(trainer),
        "moments": moments(trainer),
        "logs": logs,
        "draw": torch.rand(3),
        "epoch": trainer.state.epoch,
    }


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    from milepost.integrations.gather import whole

    with whole(trainer.accelerator.unwrap_model(trainer.model).state_dict(keep_vars=True)) as found:
        return {name: tensor.clone() for name, tensor in found.items()}


def moments(trainer: Any) -> list[torch.Tensor]:
    """What this rank holds of them."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    values = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [(value.to_local() if hasattr(value, "to_local") else value).detach().clone() for value in values]


def lives(base: Path, name: str, stage: int | None, **options: Any) -> dict[str, Any]:
    """Six steps without a stop; three, in a run of its own; and three more of that run, by a model made anew."""
    here = base / name
    here.mkdir(exist_ok=True)
    said = {}
    for life, root, seed, stop in (
        ("straight", "straight", 1, STEPS),
        ("first", "run", 1, STOP),
        ("second", "run", 2, STEPS),
    ):
        with accelerate_with(here, stage, bf16=False) as arguments:
            said[life] = train(here, here / root, arguments, seed=seed, stop=stop, **options)
        torch.distributed.barrier()
    return said


def on_two(base: Path) -> dict[str, Any]:
    return {"ddp": lives(base, "ddp", None), "zero3": lives(base, "zero3", 3, save_steps=STOP)}


def on_one(base: Path) -> dict[str, Any]:
    """A plain Trainer, the runs of `on_two` on another number of ranks, and what goes wrong."""
    said: dict[str, Any] = {"plain": lives(base, "plain", None, accumulation=2)}
    here = base / "plain"

    def again(root: Path, stage: int | None = None, **options: Any) -> dict[str, Any]:
        with accelerate_with(base, stage, bf16=False) as arguments:
            return train(here, root, arguments, seed=3, **{"accumulation": 2, **options})

    def told(act: Callable[[], Any]) -> tuple[str, str]:
        try:
            act()
        except MilepostError as error:
            return type(error).__name__, str(error)
        return "", ""

    newest = here / "run" / f"global_step_{STEPS}" / "trainer"
    # A kill between commit and removal leaves the Trainer's folder, with the step's own files.
    twin = here / "out" / f"checkpoint-{STEPS}"
    shutil.copytree(newest, twin, copy_function=os.link)
    said["nothing left"] = told(lambda: again(here / "run"))
    said["twin"] = twin.exists()
    optimizer = newest / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-1])
    said["damaged"] = again(here / "run")
    said["forgotten"] = told(lambda: again(here / "run", give=False, mode=None))
    said["not given"] = told(lambda: again(here / "run", give=False))
    said["anew"] = again(here / "run", mode="disable", stop=1)
    said["weights only"] = told(lambda: again(here / "other", save_only_model=True))
    said["ddp on one"] = again(base / "ddp" / "run", accumulation=1, stop=STEPS + 1, max_steps=STEPS + 1)
    said["zero3 on one"] = told(lambda: again(base / "zero3" / "run", 3))
    said["kept"] = sorted(path.name for path in (here / "out").iterdir())
    best = again(base / "best", stop=2, load_best_model_at_end=True, eval_strategy="steps", eval_steps=1, evaluate=True)
    said["best"] = best["from"], sorted(path.name for path in (here / "out").iterdir())
    return said
