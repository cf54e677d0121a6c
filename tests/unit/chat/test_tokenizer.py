"""The tokenizer's fast path gives what transformers gives."""

import json
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


def test_what_makes_another_tokenizer(tokenizer: ChatTokenizer) -> None:
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(MODEL_PATH)
    assert tokenizer.differences(other) == []
    other.add_special_tokens({"pad_token": "[PAD]"})  # as for a model that has none
    assert tokenizer.differences(other) == []
    other.add_tokens(["<thought>"])
    other.chat_template = "{{ messages }}"
    assert tokenizer.differences(other) == ["vocabulary", "chat template"]


def test_missing_tokenizer_or_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer found"):
        load_tokenizer(str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).write_bytes((MODEL_PATH / file).read_bytes())
    with pytest.raises(ConfigError, match="has no chat template"):
        load_tokenizer(str(tmp_path))


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "gemma2", "t5", "bert", "llama"])
@pytest.mark.parametrize("gone", [["tokenizer.json", "tokenizer_config.json"], ["tokenizer.json"]])
def test_a_folder_without_its_vocabulary_is_refused(tmp_path: Path, model_type: str, gone: list[str]) -> None:
    # transformers makes an empty tokenizer of such a folder; what is in it depends on the kind of model.
    for file in {"tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"} - {*gone}:
        (tmp_path / file).write_bytes((MODEL_PATH / file).read_bytes())
    change_config(tmp_path, model_type=model_type, architectures=None)
    with pytest.raises(ConfigError, match=r"the folder has none of tokenizer\.json, tokenizer\.model, vocab"):
        load_tokenizer(str(tmp_path))


def test_a_vocabulary_of_a_few_words_will_do(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"[UNK]": 0, "yes": 1, "no": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    made.chat_template = "{{ messages[0].content }}"
    made.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).render([{"role": "user", "content": "yes no"}]) == [1, 2]
