"""Chat templates with what is peculiar to some in the field, each with all kinds of turns and ends."""

import copy
from typing import Any

import pytest

from rollstream.chat.template import TurnTemplate
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.trajectory import Message
from tests.support.turns import NEXT, TOOLS, calls, load, result, try_template

CALLS = "{%- for c in m.tool_calls or [] -%}<call>{{ c.function | tojson }}</call>{%- endfor -%}"
PROMPT = "{%- if add_generation_prompt -%}{{ '<|turn|>assistant\n' }}{%- endif -%}"


def turns(turn: str, *, before: str = "", prompt: str = PROMPT) -> str:
    """A template that writes `turn` for each message `m`."""
    return before + "{%- for m in messages -%}" + turn + "{%- endfor -%}" + prompt


PLAIN = "{{ '<|turn|>' + m.role + '\n' + m.content }}" + CALLS + "{{ '<|end|>\n' }}"
LAST_QUESTION = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
SYSTEM = (
    "{%- set own = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list -%}"
)
NO_SYSTEM = "{%- if m.role != 'system' -%}" + PLAIN + "{%- endif -%}"
ALTERNATE = (
    "{%- set said = messages | rejectattr('role', 'equalto', 'system') | list -%}"
    "{%- for m in said -%}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('roles must alternate') }}{%- endif -%}{%- endfor -%}"
)
BLOCK = (
    "{%- if m.role == 'assistant' -%}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{%- endif -%}"
)
BEFORE_TEXT = "{{ '<|turn|>' + m.role + '\n' }}"
BEHIND_TEXT = "{{ m.content }}" + CALLS + "{{ '<|end|>\n' }}"

TEMPLATES = {
    "plain": turns(PLAIN),
    "no generation prompt": turns(PLAIN, prompt=""),
    "a generation prompt that is always written, and another end of calls": turns(
        BEFORE_TEXT
        + "{{ m.content }}"
        + CALLS
        + "{%- if m.tool_calls -%}<|end_calls|>{%- elif m.role == 'assistant' -%}<|end_text|>{%- endif -%}<|end|>",
        prompt="<|turn|>{{ 'assistant\n' }}",
    ),
    "two special tokens end a turn": turns(BEFORE_TEXT + "{{ m.content }}" + CALLS + "<|end_text|><|end|>"),
    "the system prompt, or a persona, before the last question": turns(
        "{%- if loop.index0 == ns.last -%}<|system|>{{ own[0] if own else 'You are Ada.' }}{%- endif -%}"
        + NO_SYSTEM,
        before=LAST_QUESTION + SYSTEM,
    ),
    "tools before the last question": turns(
        "{%- if tools and loop.index0 == ns.last -%}<|tools|>{{ tools | tojson }}{%- endif -%}" + PLAIN,
        before=LAST_QUESTION,
    ),
    "the system prompt in the first question": turns(
        "{{ '<|turn|>' + m.role + '\n' + (own[0] if own and loop.first else '') + m.content }}"
        + CALLS
        + "<|end|>\n",
        before=SYSTEM,
    ),
    "a switch anywhere in the conversation": turns(
        PLAIN,
        before="{%- set ns = namespace(short=false) -%}{%- for m in messages -%}"
        "{%- if 'short' in m.content -%}{%- set ns.short = true -%}{%- endif -%}{%- endfor -%}",
        prompt=PROMPT + "{%- if ns.short and add_generation_prompt -%}<think></think>{%- endif -%}",
    ),
    "calls are counted": turns(
        "{%- if m.role == 'tool' -%}{%- set ns.count = ns.count + 1 -%}"
        "<|turn|>result {{ ns.count }}: {{ m.content }}<|end|>"
        "{%- else -%}" + PLAIN + "{%- endif -%}",
        before="{%- set ns = namespace(count=0) -%}",
    ),
    "an end of all without a generation prompt": turns(
        PLAIN,
        prompt="{%- if add_generation_prompt -%}<|turn|>{{ 'assistant\n' }}{%- else -%}</s>{%- endif -%}",
    ),
    "another end of the last turn": turns(
        BEFORE_TEXT
        + "{{ m.content }}"
        + CALLS
        + "{%- if loop.last and m.role == 'assistant' and not m.tool_calls -%}<|return|>"
        "{%- else -%}<|end|>{%- endif -%}"
    ),
    "the last answer stays open": turns(
        BEFORE_TEXT
        + "{{ m.content }}"
        + CALLS
        + "{%- if not (loop.last and m.role == 'assistant') -%}{{ '<|end|>\n' }}{%- endif -%}"
    ),
    "the next role ends a turn": turns(
        "{# <|user|> <|tool|> <|system|> #}<|{{ m.role }}|>\n{{ m.content }}" + CALLS, prompt="<|assistant|>"
    ),
    "an empty block, and a prompt that opens one": turns(
        BEFORE_TEXT + BLOCK + BEHIND_TEXT,
        prompt=PROMPT + "{%- if add_generation_prompt -%}<think>\n{%- endif -%}",
    ),
    "a closed block, and a prompt that opens one": turns(
        BEFORE_TEXT + "{%- if m.role == 'assistant' -%}</think>{%- endif -%}" + BEHIND_TEXT,
        prompt=PROMPT + "{%- if add_generation_prompt -%}<think>{%- endif -%}",
    ),
    "no block, and a prompt that opens one": turns(
        PLAIN, prompt=PROMPT + "{%- if add_generation_prompt -%}<think>{{ '\n' }}{%- endif -%}"
    ),
    "a prompt that closes a block which nothing opens, with other white space before it": turns(
        BEFORE_TEXT
        + "{%- if m.role == 'assistant' -%}{{ ' </think>' if m.tool_calls else '</think>' }}{%- endif -%}"
        + BEHIND_TEXT,
        prompt=PROMPT + "{%- if add_generation_prompt -%}{{ '  </think>' }}{%- endif -%}",
    ),
    "ends of turns with other signs": turns(
        PLAIN.replace("<|turn|>", "<bot:start>").replace("<|end|>", "[|endofturn|]<bot:end>"),
        prompt=PROMPT.replace("<|turn|>", "<bot:start>"),
    ),
    "a prompt with an empty block": turns(
        BEFORE_TEXT
        + "{%- if m.reasoning_content -%}<think>{{ m.reasoning_content }}</think>{%- endif -%}"
        + BEHIND_TEXT,
        prompt=PROMPT + "{%- if add_generation_prompt -%}<think></think>{%- endif -%}",
    ),
    "thinking of the last answers only": turns(
        BEFORE_TEXT + "{%- if m.reasoning_content and loop.index0 > ns.last -%}"
        "<think>{{ m.reasoning_content }}</think>{%- endif -%}" + BEHIND_TEXT,
        before=LAST_QUESTION,
    ),
    "text behind the calls": turns(BEFORE_TEXT + CALLS + "{{ m.content }}{{ '<|end|>\n' }}"),
    "the ids of calls": turns(PLAIN.replace("c.function | tojson", "c | tojson")),
    "arguments as text": turns(
        PLAIN.replace("{{ c.function | tojson }}", "{{ c.function.name + ' ' + c.function.arguments }}")
    ),
    "content in parts": turns(PLAIN.replace("m.content", "(m.content[0].text if m.content else '')")),
    "an answer of calls alone in parts": turns(
        "{%- if m.tool_calls and m.content[0].thinking -%}thinks{%- endif -%}"
        + PLAIN.replace("m.content", "(m.content if m.content is string else m.content[0].text)")
    ),
    "one call in a turn": turns(
        "{%- if m.tool_calls and m.tool_calls | length > 1 -%}{{ raise_exception('one call') }}{%- endif -%}"
        + PLAIN
    ),
    "no calls": turns(PLAIN.replace(CALLS, "")),
    "no role for results": turns(
        "{%- if m.role == 'tool' -%}{{ raise_exception('no tools') }}{%- endif -%}" + PLAIN.replace(CALLS, "")
    ),
    "roles that alternate": turns(PLAIN.replace(CALLS, ""), before=ALTERNATE),
    "the time": turns(PLAIN, before="<|turn|>system\n{{ strftime_now('%H:%M:%S.%f') }}<|end|>"),
    "tags of generations": turns(
        "{%- if m.role == 'assistant' -%}"
        + BEFORE_TEXT
        + "{% generation %}"
        + BEHIND_TEXT
        + "{% endgeneration %}"
        "{%- else -%}" + PLAIN + "{%- endif -%}"
    ),
    "white space trimmed": turns(PLAIN.replace("m.content", "m.content | trim")),
    "the beginning of text in each turn": turns(
        "{%- if m.role == 'assistant' -%}{{ ' ' + m.content + ' ' + eos_token }}"
        "{%- else -%}{{ bos_token + '[ASK] ' + m.content + ' [/ASK]' }}{%- endif -%}",
        prompt="",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_between_turns_stands_what_the_whole_rendering_has_there(name: str) -> None:
    report = try_template(TEMPLATES[name])
    assert report.differences == []
    assert not report.refused
    assert report.tried > 10


@pytest.mark.parametrize(
    "turn",
    [
        PLAIN.replace("{{ c.function", "{{ c.function if m is sameas messages[-1] else c"),
        "{%- if m is sameas messages[-1] or m.role != 'assistant' -%}" + PLAIN + "{%- endif -%}",
        "{%- if m.tool_calls -%}{{ raise_exception('no calls') }}{%- endif -%}{{ m.missing.name }}",
    ],
    ids=["an id that comes later", "answers left out", "nothing works"],
)
def test_templates_by_which_turns_cannot_follow_each_other_are_known_at_start(turn: str) -> None:
    template = TurnTemplate(load(turns(turn)))
    assert template.why_not(calls=True, tools=TOOLS)


def test_a_template_that_wants_a_question_last_can_have_turns_of_text() -> None:
    refuses = "{%- if messages[-1].role == 'assistant' -%}{{ raise_exception('') }}{%- endif -%}"
    tokenizer = load(turns(PLAIN, before=refuses))
    messages = [{"role": "user", "content": "Dry in Lyon?"}, {"role": "assistant", "content": "Dry."}]
    ids = TurnTemplate(tokenizer).ids_after(messages, [NEXT], sampled_ids=tokenizer.encode("Dry.<|end|>"))
    assert text(tokenizer, ids) == "\n<|turn|>user\nAnd in Nice?<|end|>\n<|turn|>assistant\n"


def looked_up(count: int) -> list[Message]:
    """A question, and that many calls with their results."""
    messages: list[Message] = [{"role": "user", "content": "Dry in Lyon?"}]
    for at in range(count):
        call = calls(1, start=at)
        messages += [call, result(call, f"dry {at}")]
    return messages


@pytest.mark.parametrize("name", ["plain", "calls are counted", "a switch anywhere in the conversation"])
def test_a_long_conversation_is_rendered_as_the_whole_has_it(name: str) -> None:
    tokenizer = load(TEMPLATES[name])
    template = TurnTemplate(tokenizer)
    for count in (3, 20, 21, 40):
        messages = [{"role": "system", "content": "short"}, *looked_up(count)]
        answer, added = messages[-2:]
        ids = template.ids_after(messages[:-1], [added], sampled_ids=tokenizer.encode("</call>"))
        whole = tokenizer.render_text(messages)
        assert whole.endswith(
            str(answer["tool_calls"][0]["function"]["arguments"]["city"])
            + '"}}</call>'
            + text(tokenizer, ids)
        )


def text(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_older_calls_cost_nothing() -> None:
    """Once it is known that the template does not look back to them."""
    tokenizer = copy.copy(load(TEMPLATES["plain"]))
    rendered: list[int] = []
    original = tokenizer.render_text

    def counting(messages: list[Message], **kwargs: Any) -> str:
        rendered.append(len(messages))
        return original(messages, **kwargs)

    tokenizer.render_text = counting  # type: ignore[method-assign]
    template = TurnTemplate(tokenizer)
    for count in (100, 101, 102):
        rendered.clear()
        messages = looked_up(count)
        template.ids_after(messages[:-1], messages[-1:], sampled_ids=[])
    assert max(rendered) < 30
    rendered.clear()
    template.ids_after([*looked_up(100), calls(1)], [NEXT], sampled_ids=[])  # another kind of turn
    assert max(rendered) > 200
