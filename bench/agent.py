"""What a turn of an agent costs, and that it does not cost more when the history is long.

    python -m bench.agent [--quick] [--json FILE]

A rollout is a prompt of 512 tokens, turns with two tool calls each, and a last answer; every turn adds some
1,500 tokens (an answer of 300, two results of 600), so that five turns make 8,000. The tools are functions,
one plain and one async, that return a text at once. The engine has ready-made answers; all it does is write
the body of the HTTP request that SGLang would get, because the prompt has to be sent whole every turn.

    floor       the engine calls, and appending ready-made ids: what must be sent, and nothing else
    new text    the floor, and tokenising the new text of each turn, which comes as text after all, by the
                package `tokenizers`: what every loop pays that keeps tokens
    words       the same by rollstream's `ChatTokenizer`, which remembers the ids of words
    rollstream  RolloutWorker, tool_agent, hermes parser, chat template, real tokenizer, ToolBox
    re-render   the same, but every prompt is the whole conversation rendered and tokenised again, and what
                the model sampled is not kept id for id: what loops do that speak to a chat endpoint

A turn is from one engine call's answer to the next one's, CPU of all threads, the median over rollouts that
run one at a time. Throughput is of 64 rollouts at once.
"""

import asyncio
import gc
import inspect
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from tokenizers import Tokenizer

from bench.report import parse_options, print_table, write_json
from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.agent.tools.functions import FunctionTool
from rollstream.agent.tools.toolbox import ToolBox
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Capabilities
from rollstream.engine.sglang import request_body
from rollstream.rollout.availability import EngineAvailability
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RolloutWorker
from rollstream.trajectory import Completion, PromptRow, Rollout, SamplingParams, Trajectory

PROMPT_TOKENS = 512
ANSWER_TOKENS = 300
RESULT_TOKENS = 600
IN_FLIGHT = 64
SHOWN_TURNS = (1, 2, 5, 10, 20)
END = "<|im_end|>"


def text_of(tokenizer: ChatTokenizer, tokens: int) -> str:
    """A text of that many tokens: words, filled up with digits."""
    words = ["what", "was", "found", "there", "is", "to", "be", "read", "with", "care", "and", "then"]
    text = ""
    while len(tokenizer.encode(text)) < tokens - 12:
        text += words[len(text) % len(words)] + " "
    return text + "7" * (tokens - len(tokenizer.encode(text)))


class ReadyEngine:
    """Answers from a list, one answer a turn, and notes the CPU clock at both ends of every call."""

    def __init__(self, answers: list[list[int]], tokenizer: ChatTokenizer) -> None:
        self.capabilities = Capabilities(
            token_ids=True,
            logprobs="raw",
            seeds=True,
            stop_strings=True,
            stop_token_ids=True,
            images=False,
            update_weights=False,
            max_model_len=None,
            vocab_size=tokenizer.vocab_size,
        )
        self._answers = [(ids, [-0.5] * len(ids)) for ids in answers]
        self._turns: defaultdict[str, int] = defaultdict(int)
        self.clock: list[float] = []
        """CPU seconds of this process: when a rollout's first answer was given, its second, and so on."""
        self.prompt_tokens: list[int] = []
        self.calls = 0

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        """The next answer of this request id."""
        request_body(prompt_ids, sampling, request_id)
        await asyncio.sleep(0)
        turn = self._turns[request_id]
        ids, logprobs = self._answers[turn]
        if turn + 1 == len(self._answers):
            del self._turns[request_id]
        else:
            self._turns[request_id] = turn + 1
        self.calls += 1
        self.prompt_tokens.append(len(prompt_ids))
        self.clock.append(time.process_time())
        return Completion(ids, logprobs, "stop")

    def restart(self) -> None:
        """Forgets clock readings and counts."""
        self.clock, self.prompt_tokens, self.calls = [], [], 0

    async def start(self) -> None: ...

    async def abort(self, request_id: str) -> None: ...

    async def update_weights(self, source: str, version: int) -> None: ...

    async def health(self) -> bool:
        return True

    async def close(self) -> None: ...


class RerenderAgent(AgentLoop):
    """A tool loop that keeps messages only, and renders and tokenises all of them for every prompt."""

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        resources = self.resources
        messages = list(row["raw_prompt"])
        session = resources.tools.session(tools_kwargs={}, selection=None, request_id=self.request_id)
        try:
            while True:
                prompt_ids = self.tokenizer.render(messages, tools=session.schemas)
                completion = await self.generate(prompt_ids, sampling)
                text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
                answer = resources.parser.parse(text, tools=session.schemas)
                calls = [
                    {"id": str(at), "function": {"name": call.name, "arguments": call.arguments}}
                    for at, call in enumerate(answer.calls)
                ]
                messages.append({"role": "assistant", "content": answer.content.strip(), "tool_calls": calls})
                if not calls:
                    break
                results = await session.run(answer.calls)
                messages += resources.template.tool_messages(calls, [result.text for result in results])
        finally:
            await session.close()
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            response_mask=[1] * len(completion.token_ids),
            response_logprobs=completion.logprobs,
            messages=messages,
            finish_reason="stop",
            metrics=self.metrics,
        )


class Stack:
    """Everything that one setting needs: `turns` turns with tools, and a last answer."""

    def __init__(self, tokenizer: ChatTokenizer, turns: int) -> None:
        self.turns = turns
        result = text_of(tokenizer, RESULT_TOKENS)

        def look_up(name: str) -> str:
            return result

        async def search(query: str) -> str:
            return result

        tools = [_tool(look_up, "name"), _tool(search, "query")]
        calls = (
            '<tool_call>\n{"name": "look_up", "arguments": {"name": "the first thing"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "search", "arguments": {"query": "another thing"}}\n</tool_call>' + END
        )
        said = text_of(tokenizer, ANSWER_TOKENS - len(tokenizer.encode(calls))) + "\n"
        answer = tokenizer.encode(said + calls)
        self.engine = ReadyEngine([answer] * turns + [tokenizer.encode("That is all." + END)], tokenizer)
        self.toolbox = ToolBox(tools)
        schemas = self.toolbox.schemas
        frame = len(tokenizer.render([{"role": "user", "content": ""}], tools=schemas))
        self.prompt = [{"role": "user", "content": text_of(tokenizer, PROMPT_TOKENS - frame)}]
        length = (turns + 1) * (ANSWER_TOKENS + 2 * RESULT_TOKENS + 100)
        self.sampling = SamplingParams(length, seed=1)
        self._prompts = PromptRenderer(
            tokenizer, prompt_length=1024, truncation="error", tool_schemas=schemas
        )
        self._resources = AgentResources(self.engine, tokenizer, self._prompts, length, tools=self.toolbox)
        self._tokenizer = tokenizer
        self._package = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
        self._given: list[tuple[list[int], str]] = []
        """What the template puts between turns, for the floor: cut out of a real rollout by `check`."""

    def worker(self, loop: str) -> RolloutWorker:
        """A worker whose rollouts run that loop."""
        return RolloutWorker(
            self._resources,
            sampling=self.sampling,
            seed=1,
            default_agent_loop=loop,
            retry=RetryPolicy(1, 0.0, 0.0),
            attempt_timeout=600.0,
            availability=EngineAvailability(self.engine, timeout=60.0),
            loops=AgentLoops({"rerender": LoopEntry(RerenderAgent)}),
        )

    async def check(self) -> None:
        """One rollout of each kind, for caches to fill, and to see that they do what is claimed."""
        final = (await _one(self.worker("tool_agent"), self.prompt, 0)).final
        assert (final.finish_reason, final.metrics.tool_errors) == ("stop", 0)
        assert final.metrics.tool_calls == 2 * self.turns
        again = (await _one(self.worker("rerender"), self.prompt, 0)).final
        whole = final.prompt_ids + final.response_ids
        assert again.prompt_ids + again.response_ids == whole  # the same prompts: here, text and ids agree
        texts = [(ids, self._tokenizer.decode(ids, skip_special_tokens=False)) for ids in _given(final)]
        assert [ids for ids, _ in texts] == [self._tokenizer.encode(text) for _, text in texts]
        assert len(texts) == self.turns
        self._given = texts

    def kinds(self) -> dict[str, Callable[[int], Awaitable[object]]]:
        """What is measured: a function of a rollout's number for each name."""
        return {
            "floor": self._run_floor,
            "new text": lambda number: self._run_new_text(number, self._by_tokenizers),
            "words": lambda number: self._run_new_text(number, self._tokenizer.encode),
            "rollstream": _runner(self.worker("tool_agent"), self.prompt),
            "re-render": _runner(self.worker("rerender"), self.prompt),
        }

    async def _run_floor(self, number: int) -> None:
        ids = list(self._prompts.render(self.prompt, prompt_key="floor"))
        for given, _ in [*self._given, ([], "")]:
            completion = await self.engine.generate(ids, self.sampling, request_id=str(number))
            ids += completion.token_ids
            ids += given

    def _by_tokenizers(self, text: str) -> list[int]:
        ids: list[int] = self._package.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    async def _run_new_text(self, number: int, encode: Callable[[str], list[int]]) -> None:
        ids = list(self._prompts.render(self.prompt, prompt_key="floor"))
        for _, text in [*self._given, ([], "")]:
            completion = await self.engine.generate(ids, self.sampling, request_id=str(number))
            ids += completion.token_ids
            ids += encode(text)


def _tool(function: Callable[..., Any], parameter: str) -> FunctionTool:
    schema = {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": "string", "description": "What."}},
                "required": [parameter],
            },
        },
    }
    return FunctionTool(function.__name__, function, schema, inspect.signature(function))


def _given(trajectory: Trajectory) -> list[list[int]]:
    """The stretches of a response that were not sampled."""
    stretches: list[list[int]] = []
    before = 1
    for token, mask in zip(trajectory.response_ids, trajectory.response_mask, strict=True):
        if mask == 0:
            if before == 1:
                stretches.append([])
            stretches[-1].append(token)
        before = mask
    return stretches


async def _one(worker: RolloutWorker, prompt: list[dict[str, Any]], number: int) -> Rollout:
    result = await worker.run(PromptRow(number, f"{number:032x}", prompt, "bench"), 0)
    assert isinstance(result, Rollout), result.traceback
    return result


def _runner(worker: RolloutWorker, prompt: list[dict[str, Any]]) -> Callable[[int], Awaitable[object]]:
    return lambda number: _one(worker, prompt, number)


async def measure_turns(stack: Stack, rollouts: int) -> list[dict[str, Any]]:
    """CPU of each turn by kind, the median over rollouts; one row a turn."""
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(stack.turns)] for name in stack.kinds()}
    tokens: list[int] = []
    for number in range(rollouts):
        for name, run in stack.kinds().items():  # by turns: what else the machine does hits all alike
            stack.engine.restart()
            await run(number)
            clock, tokens = stack.engine.clock, stack.engine.prompt_tokens
            for turn in range(stack.turns):
                times[name][turn].append(clock[turn + 1] - clock[turn])
    return [
        {
            "turn": turn + 1,
            "next prompt": tokens[turn + 1],
            **{f"{name} us": statistics.median(of[turn]) * 1e6 for name, of in times.items()},
        }
        for turn in range(stack.turns)
    ]


async def measure_throughput(stack: Stack, rollouts: int) -> list[dict[str, Any]]:
    """CPU and speed of many rollouts at once, by kind."""
    rows: list[dict[str, Any]] = []
    for name, run in stack.kinds().items():
        stack.engine.restart()
        gc.collect()
        numbers = iter(range(rollouts))
        cpu, started = time.process_time(), time.perf_counter()
        await asyncio.gather(*(_slot(run, numbers) for _ in range(IN_FLIGHT)))
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
        turns = stack.engine.calls
        rows.append(
            {
                "what": name,
                "rollouts": rollouts,
                "turns": turns,
                "turns/s": turns / seconds,
                "rollouts/s": rollouts / seconds,
                "CPU us/turn": cpu / turns * 1e6,
            }
        )
    return rows


async def _slot(run: Callable[[int], Awaitable[object]], numbers: Any) -> None:
    for number in numbers:
        await run(number)


async def bench() -> None:
    """Runs the benchmark."""
    options = parse_options(__doc__.split("\n")[0])
    rollouts, alone, long = (100, 30, 6) if options.quick else (1_000, 300, 60)
    tokenizer = load_tokenizer(str(MODEL_PATH))
    stack = Stack(tokenizer, 5)
    await stack.check()
    throughput = await measure_throughput(stack, rollouts)
    print_table(f"5 turns and a last answer, {IN_FLIGHT} rollouts at once", throughput)
    turns = await measure_turns(stack, alone)
    print_table(f"CPU by turn, {alone} rollouts one at a time", turns)
    await stack.toolbox.close()
    stack = Stack(tokenizer, 20)
    await stack.check()
    long_turns = [row for row in await measure_turns(stack, long) if row["turn"] in SHOWN_TURNS]
    print_table(f"CPU by turn of 20, {long} rollouts one at a time", long_turns)
    await stack.toolbox.close()
    write_json(options.json, "agent", [*throughput, *turns, *long_turns])


if __name__ == "__main__":
    asyncio.run(bench())
