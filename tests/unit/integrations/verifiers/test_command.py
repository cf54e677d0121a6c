"""Arguments of environments on the command line, and what is told without the package."""

import importlib.metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.cli import main as cli
from rollstream.errors import ConfigError
from rollstream.integrations.verifiers.command import read_arguments
from rollstream.integrations.verifiers.loading import installed_version, short_name


def test_words_become_arguments() -> None:
    words = [
        "size=3",
        "name=gsm8k",
        'list=["a",1]',
        "agent.max_turns=4",
        "agent.harness.id=null",
        "e=",
    ]
    assert read_arguments(words) == {
        "size": 3,
        "name": "gsm8k",
        "list": ["a", 1],
        "agent": {"max_turns": 4, "harness": {"id": "null"}},
        "e": "",
    }


@given(st.text(max_size=20))
def test_any_word_is_read_or_refused(word: str) -> None:
    try:
        assert len(read_arguments([word])) == 1
    except ConfigError as error:
        assert "--arguments" in str(error)


@pytest.mark.parametrize("words", [["size"], ["=3"], ["a..b=3"], ["a=1", "a.b=2"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--arguments"):
        read_arguments(words)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("gsm8k", "gsm8k"),
        ("owner/gsm8k", "gsm8k"),
        ("envs/sums.py:load_environment", "sums"),
        ("envs/sums.py:make", "make"),
        ("package.sums:load_environment", "sums"),
    ],
)
def test_what_an_environment_is_called(name: str, short: str) -> None:
    assert short_name(name) == short


def test_without_the_package(capsys: pytest.CaptureFixture[str], tmp_path: object) -> None:
    try:
        importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        assert cli(["verifiers", "gsm8k", "--output", f"{tmp_path}/out"]) == 2
        assert "pip install 'rollstream[verifiers]'" in capsys.readouterr().err
    else:
        assert installed_version() >= (0, 0)
