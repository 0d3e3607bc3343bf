"""verl's side: a run as its trainer saves one, with its own FSDP2 wrapping, optimizer, schedule and checkpoint manager.

Imports verl where it runs, in the ranks: it takes seconds, so one launch does all that needs it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from interop import sides
from interop.ours import OurRun
from interop.sides import SAVED_STEP, Facts
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from milepost.checkpoint.manager import CheckpointManager
from milepost.engines.fsdp import OptimizerSettings

OTHER = sides.settings(lr=0.5, betas=(0.5, 0.6), weight_decay=0.3)
"""What is made to take over what a checkpoint says: settings that would show."""


class VerlRole:
    """A model under verl's FSDP2 with verl's optimizer, schedule and checkpoint manager."""

    def __init__(self, base: Path, mesh: DeviceMesh, settings: OptimizerSettings, *, critic: bool) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
        from verl.utils.fsdp_utils import apply_fsdp2
        from verl.utils.torch_functional import get_cosine_schedule_with_warmup
        from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

        config = AutoConfig.from_pretrained(base)
        if critic:
            config.num_labels, config.classifier_dropout = 1, 0.0
        torch.manual_seed(11)  # of a critic's new head: the same on every rank
        auto_class = AutoModelForTokenClassification if critic else AutoModelForCausalLM
        self.model: Any = auto_class.from_pretrained(base, config=config, dtype=torch.float32).train()
        policy = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True)
        apply_fsdp2(self.model, {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}, {})
        self.optimizer: Any = build_optimizer(
            self.model.parameters(),
            FSDPOptimizerConfig(lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay),
        )
        self._grad_clip = settings.grad_clip
        self.scheduler: Any = get_cosine_schedule_with_warmup(self.optimizer, 0, sides.TOTAL_STEPS)
        # The actor's weights in Hugging Face's form too, which makes verl itself a judge of merges.
        contents = ["model", "optimizer", "extra", *([] if critic else ["hf_model"])]
        self.manager: Any = FSDPCheckpointManager(
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            processing_class=AutoTokenizer.from_pretrained(base),
            checkpoint_config={"save_contents": contents},
        )

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        assert last
        loss.backward()

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self._grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def advance_schedule(self) -> None:
        self.scheduler.step()


def verl_roles(base: Path, mesh: DeviceMesh, settings: OptimizerSettings) -> dict[str, VerlRole]:
    """Actor and critic."""
    return {name: VerlRole(base, mesh, settings, critic=name == "critic") for name in ("actor", "critic")}


def save_step(root: Path, step: int, roles: Mapping[str, VerlRole]) -> None:
    """Save as verl's trainer does: the roles, then the position of the data loader, then the tracker."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    folder = root / f"global_step_{step}"
    for name, role in roles.items():
        role.manager.save_checkpoint(str(folder / name), None, step)
    if dist.get_rank() == 0:
        loader = StatefulDataLoader(range(64), batch_size=4)
        with torch.random.fork_rng():  # verl's loader lives in another process than the ranks, and draws a seed
            for _ in zip(range(step), loader, strict=False):
                pass
        torch.save(loader.state_dict(), folder / "data.pt")
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    dist.barrier()


@dataclass(frozen=True)
class Leg:
    """What one side did from a saved step on: where it stood before, one step later, and each rank's random numbers
    after that step."""

    resumed: dict[str, Facts]
    went_on: dict[str, Facts]
    draws: list[list[float]]


@dataclass(frozen=True)
class TheirRun:
    """What happened in the launch that has verl.

    base:          the model directory that the run began with
    root:          the run's folder
    verl:          verl saved its step and went on
    milepost:      milepost resumed on two ranks from verl's step and went on
    lines:         what milepost printed of that
    verl_on_ours:  verl resumed on two ranks from the step that milepost saved and went on
    found:         the step folder that verl's own search found in milepost's run
    faults:        what verl made of checkpoints that it gets wrong; see `_faults`
    """

    base: Path
    root: Path
    verl: Leg
    milepost: Leg
    lines: list[str]
    verl_on_ours: Leg
    found: str
    faults: dict[str, Any]

    @property
    def step_dir(self) -> Path:
        """The step."""
        return self.root / f"global_step_{SAVED_STEP}"


def make_run(root: Path, ours: OurRun) -> TheirRun:
    """All that needs verl, in one launch of two ranks. The model's embeddings are tied, unlike those of our run."""
    base = sides.base_model(root / "base", tied=True)
    said = run_ranks(_everything, 2, base, root, ours.base, ours.root)
    legs = [Leg(*leg, [rank[1][number] for rank in said]) for number, leg in enumerate(said[0][0])]
    return TheirRun(base, root / "run", legs[0], legs[1], said[0][2], legs[2], said[0][3], said[0][4])


def _everything(base: Path, root: Path, our_base: Path, our_root: Path) -> Any:
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    mesh = sides.mesh_of(2)
    run = root / "run"
    theirs = verl_roles(base, mesh, sides.settings())
    sides.seed_rank()
    sides.train(theirs, *range(1, SAVED_STEP + 1))
    save_step(run, SAVED_STEP, theirs)
    legs = [_go_on(theirs)]

    roles = sides.engines(base, mesh, OTHER)
    with CheckpointManager(run, roles) as manager:
        manager.resume()
    legs.append(_go_on(roles))

    theirs = verl_roles(our_base, mesh, OTHER)
    found = find_latest_ckpt_path(str(our_root))
    for name, role in theirs.items():
        role.manager.load_checkpoint(f"{found}/{name}")
    legs.append(_go_on(theirs))
    faults = _faults(run, root / "faults") if dist.get_rank() == 0 else {}
    return [leg[:2] for leg in legs], [leg[2] for leg in legs], manager.report.lines(), found, faults


def _go_on(roles: Mapping[str, Any]) -> Any:
    resumed = sides.facts(roles)
    sides.train(roles, SAVED_STEP + 1)
    return resumed, sides.facts(roles), sides.draws()


def _faults(run: Path, scratch: Path) -> dict[str, Any]:
    """Checkpoints that verl gets wrong, and what it makes of them; they stay below `scratch` for milepost to read.

    plain_first   the actor with a plain tensor whose name sorts before all others: shape of verl's merged embedding
    copied        the actor where rank 1's model file is a copy of rank 0's: shape of verl's merged embedding
    lost          a run whose tracker names a step that is not there: what verl's search finds
    """
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    def embedding_merged_by_verl(role: Path) -> list[int]:
        config = ModelMergerConfig("test", "fsdp", local_dir=str(role), hf_model_config_path=str(role / "huggingface"))
        merger = FSDPModelMerger(config)
        mesh, names = merger._extract_device_mesh_info(merger._load_rank_zero_state_dict(2), 2)
        merged = merger._load_and_merge_state_dicts(2, *merger._calculate_shard_configuration(mesh, names), names)
        return list(merged["model.embed_tokens.weight"].shape)

    actor = run / f"global_step_{SAVED_STEP}" / "actor"
    plain_first, copied, lost = scratch / "plain_first" / "actor", scratch / "copied" / "actor", scratch / "lost"
    for target in (plain_first, copied):
        shutil.copytree(actor, target)
    for rank in (0, 1):
        path = plain_first / f"model_world_size_2_rank_{rank}.pt"
        state = torch.load(path, weights_only=False)
        torch.save({**state, "a_scale": torch.tensor(3.5)}, path)
    shutil.copyfile(copied / "model_world_size_2_rank_0.pt", copied / "model_world_size_2_rank_1.pt")
    shutil.copytree(run, lost)
    (lost / "latest_checkpointed_iteration.txt").write_text("20")
    return {
        "plain_first": embedding_merged_by_verl(plain_first),
        "copied": embedding_merged_by_verl(copied),
        "lost": find_latest_ckpt_path(str(lost)),
    }
