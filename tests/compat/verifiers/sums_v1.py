"""A taskset of verifiers 0.4 with a harness of its own: sums with a calculator, or with a checker."""

import random
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[3]))  # verifiers imports this file by its bare name

import verifiers.v1 as vf
from openai import AsyncOpenAI
from openai.lib.streaming.chat import ChatCompletionStreamState

from demo_model.chats import CALCULATOR
from demo_model.problems import Split, enumerate_pairs

__all__ = ["SumsHarness", "SumsTaskset", "load_environment"]


SEEN: dict[str, dict[str, Any]] = {}
"""What the harness had of each answer, by the answer's name."""


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.description == "breaks":
            raise ValueError("no such world")

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(last_words(trace).strip() == self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


def calculate(expression: str) -> str:
    left, sign, right = expression.split()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))


def last_words(trace: vf.Trace) -> str:
    return trace.nodes[-1].message.content or ""


class SumsConfig(vf.TasksetConfig):
    size: int = 8
    breaks_at: int | None = None


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        pairs = list(enumerate_pairs(2, Split.TRAIN))
        random.Random(0).shuffle(pairs)
        return [
            SumTask(
                SumData(
                    prompt=pair.question,
                    answer=pair.answer,
                    description="breaks" if at == self.config.breaks_at else None,
                ),
                self.config.task,
            )
            for at, pair in enumerate(pairs[: self.config.size])
        ]


class SumsHarnessConfig(vf.HarnessConfig):
    kind: Literal["tools", "checker", "rewrites"] = "tools"
    stream: bool = False


class SumsHarness(vf.Harness[SumsHarnessConfig]):
    """Its loop runs in this process; its model calls go to the interception server, as a program's would."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        assert isinstance(data.prompt, str)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        answer = data.answer  # type: ignore[attr-defined]
        tools: Any = {"tools": [CALCULATOR]} if self.config.kind == "tools" else {}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for turn in range(3):
                message = await self.ask(client, model=ctx.model, messages=messages, **tools)
                messages.append(message)
                if calls := message.get("tool_calls"):
                    for call in calls:
                        left, sign, right = (
                            __import__("json").loads(call["function"]["arguments"])["expression"].split()
                        )
                        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(value)})
                elif tools or (message["content"] or "").strip() == answer:
                    break
                else:
                    words = {"role": "user", "content": f"Incorrect <|im_end|> ({turn}). {data.prompt}"}
                    messages = [words] if self.config.kind == "rewrites" else [*messages, words]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def ask(self, client: AsyncOpenAI, **given: Any) -> dict[str, Any]:
        if not self.config.stream:
            final = await client.chat.completions.create(**given)
            return note(final.id, final.choices[0].message.model_dump(exclude_none=True))
        state = ChatCompletionStreamState()
        chunks = await client.chat.completions.create(stream=True, **given)
        async for chunk in chunks:
            state.handle_chunk(chunk)
        answer = state.get_final_completion()
        message = answer.choices[0].message.model_dump(exclude_none=True)
        for call in message.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
        return note(answer.id, message)


def note(name: str, message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    SEEN[name] = {"content": message.get("content") or "", "calls": calls}
    return message


def load_environment(kind: str = "tools", size: int = 8, stream: bool = False, **kwargs: Any) -> vf.Env:
    """For tests that name this file: verifiers itself finds a taskset by the name of its module."""
    from verifiers.v1.utils.loaders import resolve_env_config

    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    plain = "tools" if kind == "duel" else kind
    agent = {
        "harness": {"id": "sums_v1", "kind": plain, "stream": stream},
        "runtime": {"type": "subprocess"},
    }
    taskset = {"id": "sums_v1", "size": size, **kwargs}
    if kind == "duel":
        config = {"id": "duel_v1", "taskset": taskset, "solver": agent, "critic": agent}
    else:
        config = {"taskset": taskset, "agent": agent}
    return vf.load_environment(resolve_env_config(config))
