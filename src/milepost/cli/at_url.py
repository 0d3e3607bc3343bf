"""What the reading commands do with a URL: `milepost merge s3://bucket/run out`, `inspect`, `verify`, `diff`, `prune`.

What needs no tensor is told from manifests and listings. What does is brought to a folder for temporary files, which
goes when the command ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from milepost.checkpoint.inventory import PIN
from milepost.checkpoint.locate import locate
from milepost.checkpoint.pruning import EXPORT, STEP, Going, Marks
from milepost.checkpoint.remote.copies import Copying, local_copy
from milepost.checkpoint.remote.fetching import place_of
from milepost.checkpoint.remote.folder import Remote
from milepost.checkpoint.remote.steps import RemoteStep, plan_remote, remote_steps, tracker_of, verify_remote
from milepost.checkpoint.retention import Retention, decide
from milepost.checkpoint.verify import Verdict
from milepost.cli import inspecting, pruning
from milepost.cli.options import print_json
from milepost.console import bytes_progress, note
from milepost.errors import CallError, NotFoundError
from milepost.transfer.execute import Progress
from milepost.wording import counted, file_size


@contextmanager
def copies(urls: Mapping[str, str], role: str | None, *, quiet: bool) -> Iterator[dict[str, Path]]:
    """For each URL, by the name of a parameter, a copy on this machine of the weights that it names."""

    def told(copying: Copying) -> AbstractContextManager[Progress]:
        size, place = file_size(copying.nbytes), copying.into.parent
        note(
            f"bringing {size} of {copying.url} to {place} (TMPDIR names another place); it goes at the end", quiet=quiet
        )
        return bytes_progress("download", copying.nbytes, quiet=quiet)

    with ExitStack() as held:
        yield {name: held.enter_context(local_copy(url, role, told)) for name, url in urls.items()}


def inspect(url: str, backend: str, globs: list[str], *, as_json: bool) -> None:
    """Say what a run, a step or a role at a URL holds."""
    place = place_of(url)
    if place.role or globs:
        with copies({"directory": url}, None, quiet=as_json) as paths:
            inspecting.inspect_role(locate(paths["directory"], backend=backend), globs, as_json)
        return
    if place.step is not None:
        _inspect_step(_step(place.remote, place.step), as_json)
        return
    steps = _steps(place.remote)
    facts = [step.facts() for step in steps]
    inspecting.say_run(url, facts, decide(steps, None), None, tracker_of(place.remote), as_json)


def _inspect_step(step: RemoteStep, as_json: bool) -> None:
    facts = step.facts()
    place = f"{step.remote}/{step.folder}"
    of_role = {
        role: [record.size for record in step.manifest.files if record.path.startswith(f"{role}/")]
        for role in facts.roles
    }
    if as_json:
        roles = {
            role: {"layout": layout, "files": len(of_role[role]), "bytes": sum(of_role[role])}
            for role, layout in zip(facts.roles, facts.layouts, strict=True)
        }
        print_json(kind="step", path=place, step=facts.step, state=facts.state, why=facts.why, roles=roles)
        return
    print(f"step {place}: {facts.state}{f', {facts.why}' if facts.why else ''}")
    for role, layout in zip(facts.roles, facts.layouts, strict=True):
        holds = f"{counted(len(of_role[role]), 'file')}, {file_size(sum(of_role[role]))}"
        print(f"{role}: layout {layout}, world size {facts.world_size}, {holds}")


def verify(url: str, *, deep: bool, as_json: bool, quiet: bool) -> None:
    """Check the steps at a URL: that each file is there with its size; deep: every byte, streamed."""
    place = place_of(url)
    steps = [_step(place.remote, place.step)] if place.step is not None else list(_steps(place.remote))
    total = sum(sum(step.sizes.values()) for step in steps) if deep else 0
    problems: list[str] = []
    with bytes_progress("verify", total, quiet=quiet or not deep) as progress:
        for step in steps:
            problems += verify_remote(step, deep=deep, progress=progress)
    files = sum(len(step.sizes) for step in steps)
    nbytes = sum(sum(step.sizes.values()) for step in steps)
    notes = () if deep else ("at a URL only names and sizes are compared; --deep reads every byte",)
    kind = "run" if place.step is None else "step"
    inspecting.say_verdict(Verdict(Path(url), kind, files, nbytes, deep, tuple(problems), notes), url, deep, as_json)


def prune(
    url: str,
    retention: Retention,
    marks: Marks,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Remove steps at a URL that nothing keeps. Whether a run uploads there now cannot be seen; it would harm none of
    its steps, since the newest stays."""
    remote = place_of(url).remote
    steps = _steps(remote)
    marks.check(url, [step.step for step in steps])
    if retention.keeps_all:
        if not marks:
            raise CallError(pruning.WHAT)
        if not dry_run:
            _pin(steps, marks)
        pruning.report_marks(url, marks, dry_run, as_json)
        return
    for step in steps:
        if (pinned := marks.on(step.step)) is not None:
            step.pinned = pinned
    plan = plan_remote(steps, retention)
    going = [Going(STEP, step.step, Path(step.folder), sum(step.sizes.values())) for step in plan.steps]
    going += [Going(EXPORT, step.step, Path(step.folder), step.facts().export_bytes) for step in plan.exports]
    pruning.show(url, plan.decisions, going, retention, (), quiet)
    if not dry_run:
        pruning.require_yes(going, (), yes)
        _pin(steps, marks)
        plan.carry_out()
    pruning.report(url, plan.decisions, going, retention, (), marks, dry_run, as_json)


def _pin(steps: Sequence[RemoteStep], marks: Marks) -> None:
    for step in steps:
        if step.step in marks.pin:
            step.remote.put_bytes(b"", f"{step.folder}/{PIN}")
        elif step.step in marks.unpin:
            step.remote.remove([f"{step.folder}/{PIN}"])


def _steps(remote: Remote) -> tuple[RemoteStep, ...]:
    steps = remote_steps(remote)
    if not steps:
        raise NotFoundError(f"{remote} holds no step; give the URL of a run, a step or a role")
    return steps


def _step(remote: Remote, number: int) -> RemoteStep:
    found = next((step for step in remote_steps(remote) if step.step == number), None)
    if found is None:
        raise NotFoundError(f"{remote} holds no step {number}")
    return found
