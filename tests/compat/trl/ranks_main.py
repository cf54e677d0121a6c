"""One process of a training on several, with the environment that `torchrun` makes. Writes what it saw."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from demo_model.problems import Split, enumerate_pairs
from examples.edit_context import train as example
from rollstream.integrations.trl.groups import EnvironmentGroups
from tests.compat.trl.parts import MODEL, Recording, environment, load, rows, settings, trainer

PROBLEMS = list(enumerate_pairs(2, Split.TRAIN))[:12]


def main(folder: Path, mode: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = folder / f"rank{rank}"
    own.mkdir(parents=True, exist_ok=True)
    said: dict[str, Any] = {"error": None}
    # Of the logs TRL gathers numbers: without, a process may be a batch ahead of another.
    options = {"num_steps_async": 0, "logging_steps": 100} if mode == "waiting" else {}
    made = (
        edits_context(own, ranks)
        if mode == "snapshots"
        else trainer(
            own,
            rows(10),
            env=environment(own),
            max_steps=3,
            per_device_train_batch_size=8 // ranks,
            per_device_eval_batch_size=8 // ranks,
            eval_dataset=rows(3),
            teacher=str(MODEL),
            distill_coef=0.1,
            **options,
        )
    )
    if mode == "generation":

        async def generate(self: EnvironmentGroups, group: Any) -> Any:
            raise ValueError("no more prompts in the cupboard")

        EnvironmentGroups.generate = generate  # type: ignore[method-assign]
    if mode == "waiting":
        EnvironmentGroups.generate = never_again(EnvironmentGroups.generate)  # type: ignore[method-assign]
        if rank == ranks - 1:
            made.add_callback(FailsAfterAStep())
    if mode == "reward" and rank == ranks - 1:
        made.reward_funcs[0] = broken_reward
    try:
        made.train()
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
    if mode == "train":
        said["evaluated"] = made.evaluate()
    said["sampled"], said["given"] = made.sampled_prompts, made.given_prompts
    said["rows"] = made.trained_rows
    said["outputs"] = [
        {
            "rows": len(output["advantages"]),
            "tokens": int((output["completion_mask"] * output["tool_mask"]).sum()),
            "all_tokens": int(output["num_items_in_batch"]),
        }
        for output in made.outputs
    ]
    said["trajectories"] = [
        entry["rollstream/trajectories"]
        for entry in made.state.log_history
        if "rollstream/trajectories" in entry
    ]
    said["kl"], said["teacher"] = (
        [entry[f"rollstream/{name}"] for entry in made.state.log_history if f"rollstream/{name}" in entry]
        for name in ("kl_k3", "teacher_k3")
    )
    said["advantages"] = [list(output["advantages"].shape) for output in made.outputs]
    said["rewards"] = [entry["reward"] for entry in made.state.log_history if "reward" in entry]
    said["weights"] = float(sum(parameter.double().abs().sum() for parameter in made.model.parameters()))
    said["threads"] = torch.get_num_threads()
    (folder / f"{rank}.json").write_text(json.dumps(said))
    if said["error"] is not None:
        sys.exit(1)


def edits_context(folder: Path, ranks: int) -> Any:
    """Rollouts with several trajectories: see test_snapshots."""
    model, tokenizer = load()
    model.load_state_dict(torch.load(folder.parent / "edits.pt"))
    return Recording(
        model,
        example.environment(folder, "actor_rollout_ref.rollout.name=hf"),
        settings(folder, max_steps=1, max_completion_length=64, per_device_train_batch_size=8 // ranks),
        train_dataset=example.dataset(PROBLEMS),
        processing_class=tokenizer,
    )


def never_again(generate: Any) -> Any:
    """The first batch comes, the second one never."""
    begun = 0

    async def first_batch(self: EnvironmentGroups, group: Any) -> Any:
        nonlocal begun
        begun += 1
        if begun > 4:
            await asyncio.Event().wait()
        return await generate(self, group)

    return first_batch


class FailsAfterAStep(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """While the main process waits for the next batch."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(1.0)
        raise OSError("the disk is full")


def broken_reward(**_: Any) -> Any:
    raise ZeroDivisionError("a reward broke")
