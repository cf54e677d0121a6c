"""The tokenizer's fast path gives what transformers gives."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_PATH)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(str(MODEL_PATH))


texts = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from(
    ["<|im_start|>user\nhi<|im_end|>\n", " - 12 + -7", "<tool_call>", "a  b ,  c ."]
)


@given(texts, texts)
def test_encode_and_decode_equal_transformers(
    tokenizer: ChatTokenizer, reference: Any, one: str, two: str
) -> None:
    ids = tokenizer.encode(one + two)
    assert ids == reference.encode(one + two, add_special_tokens=False)
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_render_equals_transformers(tokenizer: ChatTokenizer, reference: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2 ="}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.render(messages) == expected


def test_what_the_template_refuses_is_the_prompts_fault(tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text("{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}")
    strict = load_tokenizer(str(MODEL_PATH), custom_chat_template=str(template))
    with pytest.raises(DataError, match="roles must alternate"):
        strict.render([{"role": "user", "content": "x"}])


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% if enable_thinking %}think{% endif %}{{ messages[0].content }}")
    plain = load_tokenizer(str(MODEL_PATH), custom_chat_template=str(template))
    thinking = load_tokenizer(
        str(MODEL_PATH), custom_chat_template=str(template), template_kwargs={"enable_thinking": True}
    )
    message = [{"role": "user", "content": "hi"}]
    assert plain.decode(plain.render(message)) == "hi"
    assert thinking.decode(thinking.render(message)) == "thinkhi"


def test_missing_tokenizer_or_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer found"):
        load_tokenizer(str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).write_bytes((MODEL_PATH / file).read_bytes())
    with pytest.raises(ConfigError, match="has no chat template"):
        load_tokenizer(str(tmp_path))
