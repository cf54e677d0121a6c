"""What a payload may name: properties, and what somebody would try."""

import ipaddress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError
from rollstream.integrations.slime.payload_rules import PayloadRules

quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
NOWHERE = Path("/nowhere")


class Folders:
    """
    root/data      allowed; data/buffer is the server's own, data/out links to root/secret
    root/more      allowed, too
    root/secret    not allowed
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.data, self.more, self.secret = (self.root / name for name in ("data", "more", "secret"))
        for folder in (self.data / "sub", self.data / "buffer" / "logs", self.more, self.secret):
            folder.mkdir(parents=True)
        for file in (self.data / "a.jsonl", self.more / "x.jsonl", self.secret / "key"):
            file.write_text("{}")
        (self.root / "database").mkdir()  # its name begins like an allowed folder's
        for name, target in (("out", self.secret), ("back", self.more), ("own", "buffer"), ("loop", "loop")):
            (self.data / name).symlink_to(target)
        self.rules = PayloadRules([self.data, self.more], forbidden=self.data / "buffer")

    def checked(self, key: str, given: Any) -> Any:
        payload, warnings = self.rules.check({"task_type": "math", key: given}, False)
        assert bool(warnings) == (key not in payload)
        return payload.get(key)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("rules"))


PIECES = [".."] * 3 + [*".", "a.jsonl", "sub", "out", "back", "own", "buffer", "loop", "key", "", "~", "a\0"]
PATHS = st.builds(
    lambda start, pieces: start + "/".join(pieces),
    st.sampled_from(["", "", "/", "DATA/", "MORE/", "SECRET/", "//", "file://"]),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=7),
)


@quick
@given(path=PATHS)
def test_an_input_file_is_below_an_allowed_folder_or_refused(folders: Folders, path: str) -> None:
    for name in ("data", "more", "secret"):
        path = path.replace(f"{name.upper()}/", f"{getattr(folders, name)}/")
    try:
        found = Path(folders.checked("input_file", path))
    except ConfigError as error:
        assert str(error).startswith("input_file: ")
        return
    assert found == found.resolve() and found.is_absolute() and found.exists()
    assert folders.data in (found, *found.parents) or folders.more in (found, *found.parents)
    assert folders.data / "buffer" not in (found, *found.parents)
    assert folders.checked("input_file", str(found)) == str(found)


def test_input_files_by_example(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    data = folders.data
    for path in ("a.jsonl", f"{data}/a.jsonl", f"/proc/self/root{data}/a.jsonl", "sub/../a.jsonl"):
        assert folders.checked("input_file", path) == str(data / "a.jsonl")
    for path in ("back/x.jsonl", "../more/x.jsonl"):
        assert folders.checked("input_file", path) == str(folders.more / "x.jsonl")
    with pytest.raises(ConfigError, match="no path that can be looked up: a loop of links"):
        folders.checked("input_file", "loop/../out")
    with pytest.raises(ConfigError, match=f"^input_file: there is no {data}/not/there.jsonl"):
        folders.checked("input_file", "not/there.jsonl")
    paths = f"""
        ../secret/key out/key {folders.secret}/key /etc/passwd buffer/logs own/logs .. /proc/self/environ
        /proc/self/root{folders.secret}/key ../database loop/x ~/x
    """
    others: list[Any] = ["a\0b", "x" * 5000, "\ud800", "", 7, ["a.jsonl"], {"path": "a.jsonl"}, True]
    for path in [*paths.split(), *others]:
        with pytest.raises(ConfigError, match=r"^input_file: "):
            print(path, folders.checked("input_file", path))
    monkeypatch.chdir(folders.more)  # which is allowed where nothing else is
    rules = PayloadRules(forbidden=folders.more / "buffer")
    checked, _ = rules.check({"task_type": "math", "input_file": "x.jsonl"}, False)
    assert checked["input_file"] == str(folders.more / "x.jsonl")
    with pytest.raises(ConfigError, match="is not below"):
        rules.check({"task_type": "math", "input_file": "../data/a.jsonl"}, False)


def check_engine(url: Any, shown_token: bool = False) -> None:
    engines = ["http://gpu-1:30000", "https://engine.example/v1", "http://[fd00::1]:80"]
    rules = PayloadRules(engines=engines, forbidden=NOWHERE)
    checked, _ = rules.check({"task_type": "math", "remote_engine_url": url}, shown_token)
    assert checked["remote_engine_url"] == url


ALLOWED_ENGINES: list[Any] = """
    http://localhost http://LOCALHOST:30000/v1 http://127.0.0.1:1 https://127.255.1.9/ http://[::1]:8
    http://[0:0:0:0:0:0:0:1]:8 http://gpu-1:30000/v1 http://GPU-1:30000 https://engine.example:443
    http://[fd00:0::1]
""".split()  # noqa: SIM905
OTHER_ENGINES: list[Any] = """
    http://evil http://127.0.0.1.evil http://127.0.0.1.:80 http://localhost.evil http://0.0.0.0
    http://gpu-1:30001 https://gpu-1:30000 http://gpu-10:30000 http://127.1 http://engine.example
    http://2130706433 http://0x7f000001 http://0177.0.0.1 http://[fd00::2] http://169.254.169.254
""".split()  # noqa: SIM905
NO_ENGINES: list[Any] = """
    http://127.0.0.1@evil http://127.0.0.1:80@evil/ http://user:pass@127.0.0.1 http:127.0.0.1
    http://127.0.0.1\\@evil http://127.0.0.1#@evil http://evil#@127.0.0.1 http:/127.0.0.1
    http://127.0.0.1?@evil http://evil%00.127.0.0.1 127.0.0.1 http:// http:///x //127.0.0.1
    ftp://127.0.0.1 file:///etc/passwd unix:///run/docker.sock http://127.0.0.1:0 http://127.0.0.1:65536
    http://127.0.0.1:80:80 http://[::1 http://[127.0.0.1] http://[::1%25eth0] http://[::1].evil
    http://①27.0.0.1 http://localhoſt http://１27.0.0.1
""".split()  # noqa: SIM905


def test_engines_by_example() -> None:
    for url in [*ALLOWED_ENGINES, ["http://127.0.0.1:1", "http://gpu-1:30000"]]:
        check_engine(url)
    for url in [*OTHER_ENGINES, ["http://127.0.0.1", "http://evil"]]:
        with pytest.raises(ConfigError, match=r"--engines"):
            check_engine(url)
        check_engine(url, shown_token=True)
    wrong = ["http://127.0.0.1\n.evil", "http://127.0.0.1\n", " http://127.0.0.1", "http://[::1] http://evil"]
    for url in [*NO_ENGINES, *wrong, "", [], [[]], 7, {"url": "http://127.0.0.1"}, True]:
        for shown_token in (False, True):
            with pytest.raises(ConfigError, match=r"^remote_engine_url: "):
                check_engine(url, shown_token)
    for url in ("gpu-1:30000", "http://gpu-1/x?y", "http://a b"):  # the operator's own
        with pytest.raises(ConfigError, match=r"^engines: "):
            PayloadRules(engines=[url], forbidden=NOWHERE)


HOSTS = ["127.0.0.1", "localhost", "[::1]", "evil", "gpu-1", "gpu-1:30000", ".evil", "127.0.0.1.evil"]
NOISE = st.text(st.sampled_from("@:/\\#?%.0189[]\t\n ael"), max_size=3)
PARTS = st.lists(st.sampled_from(HOSTS) | NOISE, max_size=5).map("".join)


@given(url=st.sampled_from(["http://", "https://", "http:", ""]).flatmap(lambda s: PARTS.map(s.__add__)))
def test_an_engine_that_passes_is_the_one_that_a_client_finds(url: str) -> None:
    try:
        check_engine(url)
    except ConfigError as error:
        assert str(error).startswith("remote_engine_url: ")
        return
    found = urlsplit(url)
    assert found.username is None and found.password is None and found.hostname is not None
    if found.hostname == "gpu-1":
        assert (found.scheme, found.port) == ("http", 30000)
    elif found.hostname != "localhost":
        assert ipaddress.ip_address(found.hostname).is_loopback


def test_tokenizers_are_folders_that_are_allowed_or_names_on_the_hub(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders.root)
    for name in ("gpt2", "Qwen/Qwen3-0.6B", "org/some_name.v2"):
        assert folders.checked("tokenizer_path", name) == name
    for name in ("sub", str(folders.data / "sub")):
        assert folders.checked("tokenizer_path", name) == str(folders.data / "sub")
    assert folders.checked("tokenizer_path", "back") == str(folders.more)
    left_out = f"""
        /models/qwen ./sub2 ../secret out ~/model ~root a/b/c .. buffer own/logs secret secret/key
        {folders.secret} a.jsonl https://evil/x a\\b org/../x
    """
    for name in [*left_out.split(), "a b", "x" * 200]:
        assert folders.checked("tokenizer_path", name) is None, name
    for wrong in (7, [], {}, True, "", "a\0"):
        with pytest.raises(ConfigError, match=r"^tokenizer_path: "):
            folders.checked("tokenizer_path", wrong)


def test_tools_are_names_of_the_operators_file() -> None:
    rules = PayloadRules(forbidden=NOWHERE, tools=frozenset({"search", "python"}))
    for tools in (None, [], ["search"], ["python", "search"]):
        rules.check({"task_type": "math", "tools": tools}, False)
    server = [{"config": {"type": "mcp", "server": {"command": "/bin/sh"}}}]
    wrong: list[tuple[str, Any]] = [("tools", one) for one in (["sh"], "search", [7], {"search": 1}, server)]
    for key in ("tool_config_path", "function_tool_path", "agent_loop_config_path"):
        wrong += [(key, value) for value in ("tools.yaml", None, [])]
    for key, value in wrong:
        with pytest.raises(ConfigError, match=rf"^{key}: "):
            rules.check({"task_type": "math", key: value}, True)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(max_size=5) | st.sampled_from(["rollstream", "remote_buffer_url", "tokenizer_path", "raw"])


@quick
@given(payload=st.dictionaries(KEYS, JSON, max_size=6))
def test_what_was_checked_stays_as_it_is_when_it_is_checked_again(
    folders: Folders, payload: dict[str, Any]
) -> None:
    fine = {"num_epoch": "2", "num_process": "100", "max_tokens": None, "skip_instance_ids": [7, "7", 7]}
    payload = {"task_type": "math", "input_file": "a.jsonl", **fine, **payload}
    before = repr(payload)
    try:
        checked, _ = folders.rules.check(payload, False)
    except ConfigError:
        return
    assert repr(payload) == before
    assert folders.rules.check(checked, False)[0] == checked
    assert "rollstream" not in checked and "remote_buffer_url" not in checked
    changed = {"rollstream", "remote_buffer_url", "tokenizer_path", "input_file"}
    kept = {key: value for key, value in payload.items() if key not in changed}
    assert kept == {key: value for key, value in checked.items() if key not in changed}
