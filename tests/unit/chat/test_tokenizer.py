"""What is loaded and remembered without transformers gives what transformers gives."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.chat.byte_level import byte_decoder, word_encoder
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.chat.tokenizer_files import read_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, DataError
from tests.support import tokenizers


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(str(MODEL_PATH))


@pytest.fixture(scope="module", params=tokenizers.NAMES)
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTokenizer, Any]:
    """A tokenizer as rollstream loads it, and as transformers does."""
    from transformers import AutoTokenizer

    folder = tokenizers.write(request.param, tmp_path_factory.mktemp(request.param))
    assert (read_tokenizer(folder) is not None) == (request.param in tokenizers.WITHOUT_TRANSFORMERS)
    return load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


pieces = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.text(st.characters(codec="ascii"), max_size=24),
    st.sampled_from(
        [
            *("<|im_start|>user\nhi<|im_end|>\n", "<|im_", "<tool_call>", "<think>", " - 12 + -7", "1234567"),
            *("a  b ,  c .", "   ", "'LL", " don't", "\r\n\n", '{"a": [', "..//"),
            *("\x1c\x85", "\u00a0", "e\u0301", "\u1e9e", "\u017f"),
        ]
    ),
)


@settings(max_examples=150)
@given(st.lists(pieces, max_size=8).map("".join), st.lists(st.integers(0, 700), max_size=12))
def test_encode_and_decode_equal_transformers(
    both: tuple[ChatTokenizer, Any], text: str, sampled: list[int]
) -> None:
    tokenizer, reference = both
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text, add_special_tokens=False)
    for given_ids in (ids, sampled):
        for skip in (True, False):
            expected = reference.backend_tokenizer.decode(given_ids, skip_special_tokens=skip)
            assert tokenizer.decode(given_ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "caf\u00e9 <b>"}}]])
def test_prompts_and_special_tokens_equal_those_of_transformers(
    both: tuple[ChatTokenizer, Any], tools: Any
) -> None:
    tokenizer, reference = both
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2 = <|im_end|>"}]
    expected = reference.apply_chat_template(messages, tools, add_generation_prompt=True, return_dict=False)
    assert tokenizer.render(messages, tools=tools) == expected
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (reference.pad_token_id, len(reference))
    assert tokenizer.special_ids >= {*reference.all_special_ids, reference.eos_token_id}
    assert tokenizer.differences(reference) == []
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.render(messages, tools=tools) == expected


def test_the_words_and_the_bytes_of_every_byte_level_tokenizer_are_remembered(
    both: tuple[ChatTokenizer, Any],
) -> None:
    backend = both[1].backend_tokenizer
    is_byte_level = "ByteLevel" in str(backend.decoder)
    assert (word_encoder(backend) is not None) == (byte_decoder(backend) is not None) == is_byte_level


def test_a_tokenizer_needs_neither_transformers_nor_torch() -> None:
    code = (
        "import sys, rollstream, rollstream.cli\n"
        "from rollstream.chat.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(MODEL_PATH)!r}).render([{{'role': 'user', 'content': 'x'}}])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json", "generation_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, file: str) -> None:
    (tokenizers.write("demo", tmp_path) / file).write_text("{ broken")
    with pytest.raises(ConfigError, match=rf"{file} cannot be read"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "{% for m in messages %}\n{{ m if }}\n{% endfor %}",
            ConfigError,
            r"template .*mine\.jinja is broken: line 2",
        ),
        (
            "{{ messages[0].nothing.there }}",
            DataError,
            "template fails on this prompt .*the template is broken",
        ),
        ("{{ raise_exception('roles must alternate') }}", DataError, "roles must alternate"),
    ],
)
def test_what_a_template_refuses_and_a_broken_one_are_told_apart(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(text)
    with pytest.raises(error, match=message):
        load_tokenizer(str(MODEL_PATH), custom_chat_template=str(template)).render([{"role": "user"}])


def test_a_template_for_tools_and_generation_marks(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "x"}]
    folder = tokenizers.write("demo", tmp_path)
    (folder / "chat_template.jinja").unlink()
    names = {"default": "plain", "tool_use": "tools"}
    templates = [{"name": name, "template": text} for name, text in names.items()]
    change_json(folder / "tokenizer_config.json", chat_template=templates)
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.render_text(user), tokenizer.render_text(user, tools=[{}])) == ("plain", "tools")
    marked = "{% generation %}{% set a = 1 %}by model{% endgeneration %}{{ a }}"
    (folder / "chat_template.jinja").write_text(marked)
    assert load_tokenizer(str(folder)).render_text(user) == "by model"


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    """Among them a template, as transformers' `apply_chat_template(chat_template=...)`: it is taken instead."""
    template = tmp_path / "t.jinja"
    template.write_text("{% if enable_thinking %}think{% endif %}{{ messages[0].content }}")
    for arguments, text in (
        ({}, "hi"),
        ({"enable_thinking": True}, "thinkhi"),
        ({"chat_template": "{{ messages[0].content }} A:"}, "hi A:"),
    ):
        tokenizer = load_tokenizer(
            str(MODEL_PATH), custom_chat_template=str(template), template_kwargs=arguments
        )
        assert tokenizer.decode(tokenizer.render([{"role": "user", "content": "hi"}])) == text


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


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "gemma2", "t5", "bert", "llama"])
@pytest.mark.parametrize("gone", [["tokenizer.json", "tokenizer_config.json"], ["tokenizer.json"]])
def test_a_folder_without_its_vocabulary_is_refused(tmp_path: Path, model_type: str, gone: list[str]) -> None:
    # transformers makes an empty tokenizer of such a folder; what is in it depends on the kind of model.
    for file in {"tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"} - {*gone}:
        (tmp_path / file).write_bytes((MODEL_PATH / file).read_bytes())
    change_json(tmp_path / "config.json", model_type=model_type, architectures=None)
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
