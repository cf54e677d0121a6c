"""A training of a LoRA adapter by TRL, and what its engine must have answered."""

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from rollstream.engine.weight_probe import PROBE_FILE
from rollstream.integrations.trl.groups import EnvironmentGroups
from rollstream.integrations.trl.weights import FolderWeights
from rollstream.trajectory import Completion
from tests.support.adapters import check_logprobs


def check_training(made: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Trains; each token's log-prob is peft's own, under the adapter after as many steps as its version says.

    Returns:
        What the engine was told to load.
    """
    groups: list[Any] = []
    written: list[Path] = []
    generate, write = EnvironmentGroups.generate, FolderWeights.write

    async def noted(self: Any, group: Any) -> Any:
        groups.append(await generate(self, group))
        return groups[-1]

    def told(self: Any, model: Any, step: int) -> str:
        written.append(Path(write(self, model, step)))
        assert {path.name for path in written[-1].iterdir()} <= {
            *("adapter_config.json", "adapter_model.safetensors", PROBE_FILE, "README.md")
        }
        return str(written[-1])

    class Keeps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            model.save_pretrained(folder / str(state.global_step))

    monkeypatch.setattr(EnvironmentGroups, "generate", noted)
    monkeypatch.setattr(FolderWeights, "write", told)
    made.model.save_pretrained(folder / "0")
    made.callback_handler.callbacks.insert(0, Keeps())
    made.train()
    sources = {step: folder / str(step) for step in range(made.state.global_step + 1)}
    rollouts = [rollout for group in groups for rollout in group]
    assert len({one.final.policy_versions[0][1] for one in rollouts}) > 1
    for one in rollouts:
        ids, logprobs, versions = (
            one.final.response_ids,
            one.final.response_logprobs,
            one.final.policy_versions,
        )
        answer = Completion(ids, logprobs, "stop", versions)
        check_logprobs(answer, one.final.prompt_ids, sources)
        assert len(versions) == 1 or made.args.weight_sync != "pinned"
    return written
