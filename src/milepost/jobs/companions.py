"""The small files that travel with a model: where its config.json and its tokenizer come from.

Most checkpoints have both in one directory. NeMo-RL puts the tokenizer beside the weights, as the run left it, and no
config.json anywhere; the step's `config.yaml` says which model it trained:

    step_N/config.yaml              policy: {model_name: Qwen/Qwen2.5-1.5B or a directory, ...}
    step_N/training_info.json
    step_N/policy/weights/          the torch DCP folder
    step_N/policy/optimizer/
    step_N/policy/tokenizer/        tokenizer.json, tokenizer_config.json, chat_template.jinja, ...

Facts: NeMo-RL of August 2026, `utils/checkpoint.py`, `utils/native_checkpoint.py`, `examples/converters`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milepost.errors import NotFoundError
from milepost.layouts.huggingface import CONFIG, companion_files, find_companions

_TOKENIZER_DIRECTORY = "tokenizer"
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template", "spiece")
_TOKENIZER_SUFFIX = ".model"  # sentencepiece, under many names
_RUN_CONFIG = "config.yaml"
_WEIGHTS = "weights"


def companions_of(role_directory: Path, hf_model_path: Path | None = None) -> Path:
    """The directory with config.json: the one given, else the checkpoint's own, else the model that the run's config
    names, where that is a directory here. NotFoundError if there is none."""
    if hf_model_path is not None:
        if not (hf_model_path / CONFIG).is_file():
            raise NotFoundError(
                f"{hf_model_path}: has no {CONFIG}; --hf_model_path takes a Hugging Face model directory"
            )
        return hf_model_path
    found = find_companions(role_directory)
    if found is not None:
        return found
    named = _trained_model(role_directory)
    if named is None:
        raise NotFoundError(
            f"{role_directory}: no {CONFIG} in it or in huggingface/; give the model's directory with --hf_model_path"
        )
    path, name = named
    if (Path(name) / CONFIG).is_file():
        return Path(name)
    raise NotFoundError(
        f"{role_directory}: no {CONFIG} in it; {path} says that {name} was trained: give a directory with that model's "
        f"{CONFIG} with --hf_model_path"
    )


def find_tokenizer(role_directory: Path) -> Path | None:
    """The directory of the tokenizer that a run left beside its weights, where it is one of its own."""
    place = role_directory.resolve()
    parents = (place, place.parent) if place.name == _WEIGHTS else (place,)
    found = (parent / _TOKENIZER_DIRECTORY for parent in parents)
    return next((path for path in found if path.is_dir() and any(map(_is_tokenizer, companion_files(path)))), None)


def files_of(companions: Path, tokenizer: Path | None) -> list[Path]:
    """The files that travel: those of `companions`, whose tokenizer stays behind where the run has its own."""
    if tokenizer is None:
        return companion_files(companions)
    own = companion_files(tokenizer)
    taken = {path.name for path in own}
    rest = [path for path in companion_files(companions) if path.name not in taken and not _is_tokenizer(path)]
    return sorted([*rest, *(path for path in own if path.name != CONFIG)], key=lambda path: path.name)


def _is_tokenizer(path: Path) -> bool:
    return path.name.startswith(_TOKENIZER) or path.suffix == _TOKENIZER_SUFFIX


def _trained_model(role_directory: Path) -> tuple[Path, str] | None:
    """The config of the run, and the model that it names."""
    place = role_directory.resolve()
    if place.name == _WEIGHTS:
        place = place.parent
    path = place.parent / _RUN_CONFIG
    sections: Any = _read_yaml(path) if path.is_file() else None
    for role in (place.name, "policy"):
        section = sections.get(role) if isinstance(sections, dict) else None
        name = section.get("model_name") if isinstance(section, dict) else None
        if isinstance(name, str):
            return path, name
    return None


def _read_yaml(path: Path) -> Any:
    import yaml  # noqa: PLC0415  few checkpoints have one

    try:
        return yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None  # any program can have left a file of this name: it only helps where it says something
