"""A Megatron engine's files in a step, in either of Megatron's forms.

classic, as verl's first Megatron engines wrote it, layers and experts counted over the whole model:

    model/mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_states.pt    a list: one state dict for each virtual stage
    optim/distrib_optim_pp{pp}_tp{tp}_cp0_dp{dp}.pt                 the optimizer's state dict, parameters by name; of a
                                                                    distributed optimizer each rank's own shares
    optim/opt_param_scheduler.pt                                    the schedule
    rng_states/rng_states_pp{pp}_tp{tp}_cp0_dp{dp}.pt               {"rank", "rng"}, of every rank

dist, what `megatron.core.dist_checkpointing` itself writes and reads, on any other number of ranks too:

    dist_ckpt/.metadata, __{rank}_{i}.distcp, common.pt, metadata.json

Ranks that hold the same write it once.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from milepost.engines.base import RoleFiles
from milepost.engines.companions import save_companions
from milepost.engines.megatron.adam import WholeParameters
from milepost.engines.megatron.dist_checkpoint import write_dist
from milepost.engines.megatron.distributed_optimizer import SharedParameters
from milepost.engines.megatron.sharded import sharded_state
from milepost.engines.megatron.state import named_tensors

if TYPE_CHECKING:
    from milepost.engines.megatron.engine import MegatronEngine

CLASSIC, DIST = "classic", "dist"
FORMS = (CLASSIC, DIST)
DIST_FOLDER = "dist_ckpt"


@dataclass(frozen=True)
class Place:
    """A rank among all: tensor-parallel, pipeline, expert- and data-parallel, and how many stages and expert ranks.

    expert_tp:  its place among the ranks that each hold a part of an expert
    """

    tp: int
    expert_tp: int
    pp: int
    ep: int
    dp: int
    stages: int
    expert_ranks: int

    @staticmethod
    def here() -> Place:
        """This rank's."""
        state = importlib.import_module("megatron.core.parallel_state")
        return Place(
            state.get_tensor_model_parallel_rank(),
            state.get_expert_tensor_parallel_rank(),
            state.get_pipeline_model_parallel_rank(),
            state.get_expert_model_parallel_rank(),
            state.get_data_parallel_rank(),
            state.get_pipeline_model_parallel_world_size(),
            state.get_expert_model_parallel_world_size(),
        )

    @property
    def folder(self) -> str:
        """Megatron's name of the folder of its weights."""
        pp = f"_{self.pp:03d}" if self.stages > 1 else ""
        ep = f"_{self.ep:03d}" if self.expert_ranks > 1 else ""
        return f"mp_rank_{self.tp:02d}{pp}{ep}"

    @property
    def suffix(self) -> str:
        """How verl names the files of a rank."""
        return f"pp{self.pp}_tp{self.tp}_cp0_dp{self.dp}"


def save(engine: MegatronEngine, files: RoleFiles) -> None:
    """Write this rank's files. All ranks call it together."""
    (_save_dist if engine.form == DIST else _save_classic)(engine, files)


def save_config(files: RoleFiles, companions: Path | None, config_text: str | None, config: Mapping[str, Any]) -> None:
    """Write `huggingface/`; without a model directory the config that the model was built for. One rank calls it."""
    text = json.dumps(dict(config), indent=2) if companions is None and config_text is None else config_text
    save_companions(files, None, companions, text)


def _save_classic(engine: MegatronEngine, files: RoleFiles) -> None:
    place = Place.here()
    folders: list[Any] = [None] * engine.world_size
    dist.all_gather_object(folders, place.folder)
    # Of the ranks that hold the same, one writes the moments, which are twice as many bytes, and another the weights.
    holders = [rank for rank, folder in enumerate(folders) if folder == place.folder]
    if engine.rank == holders[-1]:
        chunks = [_weights(chunk, engine) for chunk in engine.model.chunks]
        files.save(f"model/{place.folder}/model_states.pt", chunks)
    if engine.rank == holders[0] and isinstance(engine.updates, WholeParameters):
        files.save(f"optim/distrib_optim_{place.suffix}.pt", engine.updates.state_dict())
    if isinstance(engine.updates, SharedParameters):
        files.save(f"optim/distrib_optim_{place.suffix}.pt", engine.updates.state_dict(place.tp, place.expert_tp))
    if engine.rank == 0 and engine.scheduler is not None:
        files.save("optim/opt_param_scheduler.pt", engine.scheduler.state_dict())
    files.save(f"rng_states/rng_states_{place.suffix}.pt", {"rank": engine.rank, "rng": engine.generators()})


def _weights(chunk: Any, engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors([chunk], engine.config).items()}


def _save_dist(engine: MegatronEngine, files: RoleFiles) -> None:
    write_dist(sharded_state(engine), files, DIST_FOLDER)
