"""How good a model is: exactly, by sampling, greedily, and with the tool."""

import json
import random
import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from demo_model.chats import CALCULATOR, Message, build_direct_chat, build_retry_chat
from demo_model.encode import IGNORED, EncodedChat, encode_chat, stack_chats
from demo_model.problems import Problem, Split, enumerate_pairs

_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")
_SUM = re.compile(r"-?\d+( [+-] \d+)*")
"""What the calculator accepts."""
_ANSWER_TOKENS = 8
"""Room for an answer of two-digit terms, which takes at most five."""
_CALL_TOKENS = 64
"""Room for a tool call, which takes about 25."""


@dataclass(frozen=True)
class Report:
    """Shares of problems solved, of two terms and two digits each."""

    split: str
    problems: int
    """Different problems that were asked."""
    expected: float
    """At temperature 1 without the tool, exactly: the mean probability of the right reply."""
    sampled: float
    """At temperature 1 without the tool, ``samples`` replies sampled."""
    samples: int
    greedy: float
    """Without the tool."""
    after_feedback: float
    """At temperature 1 without the tool, once a problem, asked again after a wrong answer given for it."""
    with_tool: float
    """At temperature 1 with the calculator, one sampled chat a problem. The call has to name the tool and
    carry an expression it accepts, and the last reply has to be right."""
    with_tool_greedy: float

    def to_json(self) -> str:
        """Write the report for README and log."""
        return json.dumps(asdict(self))


def expect_accuracy(model: Qwen2ForCausalLM, chats: list[EncodedChat]) -> float:
    """Compute the mean probability that a reply sampled at temperature 1 is the chat's, in one forward pass.

    Free of sampling noise, so that a trigger on it acts alike on every run.
    """
    ids, labels = stack_chats(chats, model.config.pad_token_id)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none"
    )
    return float((-loss.sum(1)).exp().mean())


def evaluate_model(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, split: Split, repeats: int = 2
) -> Report:
    """Measure a model on all held-out problems of two two-digit terms of a split.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        split: Which problems.
        repeats: How often each problem is asked when sampling without the tool.
    """
    problems = list(enumerate_pairs(2, split))
    torch.manual_seed(0)
    answered = [encode_chat(tokenizer, build_direct_chat(problem)) for problem in problems]
    asked = [_ask(problem) for problem in problems]

    rng = random.Random(0)
    retried = [build_retry_chat(problem, rng)[:-1] for problem in problems]

    def solve(chats: list[list[Message]], sample: bool) -> float:
        replies = reply_to(model, tokenizer, chats, None, sample, _ANSWER_TOKENS)
        right = [reply == problem.answer for reply, problem in zip(replies, problems, strict=True)]
        return sum(right) / len(right)

    return Report(
        split=split.value,
        problems=len(problems),
        expected=expect_accuracy(model, answered),
        sampled=sum(solve(asked, sample=True) for _ in range(repeats)) / repeats,
        samples=repeats * len(problems),
        greedy=solve(asked, sample=False),
        after_feedback=solve(retried, sample=True),
        with_tool=solve_with_tool(model, tokenizer, problems, sample=True),
        with_tool_greedy=solve_with_tool(model, tokenizer, problems, sample=False),
    )


def solve_with_tool(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, problems: list[Problem], sample: bool
) -> float:
    """Run each problem as a chat of two replies with the calculator; return the share that ends right."""
    asked = [_ask(problem) for problem in problems]
    calls = reply_to(model, tokenizer, asked, [CALCULATOR], sample, _CALL_TOKENS)
    results = [calculate(call) for call in calls]
    going = [index for index, result in enumerate(results) if result is not None]
    told: list[list[Message]] = [
        [
            *asked[index],
            {"role": "assistant", "content": calls[index]},
            {"role": "tool", "content": results[index]},
        ]
        for index in going
    ]
    replies = reply_to(model, tokenizer, told, [CALCULATOR], sample, _ANSWER_TOKENS) if told else []
    right = [reply == problems[index].answer for index, reply in zip(going, replies, strict=True)]
    return sum(right) / len(problems)


def calculate(reply: str) -> str | None:
    """Give the result of the calculator call a reply makes, or None if it makes none that is well-formed."""
    if not (found := _CALL.fullmatch(reply)):
        return None
    try:
        call: Any = json.loads(found[1])
        name, expression = call["name"], call["arguments"]["expression"]
    except (ValueError, KeyError, TypeError):
        return None
    if name != "calculator" or not isinstance(expression, str) or not _SUM.fullmatch(expression):
        return None
    return str(sum(int(number) for number in re.findall(r"-?\d+", expression.replace(" - ", " -"))))


def reply_to(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    chats: list[list[Message]],
    tools: list[dict[str, Any]] | None,
    sample: bool,
    most_tokens: int,
) -> list[str]:
    """Reply once to each chat, at temperature 1 or greedily, in one left-padded batch."""
    prompts = [
        tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    width = batch["input_ids"].shape[1]
    # transformers refuses the settings of sampling when it is not asked to sample.
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    with torch.inference_mode():
        ids = model.generate(**batch, do_sample=sample, max_new_tokens=most_tokens, **settings)
    # A reply that was cut off has no end token and thereby counts as wrong, whatever it says.
    end, pad = tokenizer.eos_token, tokenizer.pad_token
    texts = tokenizer.batch_decode(ids[:, width:])
    return [text.split(end)[0] if end in text else text + pad for text in texts]


def _ask(problem: Problem) -> list[Message]:
    return build_direct_chat(problem)[:1]
