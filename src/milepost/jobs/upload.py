"""Uploading an export to the Hugging Face Hub, through huggingface_hub, which is an extra."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from milepost.errors import CallError
from milepost.jobs.lora_training import DIRECTORY as ADAPTER
from milepost.layouts.huggingface import CHECKSUMS, TORCH_WEIGHTS_INDEX, WEIGHTS_INDEX

# What an older upload may have left in the repository and a loader would mix with, or prefer to, the new weights.
_OLD_WEIGHTS = [
    "model*.safetensors",
    WEIGHTS_INDEX,
    "pytorch_model*.bin",
    TORCH_WEIGHTS_INDEX,
    CHECKSUMS,
    f"{ADAPTER}/*",
]
_NETWORK_LIBRARIES = ("httpx", "httpx2", "httpcore", "requests", "urllib3")
_XET_STATUS = re.compile(r"HTTP status (?:client|server) error \((\d{3}) ?([^)]*)\)")
"""How the xet client writes an answer of its storage."""
_TOKEN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"


def check_repository_name(repository: str) -> None:
    """Raise CallError unless the Hub could have a repository of this name, and where huggingface_hub is missing. Asks
    nobody."""
    try:
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415  start-up: most merges upload nothing
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # noqa: PLC0415
    except ImportError:
        raise CallError("--hf_upload_path needs huggingface_hub: pip install 'milepost[hub]'") from None

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise CallError(f"--hf_upload_path {repository}: no name of a repository: {_one_line(error)}") from None


def upload(directory: Path, repository: str, *, private: bool = False, bars: bool = False) -> str:
    """Upload a model directory into a repository, made where there is none; returns the repository's address.

    bars:  let huggingface_hub show its progress on stderr

    Weights that an older upload left there and this one does not replace are deleted with it, so that no loader mixes
    the two. A public repository is refused where `private` is asked for. Raises CallError saying that the directory
    stays, for whatever goes wrong.
    """
    check_repository_name(repository)
    from huggingface_hub import HfApi  # noqa: PLC0415
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # noqa: PLC0415

    if not bars:
        disable_progress_bars()
    api = HfApi()
    with _explained(directory, repository):
        url = api.create_repo(repository, private=True if private else None, exist_ok=True)
        if private and not api.repo_info(url.repo_id).private:
            raise CallError(_failed(directory, repository, "it exists and is public; make it private there first"))
        message = "Upload model merged by milepost"
        api.upload_folder(
            folder_path=directory, repo_id=url.repo_id, commit_message=message, delete_patterns=_OLD_WEIGHTS
        )
    return str(url)


@contextmanager
def _explained(directory: Path, repository: str) -> Iterator[None]:
    """Whatever huggingface_hub and the libraries below it raise, as one line that says what to do."""
    try:
        yield
    except CallError:
        raise
    except Exception as error:  # noqa: BLE001  several libraries, several hierarchies
        raise CallError(_failed(directory, repository, _why(error))) from None


def _failed(directory: Path, repository: str, why: str) -> str:
    return f"not uploaded to {repository}: {why}. The export stands in {directory}"


def _why(error: BaseException) -> str:
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled  # noqa: PLC0415

    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it and call again"
    if isinstance(error, LocalTokenNotFoundError):
        return f"there is no token; {_TOKEN}"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return _why_status(status, _one_line(error.server_message or f"HTTP status {status}"))
    told = _XET_STATUS.search(str(error))
    if told:
        return _why_status(int(told[1]), f"xet: {told[2]}")
    if isinstance(error, ConnectionError | TimeoutError) or type(error).__module__.partition(".")[0] in (
        _NETWORK_LIBRARIES
    ):
        return f"the Hub cannot be reached ({_one_line(error)}); see to the network and call again"
    # The xet client wraps what went wrong below it.
    return _why(error.__cause__) if error.__cause__ else f"{type(error).__name__}: {_one_line(error)}"


def _why_status(status: int, said: str) -> str:
    match status:
        case 401:
            return f"the Hub does not accept the token, or there is none; {_TOKEN}"
        case 403:
            return f"the token may not write there ({said}); {_TOKEN}"
        case 404:
            return "the Hub knows no such repository or namespace, or hides it from this token"
        case 429:
            return f"the Hub takes no more requests for now ({said}); wait and call again"
        case _ if status >= 500:
            return f"the Hub has a fault of its own ({status}: {said}); call again later"
        case _:
            return f"the Hub refused ({status}: {said})"


def _one_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
