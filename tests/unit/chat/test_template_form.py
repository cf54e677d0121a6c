"""What a template would refuse or leave out is shown in another form."""

from typing import Any

import pytest

from rollstream.chat.template import TurnTemplate
from rollstream.errors import DataError
from tests.unit.chat.templates import load

SHOW = "[{{ m.role }}] {{ m.content }}|"
CALLS = "{%- for c in m.tool_calls or [] -%}{{ c.function.arguments HOW }}{%- endfor -%}"


def template(body: str) -> str:
    return (
        "{%- for m in messages -%}"
        + body
        + "{%- endfor -%}{%- if add_generation_prompt -%}[assistant]{%- endif -%}"
    )


def refusing(when: str) -> str:
    return template("{%- if " + when + " -%}{{ raise_exception('no') }}{%- endif -%}" + SHOW)


def leaving_out(when: str) -> str:
    return template("{%- if not (" + when + ") -%}" + SHOW + "{%- endif -%}")


ANYWHERE = template(SHOW)
FIRST_ONLY = refusing("m.role == 'system' and not loop.first")
NO_SYSTEM = refusing("m.role == 'system'")
FIRST_ELSE_DROPPED = leaving_out("m.role == 'system' and not loop.first")
HOISTED = "{%- for m in messages if m.role == 'system' -%}{{ m.content }}|{%- endfor -%}" + leaving_out(
    "m.role == 'system'"
)
ALTERNATING = refusing("not loop.first and m.role == messages[loop.index0 - 1].role or m.role == 'system'")


def talk(roles: str) -> list[dict[str, Any]]:
    """Messages of these roles: s, u, a; each says its role's letter and its number."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[letter], "content": f"{letter}{at}"} for at, letter in enumerate(roles)]


@pytest.mark.parametrize(
    ("source", "roles", "shown"),
    [
        (ANYWHERE, "ssu", "[system] s0 s1|[user] u2"),
        (ANYWHERE, "suasu", "[system] s0|[user] u1|[assistant] a2|[system] s3|[user] u4"),
        (FIRST_ONLY, "ssu", "[system] s0 s1|[user] u2"),
        (FIRST_ONLY, "suasu", "[system] s0|[user] u1|[assistant] a2|[user] s3 u4"),
        (FIRST_ONLY, "uas", "[user] u0|[assistant] a1|[user] s2"),
        (FIRST_ONLY, "usau", "[user] u0 s1|[assistant] a2|[user] u3"),
        (FIRST_ELSE_DROPPED, "sus", "[system] s0|[user] u1 s2"),
        (HOISTED, "suasu", "s0|[user] u1|[assistant] a2|[user] s3 u4"),
        (NO_SYSTEM, "su", "[user] s0 u1"),
        (ALTERNATING, "sus", "[user] s0 u1 s2"),
        (ANYWHERE, "uauu", "[user] u0|[assistant] a1|[user] u2|[user] u3"),
        (ALTERNATING, "uauu", "[user] u0|[assistant] a1|[user] u2 u3"),
        (ALTERNATING, "usasu", "[user] u0 s1|[assistant] a2|[user] s3 u4"),
    ],
)
def test_system_messages_are_shown_where_the_template_shows_them(source: str, roles: str, shown: str) -> None:
    text = load("chatml", source).render_text(talk(roles))
    assert text.replace("\n\n", " ") == shown + "|[assistant]"


@pytest.mark.parametrize("source", [ANYWHERE, FIRST_ONLY, HOISTED, ALTERNATING])
def test_what_is_rendered_later_is_what_is_rendered_at_once(source: str) -> None:
    tokenizer = load("chatml", source)
    before, answer, after = talk("su"), {"role": "assistant", "content": "ok"}, talk("su")
    sampled = tokenizer.encode(" ok")
    ids = tokenizer.render(before) + sampled
    ids += TurnTemplate(tokenizer).ids_after([*before, answer], after, sampled_ids=sampled)
    whole = tokenizer.render_text([*before, answer, *after])
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole


def test_a_system_message_with_parts_is_shown_with_the_users_parts() -> None:
    tokenizer = load("chatml", FIRST_ONLY)
    parts = [{"type": "image", "image": "a.png"}]
    placed = tokenizer.form.placed([*talk("uas"), {"role": "user", "content": parts}])
    assert placed[-1] == {"role": "user", "content": [{"type": "text", "text": "s2"}, *parts]}


def test_a_message_of_another_role_that_is_left_out_is_an_error() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "narrator", "content": "b"}]
    assert "b" in load("chatml", ANYWHERE).render_text(messages)
    with pytest.raises(DataError, match=r"messages\[1\].*narrator"):
        load("chatml", leaving_out("m.role == 'narrator'")).render_text(messages)


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("| tojson", '{"city": "Lyon"}'),
        ("", '{"city": "Lyon"}'),
        ("+ ''", '{"city": "Lyon"}'),
        ("| items | list", "[('city', 'Lyon')]"),
    ],
)
def test_arguments_are_shown_as_json_whatever_the_template_takes(how: str, shown: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": {"city": "Lyon"}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    source = template(CALLS.replace("HOW", how) + SHOW)
    assert shown in load("chatml", source).render_text([*talk("u"), answer])
