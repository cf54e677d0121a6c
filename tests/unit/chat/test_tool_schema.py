from pathlib import Path

import pytest

from rollstream.chat.tool_schema import check_names_differ, check_tool_schema, read_tool_entries
from rollstream.errors import ConfigError


def test_entries_are_resolved_but_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_THIS_TEST", "t")
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [{a: '${oc.env:TOKEN_OF_THIS_TEST}'}, 3]")
    assert read_tool_entries(file, key="k") == [{"a": "t"}, 3]
    with pytest.raises(ConfigError, match=r"^k: no such file"):
        read_tool_entries(tmp_path / "no.yaml", key="k")


def test_a_whole_schema_is_given_back() -> None:
    parameters: dict[str, object] = {"type": "object"}
    schema = {"type": "function", "function": {"name": "a", "parameters": parameters}}
    assert check_tool_schema(schema, "here") is schema
    parameters["properties"] = 1
    with pytest.raises(ConfigError, match=r"^here \(a\): parameters\.properties must be a mapping"):
        check_tool_schema(schema, "here")


def test_names() -> None:
    check_names_differ(["a", "b"], "here")
    with pytest.raises(ConfigError, match="here has more than one tool named a, b"):
        check_names_differ(iter(["b", "a", "b", "a", "c"]), "here")
