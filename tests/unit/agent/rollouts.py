"""Rollouts of the tests: a model that says what it is told to, a worker around it, prompt rows."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import orjson

from rollstream.agent.base import AgentResources
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.registry import AgentLoops
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RewardScorer, RolloutWorker
from rollstream.testing.scripted import AnswerRule, ScriptedEngine, ScriptedRequest
from rollstream.trajectory import Failure, PromptRow, Rollout, SamplingParams, Trajectory

END = "<|im_end|>"
FAR = 60.0
"""Seconds; more than any of this takes."""


@cache
def demo_tokenizer() -> ChatTokenizer:
    return load_tokenizer(str(MODEL_PATH))


def call_text(name: str, /, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{orjson.dumps({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"


def says(*answers: str, rows: Mapping[int, Sequence[str]] | None = None, end: str = END) -> AnswerRule:
    """Every attempt at a rollout hears these answers in turn, then the last one for ever.

    Args:
        answers: texts, without their end.
        rows: other answers for rows by index.
        end: the token that ends each.
    """
    turns: defaultdict[str, int] = defaultdict(int)

    def rule(request: ScriptedRequest) -> list[int]:
        turn = turns[request.request_id]
        turns[request.request_id] += 1
        mine = (rows or {}).get(int(request.request_id.split("-")[0]), answers)
        return demo_tokenizer().encode(mine[min(turn, len(mine) - 1)] + end)

    return rule


def resources(engine: ScriptedEngine, **given: Any) -> AgentResources:
    """Of a worker with the demo model's tokenizer; `given` are fields of `AgentResources`."""
    tokenizer = given.pop("tokenizer", None) or demo_tokenizer()
    tools: ToolBox = given.pop("tools", None) or ToolBox()
    prompts = PromptRenderer(
        tokenizer,
        prompt_length=given.pop("prompt_length", 2000),
        truncation=given.pop("truncation", "error"),
        tool_schemas=tools.schemas,
    )
    length = given.pop("response_length", 4000)
    return AgentResources(engine, tokenizer, prompts, length, tools=tools, **given)


def make_worker(
    given: AgentResources,
    *,
    loop: str = "tool_agent",
    loops: AgentLoops | None = None,
    reward: RewardScorer | None = None,
    seed: int | None = 3,
    logprobs: bool = True,
    max_attempts: int = 3,
    attempt_timeout: float = FAR,
) -> RolloutWorker:
    return RolloutWorker(
        given,
        sampling=SamplingParams(given.response_length, seed=seed, logprobs=logprobs),
        seed=seed,
        default_agent_loop=loop,
        retry=RetryPolicy(max_attempts, 0.001, 0.002),
        attempt_timeout=attempt_timeout,
        availability=EngineAvailability(given.engine, timeout=FAR),
        reward=reward,
        loops=loops,
    )


def make_row(index: int = 0, text: str = "3 + 9 =", **given: Any) -> PromptRow:
    messages = given.pop("messages", None) or [{"role": "user", "content": text}]
    return PromptRow(index, f"{index:032x}", messages, "test", **given)


async def started(rule: AnswerRule | None = None, **given: Any) -> ScriptedEngine:
    engine = ScriptedEngine(rule, **given)
    await engine.start()
    return engine


def completed(result: Rollout | Failure) -> Rollout:
    """The rollout; the failure's traceback if it is none."""
    assert isinstance(result, Rollout), result.traceback
    return result


def failed(result: Rollout | Failure) -> Failure:
    assert isinstance(result, Failure), result.trajectories[-1].messages
    return result


def sampled(trajectory: Trajectory) -> list[tuple[int, float]]:
    """The ids with mask 1 and their log-probs, in order."""
    assert trajectory.response_logprobs is not None
    columns = zip(
        trajectory.response_ids, trajectory.response_mask, trajectory.response_logprobs, strict=True
    )
    return [(token, logprob) for token, mask, logprob in columns if mask]


def contents(trajectory: Trajectory, role: str = "tool") -> list[Any]:
    """What the messages of a role say."""
    return [message["content"] for message in trajectory.messages if message["role"] == role]
