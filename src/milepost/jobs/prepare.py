"""From an opened checkpoint to the tensors of a Hugging Face model: what `merge` writes and `test` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.cast import cast_dtype
from milepost.errors import CallError, CheckpointError, NotFoundError
from milepost.index import TensorIndex
from milepost.jobs.companions import companions_of, find_tokenizer
from milepost.layouts import open_directory
from milepost.layouts.huggingface import find_companions, is_model_directory, read_config, read_safetensors
from milepost.mapping import FAMILIES, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, names
from milepost.mapping.dialects import MEGATRON
from milepost.mapping.wrappers import VALUE, has_adapter, take_part
from milepost.settings import setting
from milepost.transfer.execute import Update

if TYPE_CHECKING:  # what concerns adapters is imported where there is one: the start of a small merge is half of it
    from milepost.jobs.lora import AdapterExport
    from milepost.mapping.lora import LoraRun

KEEP, MERGE = "keep", "merge"


@dataclass(frozen=True)
class ModelOptions:
    """What a user says of a model; the defaults let the checkpoint and its config.json decide.

    part:  "policy" or "value", of a state dict that holds both
    """

    hf_model_path: Path | None = setting(  # noqa: RUF009  it is dataclasses.field
        None, "Take config and tokenizer from this model directory."
    )
    is_value_model: bool = setting(
        False, "A critic: its head becomes a token classification head.", flag="--is-value-model"
    )
    tie_word_embedding: bool = setting(
        False, "Output and input embeddings are one tensor.", flag="--tie-word-embedding"
    )
    lora: str = setting(KEEP, "A LoRA adapter: keep (lora_adapter/, base model beside it) or merge into one.")
    lora_alpha: float | None = setting(None, "The adapter's alpha, where no file says it.", flag="--lora-alpha")
    allow_missing: tuple[str, ...] = setting(
        (), "Tensors that may be missing; may be repeated.", flag="--allow-missing", metavar="GLOB"
    )
    part: str | None = None


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model as it is to lie in a Hugging Face directory.

    index:       tensors under Hugging Face's names, in their source's element types
    config:      what config.json must say, element type not yet made true
    companions:  the directory whose small files travel with it
    notes:       what was decided on the way, one line each
    tokenizer:   the directory of the tokenizer, where the run left it in one of its own
    updates:     what changes which tensor on its way: an adapter that is merged
    adapter:     an adapter that stays beside the model
    """

    index: TensorIndex
    config: Mapping[str, Any]
    companions: Path
    notes: tuple[str, ...]
    tokenizer: Path | None = None
    updates: Mapping[str, Update] = field(default_factory=dict)
    adapter: AdapterExport | None = None

    def comparable(self) -> TensorIndex:
        """All tensors of the export, those of an adapter with its directory in front of their names."""
        if self.adapter is None:
            return self.index
        from milepost.jobs.lora import beside  # noqa: PLC0415

        return beside(self.index, self.adapter.index)


def prepare(directory: Path, backend: str = "auto", options: ModelOptions | None = None) -> HuggingFaceModel:
    """Open a role directory and map it to Hugging Face; nothing is written.

    Raises MismatchError or IncompleteError listing what is missing, extra or of another shape than the architecture in
    config.json asks for; CallError where the state dict holds two models and `options.part` names none.
    """
    options = options or ModelOptions()
    return _prepare(directory, backend, options, companions_of(directory, options.hf_model_path), complete=True)


def prepare_to_compare(
    directory: Path, reference: Path, backend: str = "auto", options: ModelOptions | None = None
) -> HuggingFaceModel:
    """The same for a comparison: a checkpoint without a config of its own is read by the reference's, and what is
    missing or extra is left to the comparison to find."""
    options = options or ModelOptions()
    own = options.hf_model_path or find_companions(directory) or reference
    return _prepare(directory, backend, options, companions_of(directory, own), complete=False)


def open_reference(directory: Path) -> TensorIndex:
    """A Hugging Face model directory to compare with, and the adapter beside the model where it has one."""
    from milepost.jobs.lora import ADAPTER_WEIGHTS, beside  # noqa: PLC0415
    from milepost.jobs.lora_training import DIRECTORY  # noqa: PLC0415

    index = open_directory(directory, "huggingface")
    path = directory / DIRECTORY / ADAPTER_WEIGHTS
    return beside(index, index.with_entries(read_safetensors(path))) if path.is_file() else index


def _prepare(
    directory: Path, backend: str, options: ModelOptions, companions: Path, *, complete: bool
) -> HuggingFaceModel:
    if options.lora not in (KEEP, MERGE):
        raise CallError(f"--lora {options.lora}: choose from {KEEP}, {MERGE}")
    config = read_config(companions)
    if options.tie_word_embedding:
        config["tie_word_embeddings"] = True
    family = FAMILIES.get(config.get("model_type", ""))
    opened = open_directory(directory, backend)
    part = take_part(
        names.strip_wrappers(opened.weights()),
        options.part,
        "model" if family is None else family.base,
    )
    run = None
    index, notes = part.index, part.notes
    if opened.layout == MEGATRON:
        from milepost.mapping.megatron import remarks  # noqa: PLC0415

        notes = (*remarks(opened), *notes)
    if has_adapter(part.index):
        from milepost.mapping.lora import take_apart  # noqa: PLC0415

        run = _with_base(take_apart(part.index), options, directory)
        replaced = run.base.with_entries({**run.base, **run.trained})
        index = replaced if options.lora == MERGE else run.base
        notes += run.notes
    try:
        mapped = names.to_huggingface(
            index,
            config,
            is_value_model=options.is_value_model,
            # A value model beside a policy is one head for the sequence, a critic of its own one for each token.
            value_head=SEQUENCE_CLASSIFICATION if options.part == VALUE else TOKEN_CLASSIFICATION,
            allow_missing=options.allow_missing,
            complete=complete,
        )
    except CheckpointError as error:
        if options.part != VALUE or options.hf_model_path is not None:
            raise
        hint = f"{companions} may be the policy's; give the value model's own with --hf_model_path"
        raise type(error)(f"{error}\n{hint}") from None
    notes += mapped.notes
    tokenizer = find_tokenizer(directory)
    if tokenizer is not None:
        notes += (f"the tokenizer is the run's own, {tokenizer}; config.json is that of {companions}",)
    model = HuggingFaceModel(
        mapped.index.with_entries({**mapped.index, **part.beside}), mapped.config, companions, notes, tokenizer
    )
    return model if run is None else _with_adapter(model, run, mapped, options, directory)


def _with_base(run: LoraRun, options: ModelOptions, directory: Path) -> LoraRun:
    """A run whose checkpoint holds the adapter alone gets its base from the model's directory."""
    if run.base:
        return run
    path = options.hf_model_path
    if path is None or not is_model_directory(path):
        raise NotFoundError(
            f"{directory}: holds a LoRA adapter and no base model; give the base model's directory, with its weights, "
            "with --hf_model_path"
        )
    base = open_directory(path, "huggingface")
    note = f"the checkpoint holds the adapter alone; the base model is {path}'s"
    return replace(run, base=replace(base, files=(*run.base.files, *base.files)), notes=(*run.notes, note))


def _with_adapter(
    model: HuggingFaceModel, run: LoraRun, mapped: names.Mapped, options: ModelOptions, directory: Path
) -> HuggingFaceModel:
    from milepost.jobs.lora import adapter_export  # noqa: PLC0415
    from milepost.jobs.lora_merge import updates  # noqa: PLC0415
    from milepost.jobs.lora_training import DIRECTORY, find_training  # noqa: PLC0415

    training = find_training((directory, model.companions), options.lora_alpha)
    adapted, whole = len(run.adapter.modules), len(run.adapter.whole)
    count = f"{adapted} modules" + (f" and {whole} trained whole" if whole else "")
    notes = (*model.notes, *training.notes)
    if options.lora == MERGE:
        changes = updates(run.adapter, training, mapped)
        return replace(model, updates=changes, notes=(*notes, f"merged the LoRA adapter of {count} into the weights"))
    adapter = adapter_export(run, training, mapped)
    note = f"the LoRA adapter of {count} goes to {DIRECTORY}/ beside its base; --lora merge makes them one"
    return replace(model, adapter=adapter, notes=(*notes, note))


def under_cast(index: TensorIndex, dtype: str) -> TensorIndex:
    """The index as it will be written under `--dtype`: element types changed."""
    return index.with_entries(
        {name: replace(entry, dtype=cast_dtype(name, entry.dtype, dtype)) for name, entry in index.entries.items()}
    )
