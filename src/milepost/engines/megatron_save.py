"""A Megatron engine's files in a step, in either of Megatron's forms.

classic, as verl's first Megatron engines wrote it, layers and experts counted over the whole model:

    model/mp_rank_{tp:02d}[_{pp:03d}][_{ep:03d}]/model_states.pt    a list: one state dict for each virtual stage
    optim/distrib_optim_pp{pp}_tp{tp}_cp0_dp{dp}.pt                 the optimizer's state dict, parameters by name
    optim/opt_param_scheduler.pt                                    the schedule
    rng_states/rng_states_pp{pp}_tp{tp}_cp0_dp{dp}.pt               {"rank", "rng"}, of every rank

dist, what `megatron.core.dist_checkpointing` itself writes and reads, on any other number of ranks too:

    dist_ckpt/.metadata, __{rank}_{i}.distcp, common.pt, metadata.json

Ranks that hold the same write it once.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from milepost.engines import cpu_compat
from milepost.engines.base import RoleFiles
from milepost.engines.companions import save_companions
from milepost.engines.megatron_state import named_tensors, unwrapped

if TYPE_CHECKING:
    from milepost.engines.megatron import MegatronEngine

CLASSIC, DIST = "classic", "dist"
FORMS = (CLASSIC, DIST)
DIST_FOLDER = "dist_ckpt"
_PART = ".dist_ckpt.part"


@dataclass(frozen=True)
class Place:
    """A rank among all: tensor-parallel, pipeline, expert- and data-parallel, and how many stages and expert ranks."""

    tp: int
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
    if folders.index(place.folder) == engine.rank:
        chunks = [_weights(chunk, engine) for chunk in engine.model.chunks]
        with files.create(f"model/{place.folder}/model_states.pt") as file:
            torch.save(chunks, file)
        if engine.optimizer is not None:
            with files.create(f"optim/distrib_optim_{place.suffix}.pt") as file:
                torch.save(engine.optimizer.state_dict(), file)
    if engine.rank == 0 and engine.scheduler is not None:
        with files.create("optim/opt_param_scheduler.pt") as file:
            torch.save(engine.scheduler.state_dict(), file)
    with files.create(f"rng_states/rng_states_{place.suffix}.pt") as file:
        torch.save({"rank": engine.rank, "rng": engine.generators()}, file)


def _weights(chunk: Any, engine: MegatronEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors([chunk], engine.config).items()}


def _save_dist(engine: MegatronEngine, files: RoleFiles) -> None:
    """Let Megatron write into a folder beside, and take its files into the step once all of them are finished."""
    part = files.directory / _PART
    if engine.rank == 0:
        part.mkdir(parents=True)
    dist.barrier()
    checkpointing = importlib.import_module("megatron.core.dist_checkpointing")
    with cpu_compat.written_in_this_process():
        checkpointing.save(sharded_state(engine), str(part), validate_access_integrity=True)
    dist.barrier()
    own = sorted(part.glob(f"__{engine.rank}_*.distcp"))
    if engine.rank == 0:
        own += sorted(path for path in part.iterdir() if path.suffix != ".distcp")
    for path in own:
        files.adopt(path, f"{DIST_FOLDER}/{path.name}")
    dist.barrier()
    if engine.rank == 0:
        shutil.rmtree(part)


def sharded_state(engine: MegatronEngine) -> dict[str, Any]:
    """All of the state in Megatron's sharded form, under the keys that Megatron-LM uses: model (model0, model1, ... of
    virtual stages), optimizer, opt_param_scheduler, rng_state."""
    state = importlib.import_module("megatron.core.parallel_state")
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    metadata = {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
    chunks = [unwrapped(chunk) for chunk in engine.model.chunks]
    names = ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]
    found: dict[str, Any] = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }
    if engine.optimizer is not None:
        found["optimizer"] = _sharded_optimizer(engine.optimizer, [found[name] for name in names])
    if engine.scheduler is not None:
        found["opt_param_scheduler"] = engine.scheduler.state_dict()
    generators = {"rank": engine.rank, "rng": engine.generators()}
    found["rng_state"] = mapping.ShardedObject("rng_state", generators, (engine.world_size,), (engine.rank,))
    return found


def _sharded_optimizer(optimizer: torch.optim.AdamW, weights: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """AdamW's state cut as the weights are. Its counts are one number for all, as Megatron keeps them."""
    tools = importlib.import_module("megatron.core.dist_checkpointing.optimizer")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_number = tools.get_param_id_to_sharded_param_map({str(n): chunk for n, chunk in enumerate(weights)}, parameters)
    found = optimizer.state_dict()
    steps = {float(state["step"]) for state in found["state"].values()}
    for group in found["param_groups"]:
        del group["param_names"]  # of this rank, and what is common to all is written once
    tools.optim_state_to_sharding_state(found, by_number, exclude_keys=("step",))
    return {**found, "step": max(steps, default=0.0)}
