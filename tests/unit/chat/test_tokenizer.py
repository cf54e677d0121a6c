"""A tokenizer gives what transformers gives, and folders without one are refused."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.chat.byte_level import ByteLevel
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, DataError
from tests.support import tokenizers


@pytest.fixture(scope="module", params=tokenizers.NAMES)
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatTokenizer, Any]:
    """A tokenizer as rollstream reads it from its cache, and as transformers loads it."""
    from transformers import AutoTokenizer

    folder = tokenizers.write(request.param, tmp_path_factory.mktemp(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.with_name("cache")))
        load_tokenizer(str(folder))
        cached = load_tokenizer(str(folder))
    assert type(cached._tokenizer).__name__ == "CachedTokenizer"
    return cached, AutoTokenizer.from_pretrained(folder)


def test_a_damaged_or_unwritable_cache_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_tokenizer(str(MODEL_PATH)).digest()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_tokenizer(str(MODEL_PATH)).digest() == expected
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert load_tokenizer(str(MODEL_PATH)).digest() == expected
        (entry,) = (tmp_path / "rollstream" / "tokenizers").iterdir()
        entry.write_bytes(entry.read_bytes()[:100])


def test_changed_files_are_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(MODEL_PATH, tmp_path / "model"))
    before = load_tokenizer(str(folder)).render_text([{"role": "user", "content": "hi"}])
    template = next(path for path in folder.iterdir() if path.name.startswith("chat_template"))
    template.write_text("{{ messages[0].content }}{{ '!' }}", "utf-8")
    for _ in range(2):
        after = load_tokenizer(str(folder)).render_text([{"role": "user", "content": "hi"}])
        assert after == "hi!" != before


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
    for token_ids in (ids, sampled):
        for skip in (True, False):
            expected = reference.backend_tokenizer.decode(token_ids, skip_special_tokens=skip)
            assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected


def test_words_and_bytes_of_byte_level_tokenizers_are_remembered(both: tuple[ChatTokenizer, Any]) -> None:
    backend = both[1].backend_tokenizer
    if "ByteLevel" in str(backend.decoder):
        ByteLevel(backend)
    else:
        with pytest.raises(ValueError):
            ByteLevel(backend)


def test_a_tokenizer_may_be_pickled(both: tuple[ChatTokenizer, Any]) -> None:
    tokenizer, reference = both
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2 = <|im_end|>"}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.render(messages) == expected
    assert pickle.loads(pickle.dumps(tokenizer)).render(messages) == expected


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json", "generation_config.json"])
def test_broken_file(tmp_path: Path, file: str) -> None:
    (tokenizers.write("demo", tmp_path) / file).write_text("{ broken")
    with pytest.raises(ConfigError):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{% for m in messages %}\n{{ m if }}\n{% endfor %}", ConfigError, "line 2"),
        ("{{ messages[0].nothing.there }}", DataError, None),
        ("{{ raise_exception('roles must alternate') }}", DataError, "roles must alternate"),
    ],
)
def test_broken_template_is_refused_at_load_and_a_prompt_where_it_is_rendered(
    tmp_path: Path, text: str, error: type[Exception], message: str | None
) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text(text)
    with pytest.raises(error, match=message):
        load_tokenizer(str(MODEL_PATH), custom_chat_template=str(template)).render([{"role": "user"}])


def test_a_template_for_prompts_with_tools(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "x"}]
    folder = tokenizers.write("demo", tmp_path)
    (folder / "chat_template.jinja").unlink()
    names = {"default": "plain", "tool_use": "tools"}
    templates = [{"name": name, "template": text} for name, text in names.items()]
    change_json(folder / "tokenizer_config.json", chat_template=templates)
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.render_text(user), tokenizer.render_text(user, tools=[{}])) == ("plain", "tools")


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


def test_missing_tokenizer_or_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_tokenizer(str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / file).write_bytes((MODEL_PATH / file).read_bytes())
    with pytest.raises(ConfigError, match="custom_chat_template"):
        load_tokenizer(str(tmp_path))


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "t5", "bert", "llama"])
@pytest.mark.parametrize("gone", [["tokenizer.json", "tokenizer_config.json"], ["tokenizer.json"]])
def test_a_folder_without_its_vocabulary_is_refused(tmp_path: Path, model_type: str, gone: list[str]) -> None:
    # transformers makes an empty tokenizer of such a folder; what is in it depends on the kind of model.
    for file in {"tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"} - {*gone}:
        (tmp_path / file).write_bytes((MODEL_PATH / file).read_bytes())
    change_json(tmp_path / "config.json", model_type=model_type, architectures=None)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
