"""R1 over whole dialogues, whatever the model says: by a property, for every chat template."""

import asyncio
import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.agent.base import AgentLoop, turn_seed
from rollstream.agent.conversation import Conversation, Turn
from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.trajectory import Completion, Message, SamplingParams, Trajectory
from tests.unit.agent.rollouts import call_text, resources, says, started
from tests.unit.chat.templates import END_TOKENS, NAMES, load

PARSERS = {
    "llama3": "llama3_json",
    "mistral": "mistral",
    "deepseek": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "glm": "glm45",
}
"""By template; the others write calls as Hermes does."""

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in ("add", "search")
]
QUESTION: Message = {"role": "user", "content": "what is 3 + 9"}


class Loop(AgentLoop):
    """What a conversation needs of a loop."""

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        raise NotImplementedError


@dataclass
class Play:
    """One step: what the model says, and what it is told."""

    words: str
    calls: int
    garbage: list[int] | None
    """Sampled instead of words, calls and end."""
    end: int
    """Which end token is sampled; beyond the last one: none."""
    replies: list[str] = field(default_factory=list)


words = st.sampled_from(
    [
        "the answer is 12",
        "",
        '{"name": "add", "arguments": {',
        'a "b" {c}',
        "eins\nzwei",
        "ä€😀 x",
        "<think>hm",
    ]
)
plays = st.builds(
    Play,
    words=words,
    calls=st.integers(0, 2),
    garbage=st.none() | st.none() | st.lists(st.integers(0, 370), min_size=1, max_size=30),
    end=st.integers(0, 3),
    replies=st.lists(words, min_size=1, max_size=1),
)


@dataclass
class Limits:
    """Of one rollout."""

    response_length: int
    max_tokens: int
    beyond_prompt: int | None
    """`max_model_len` is that of the prompt and this."""


limits = st.builds(
    Limits,
    response_length=st.integers(1, 500) | st.just(4000),
    max_tokens=st.integers(1, 80) | st.just(4000),
    beyond_prompt=st.none() | st.integers(1, 500),
)


def write(tokenizer: ChatTokenizer, name: str, play: Play, at: int) -> list[int]:
    """What the model samples."""
    if play.garbage is not None:
        return [token % tokenizer.vocab_size for token in play.garbage]
    message: Message = {"role": "assistant", "content": play.words}
    if play.calls and TurnTemplate(tokenizer).has_tool_role:
        count = 1 if name in ("llama3", "gpt_oss") else play.calls
        message["tool_calls"] = [
            {
                "type": "function",
                "id": f"m{at:03d}{i:05d}",
                "function": {"name": "add", "arguments": {"x": i}},
            }
            for i in range(count)
        ]
    before = tokenizer.render_text([QUESTION])
    after = tokenizer.render_text([QUESTION, message], add_generation_prompt=False)
    assert after.startswith(before)
    text = after[len(before) :].rstrip("\n")
    ends = END_TOKENS[name]
    for end in ends:
        text = text.removesuffix(end)
    return tokenizer.encode(text + (ends[play.end] if play.end < len(ends) else ""))


@dataclass
class Played:
    """What came of a dialogue."""

    engine: ScriptedEngine
    conversation: Conversation
    turns: list[Turn]
    lengths: list[int]
    """Of the messages, after each step."""
    refused: bool
    trajectory: Trajectory
    parser_stop_ids: tuple[int, ...]


async def perform(name: str, script: list[Play], tools: bool, logprobs: bool, allowed: Limits) -> Played:
    tokenizer = load(name)
    spoken = [write(tokenizer, name, play, at) for at, play in enumerate(script)]
    waiting = iter(spoken)
    engine = await started(lambda request: next(waiting))
    shown = TOOLS if tools else None
    prompt_ids = tokenizer.render([QUESTION], tools=shown)
    most = None if allowed.beyond_prompt is None else len(prompt_ids) + allowed.beyond_prompt
    loop = Loop(
        resources(
            engine,
            tokenizer=tokenizer,
            response_length=allowed.response_length,
            max_model_len=most,
            parser_name=PARSERS.get(name, "hermes"),
        ),
        request_id="0-0-1",
    )
    conversation = Conversation(loop, [QUESTION], list(prompt_ids), logprobs=logprobs, tools=shown)
    sampling = SamplingParams(allowed.max_tokens, seed=7, logprobs=logprobs, stop_token_ids=(5,))
    turns: list[Turn] = []
    lengths: list[int] = []
    refused = False
    for play in script:
        turns.append(await conversation.generate(sampling))
        lengths.append(len(conversation.messages))
        assert conversation.messages[-1] is turns[-1].message
        if conversation.room < 1:
            break
        before = copy.deepcopy((conversation.messages, conversation.track.__dict__, conversation.user_turns))
        if turns[-1].calls:
            results = [play.replies[0]] * len(turns[-1].calls)
            calls = turns[-1].message["tool_calls"]
            added = conversation.add(loop.resources.template.tool_messages(calls, results))
        else:
            added = conversation.add([{"role": "user", "content": play.replies[0]}])
        if not added:
            refused = True
            assert before == (
                conversation.messages,
                conversation.track.__dict__,
                conversation.user_turns,
            ), "what does not fit changes nothing"
            break
        lengths.append(len(conversation.messages))
    stops = loop.resources.parser_stop_ids
    return Played(engine, conversation, turns, lengths, refused, conversation.trajectory("stop"), stops)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(
    script=st.lists(plays, min_size=1, max_size=5),
    tools=st.booleans(),
    logprobs=st.booleans(),
    allowed=limits,
)
def test_dialogues_keep_the_tokens_in_step(
    name: str, script: list[Play], tools: bool, logprobs: bool, allowed: Limits
) -> None:
    tools = tools and name in ("chatml", "mistral")  # the other templates do not show schemas
    played = asyncio.run(perform(name, script, tools, logprobs, allowed))
    requests = played.engine.requests
    completions = [completion for _, completion in played.engine.completions]
    trajectory = played.trajectory

    running = list(trajectory.prompt_ids)
    mask: list[int] = []
    scores: list[float] = []
    for at, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        begun = request.prompt_ids
        assert begun[: len(running)] == running, "the prompt before, what was sampled, and something"
        between = len(begun) - len(running)
        assert between > 0 if at else between == 0
        mask += [0] * between + [1] * len(completion.token_ids)
        scores += [0.0] * between + (completion.logprobs or [])
        assert played.turns[at].sampled_at == len(mask) - len(completion.token_ids)
        assert played.turns[at].completion is completion
        running = [*begun, *completion.token_ids]
    tail = len(trajectory.prompt_ids) + len(trajectory.response_ids) - len(running)
    assert [*trajectory.prompt_ids, *trajectory.response_ids][: len(running)] == running
    assert trajectory.response_mask == mask + [0] * tail
    assert trajectory.response_logprobs == (scores + [0.0] * tail if logprobs else None)

    check_limits(played, allowed)
    check_messages(played)
    seeds = [request.sampling.seed for request in requests]
    assert seeds == [turn_seed(7, at) for at in range(len(requests))]
    assert len(set(seeds)) == len(seeds)
    stops = {request.sampling.stop_token_ids for request in requests}
    assert stops == {(5, *sorted(set(played.parser_stop_ids) - {5})) if tools else (5,)}


def check_limits(played: Played, allowed: Limits) -> None:
    most = allowed.response_length
    if allowed.beyond_prompt is not None:
        most = min(most, allowed.beyond_prompt)
    trajectory = played.trajectory
    assert len(trajectory.response_ids) <= most
    assert played.conversation.room == most - len(trajectory.response_ids)
    for request in played.engine.requests:
        left = most - (len(request.prompt_ids) - len(trajectory.prompt_ids))
        assert request.sampling.max_tokens == min(allowed.max_tokens, left)
    if trajectory.response_mask[-1:] == [0]:
        assert played.conversation.room > 0, "what was given leaves room for an answer"


def check_messages(played: Played) -> None:
    trajectory = played.trajectory
    roles = [message["role"] for message in trajectory.messages]
    assert len(roles) == played.lengths[-1]
    assert roles.count("assistant") == len(played.turns) == played.conversation.assistant_turns
    answers = [message for message in trajectory.messages if message["role"] == "assistant"]
    assert answers == [turn.message for turn in played.turns]
    assert trajectory.num_turns == 1 + len(played.turns) + played.conversation.user_turns
    for turn in played.turns:
        calls = turn.message.get("tool_calls", [])
        assert [call["function"]["name"] for call in calls] == [call.name for call in turn.calls]
        assert len({call["id"] for call in calls}) == len(calls)
    results = [message for message in trajectory.messages if message["role"] == "tool"]
    ids = [call["id"] for turn in played.turns for call in turn.message.get("tool_calls", [])]
    assert [message["tool_call_id"] for message in results] == ids[: len(results)]


async def test_seeds_differ_by_turn_and_rollout_and_none_stays_none() -> None:
    seeds = [turn_seed(seed, call) for seed in range(50) for call in range(20)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert turn_seed(7, 0) == 7
    engine = await started(says("hm"))
    conversation = Conversation(
        Loop(resources(engine), request_id="0-0-1"), [QUESTION], [1, 2], logprobs=True
    )
    await conversation.generate(SamplingParams(9))
    assert conversation.add([QUESTION])
    await conversation.generate(SamplingParams(9))
    assert [request.sampling.seed for request in engine.requests] == [None, None]


async def test_policy_versions_are_run_lengths_over_the_whole_response() -> None:
    versions = iter([[(0, 4)], [(0, 4), (1, 5)], [(0, 6)]])

    def rule(request: ScriptedRequest) -> Completion:
        return Completion([9, 9, 2], [-0.5, -0.25, -1.0], "stop", next(versions))

    engine = await started(rule)
    conversation = Conversation(Loop(resources(engine), request_id="0-0-1"), [QUESTION], [1, 2])
    turns = [await conversation.generate(SamplingParams(9))]
    for _ in range(2):
        assert conversation.add([QUESTION])
        turns.append(await conversation.generate(SamplingParams(9)))
    made = conversation.trajectory("stop")
    assert made.policy_versions == [(0, 4), (turns[1].sampled_at + 1, 5), (turns[2].sampled_at, 6)]


async def test_thinking_is_kept_apart_also_when_the_prompt_has_opened_it() -> None:
    tokenizer = load("chatml_thinking")
    spoken = iter([f"hm {call_text('add')}</think>\n\n12", f"<think>so</think>{call_text('add', x=1)}"])
    engine = await started(lambda request: tokenizer.encode(next(spoken) + "<|im_end|>"))
    prompt = tokenizer.encode("<|im_start|>assistant\n<think>\n")
    loop = Loop(resources(engine, tokenizer=tokenizer), request_id="0-0-1")
    conversation = Conversation(loop, [QUESTION], prompt, tools=TOOLS)
    first = await conversation.generate(SamplingParams(99))
    assert not first.calls
    assert first.message["content"] == "12"
    assert call_text("add") in first.message["reasoning_content"]
    assert conversation.add([QUESTION])
    second = await conversation.generate(SamplingParams(99))
    assert [call.arguments for call in second.calls] == [{"x": 1}]
    assert (second.message["reasoning_content"], second.message["content"]) == ("so", "")
