"""From an opened checkpoint to the tensors of a Hugging Face model: what `merge` writes and `test` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from milepost.errors import NotFoundError
from milepost.index import TensorIndex
from milepost.layouts import open_directory
from milepost.layouts.huggingface import CONFIG, find_companions, read_config
from milepost.mapping import names
from milepost.transfer.cast import cast_dtype


@dataclass(frozen=True)
class ModelOptions:
    """What a user says of a model; the defaults let the checkpoint and its config.json decide.

    hf_model_path:       directory to take config and tokenizer from, instead of the checkpoint's own
    is_value_model:      a critic, whatever class config.json names
    tie_word_embedding:  output and input embedding are one tensor, whatever config.json says
    allow_missing:       patterns of names that may be absent
    """

    hf_model_path: Path | None = None
    is_value_model: bool = False
    tie_word_embedding: bool = False
    allow_missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model as it is to lie in a Hugging Face directory.

    index:       tensors under Hugging Face's names, in their source's element types
    config:      what config.json must say, element type not yet made true
    companions:  the directory whose small files travel with it
    notes:       what was decided on the way, one line each
    """

    index: TensorIndex
    config: Mapping[str, Any]
    companions: Path
    notes: tuple[str, ...]


def prepare(directory: Path, backend: str = "auto", options: ModelOptions | None = None) -> HuggingFaceModel:
    """Open a role directory and map it to Hugging Face; nothing is written.

    Raises MismatchError or IncompleteError listing what is missing, extra or of another shape than the architecture in
    config.json asks for.
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


def _prepare(
    directory: Path, backend: str, options: ModelOptions, companions: Path, *, complete: bool
) -> HuggingFaceModel:
    config = read_config(companions)
    if options.tie_word_embedding:
        config["tie_word_embeddings"] = True
    mapped = names.to_huggingface(
        open_directory(directory, backend).weights(),
        config,
        is_value_model=options.is_value_model,
        allow_missing=options.allow_missing,
        complete=complete,
    )
    return HuggingFaceModel(mapped.index, mapped.config, companions, mapped.notes)


def companions_of(role_directory: Path, hf_model_path: Path | None = None) -> Path:
    """The directory with config.json and tokenizer: the one given, else the checkpoint's own. NotFoundError if none."""
    if hf_model_path is not None:
        if not (hf_model_path / CONFIG).is_file():
            raise NotFoundError(
                f"{hf_model_path}: has no {CONFIG}; --hf_model_path takes a Hugging Face model directory"
            )
        return hf_model_path
    found = find_companions(role_directory)
    if found is None:
        raise NotFoundError(
            f"{role_directory}: no {CONFIG} in it or in huggingface/; give the model's directory with --hf_model_path"
        )
    return found


def under_cast(index: TensorIndex, dtype: str) -> TensorIndex:
    """The index as it will be written under `--dtype`: element types changed."""
    return index.with_entries(
        {name: replace(entry, dtype=cast_dtype(name, entry.dtype, dtype)) for name, entry in index.entries.items()}
    )
