"""Every format as its model's template writes it: what the tests of all parsers build turns from."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "weights": {"type": "array", "items": {"type": "number"}},
                    "where": {"type": "object"},
                    "exact": {"type": "boolean"},
                    "factor": {"type": "number"},
                    "since": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    },
]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n{_dump({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


def qwen3_coder(calls: Calls) -> str:
    def bare(value: Any) -> str:
        return _dump(value) if isinstance(value, (dict, list)) else str(value)

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def glm45(calls: Calls) -> str:
    def bare(value: Any) -> str:
        return value if isinstance(value, str) else _dump(value)

    return "".join(
        f"\n<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def llama3_json(calls: Calls) -> str:
    return "; ".join(_dump({"name": name, "parameters": arguments}) for name, arguments in calls)


def llama3_tagged(calls: Calls) -> str:
    return "<|python_tag|>" + llama3_json(calls)


def mistral_list(calls: Calls) -> str:
    return "[TOOL_CALLS] " + _dump(
        [{"name": name, "arguments": arguments, "id": "bbc5b7ede"} for name, arguments in calls]
    )


def mistral_v11(calls: Calls) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]bbc5b7ede[ARGS]{_dump(arguments)}" for name, arguments in calls
    )


def mistral_v13(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dump(arguments)}" for name, arguments in calls)


def deepseek_v3(calls: Calls) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dump(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def deepseek_v3_1(calls: Calls) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dump(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{_dump(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _between_messages(calls: Calls, header: str) -> str:
    return "<|start|>assistant".join(
        f"{header.format(name=name)}<|message|>{_dump(arguments)}<|call|>" for name, arguments in calls
    )


def gpt_oss(calls: Calls) -> str:
    return _between_messages(calls, "<|channel|>commentary to=functions.{name} <|constrain|>json")


def gpt_oss_role(calls: Calls) -> str:
    return _between_messages(calls, " to=functions.{name}<|channel|>commentary json")


@dataclass(frozen=True)
class Format:
    """How turns of one format are written.

    `thinking` and `content` are templates; `end` ends a turn.
    """

    parser: str
    calls: Callable[[Calls], str]
    end: str
    thinking: str = "<think>\n{}\n</think>\n\n"
    content: str = "{}\n"
    content_end: str = ""
    """Behind an answer without a call."""
    content_first: bool = True
    """Whether a call may follow content."""
    opened: tuple[str, str] = field(default=("<think>", "</think>"))
    next_call: str = ""
    """Between a call and what follows it in the turn."""

    def turn(self, calls: Calls, content: str = "", thinking: str = "") -> str:
        """A turn, with its end token."""
        written = self.thinking.format(thinking) if thinking else ""
        if content:
            written += self.content.replace("{}", content)
        return written + (self.calls(calls) + self.end if calls else (self.content_end or self.end))


_HARMONY: dict[str, Any] = {
    "end": "",
    "thinking": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
    "content": "<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
    "opened": ("<|channel|>analysis<|message|>", "<|end|>"),
    "next_call": "<|start|>assistant",
}
_MISTRAL: dict[str, Any] = {
    "end": "</s>",
    "thinking": "[THINK]{}[/THINK]",
    "content": "{}",
    "opened": ("[THINK]", "[/THINK]"),
}

FORMATS = {
    "hermes": Format("hermes", hermes, "<|im_end|>"),
    "qwen3_coder": Format("qwen3_coder", qwen3_coder, "<|im_end|>"),
    "glm45": Format("glm45", glm45, "<|observation|>"),
    "llama3_json": Format("llama3_json", llama3_json, "<|eot_id|>", content_first=False),
    "llama3_tagged": Format("llama3_json", llama3_tagged, "<|eom_id|>"),
    "mistral_list": Format("mistral", mistral_list, **_MISTRAL),
    "mistral_v11": Format("mistral", mistral_v11, **_MISTRAL),
    "mistral_v13": Format("mistral", mistral_v13, **_MISTRAL),
    "deepseek_v3": Format("deepseek_v3", deepseek_v3, "<｜end▁of▁sentence｜>"),
    "deepseek_v3_1": Format("deepseek_v3_1", deepseek_v3_1, "<｜end▁of▁sentence｜>"),
    "kimi_k2": Format("kimi_k2", kimi_k2, "<|im_end|>"),
    "gpt_oss": Format("gpt_oss", gpt_oss, **_HARMONY),
    "gpt_oss_role": Format("gpt_oss", gpt_oss_role, **_HARMONY),
}
