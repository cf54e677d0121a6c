"""Environments of the `verifiers` package as agent loops, with exact tokens.

    rollstream verifiers my_environment --output prompts
    rollstream generate data.train_files=prompts/prompts.jsonl \\
        actor_rollout_ref.rollout.agent.agent_loop_config_path=prompts/agents.yaml ...

An environment asks for chat completions over HTTP, as it does everywhere. Who answers is the loop: by the
run's engine, with ids in and ids out, so that what is stored is what was sampled.

`verifiers` is imported when an environment is loaded. See docs/verifiers.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.integrations.verifiers.command import write_prompts
    from rollstream.integrations.verifiers.loop import VerifiersLoop

__all__ = ["VerifiersLoop", "write_prompts"]

_HOMES = {"VerifiersLoop": "loop", "write_prompts": "command"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
