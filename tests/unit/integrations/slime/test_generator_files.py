import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from rollstream.buffer.groups import GroupSettings, HookError, StoredItem
from rollstream.buffer.items import Encoding, ItemError, dump_item, load_item, parse_item
from rollstream.errors import ConfigError, RollstreamError
from rollstream.integrations.slime.generator_files import GeneratorFiles
from rollstream.integrations.slime.hook_process import HookProcess
from tests.support.buffer import item
from tests.support.processes import command_line, is_running
from tests.support.until import until

SETTINGS = GroupSettings(group_size=2, min_valid_item_size_ratio=0.5)
GOOD = "import os, signal, time\nTASK_TYPE = '{task}'\ndef run_rollout(data): pass\n"
WHO = "def get_group_data_meta_info(groups): return {'pid': os.getpid(), 'ids': list(groups)}\n"


def write(folder: Path, task: str, code: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{task}_generator.py"
    file.write_text(GOOD.format(task=task) + code)
    return file


def stored(*rewards: float, encoding: Encoding = "json") -> list[StoredItem]:
    return [
        StoredItem(f"u{n}", reward, encoding, dump_item(item(7, reward, f"u{n}"), encoding))
        for n, reward in enumerate(rewards)
    ]


async def meta_info(host: GeneratorFiles, task: str, groups: Any) -> dict[str, Any]:
    meta: dict[str, Any] = orjson.loads(await host.call("meta_info", task, SETTINGS, groups))
    return meta


async def finish(host: GeneratorFiles, task: str = "math") -> list[dict[str, Any]]:
    done = await host.call("finish", task, SETTINGS, [(7, stored(0.0, 1.0))], False, "json")
    return [orjson.loads(body) for body in done]


async def who(host: GeneratorFiles, *ids: int, task: str = "math") -> dict[str, Any]:
    return await meta_info(host, task, [(one, stored(1.0)) for one in ids])


@contextlib.asynccontextmanager
async def a_host(*folders: Path | str, seconds: float = 60.0) -> AsyncIterator[GeneratorFiles]:
    host = GeneratorFiles(folders, seconds)
    try:
        await host.refresh()
        yield host
    finally:
        await host.close()


async def test_hooks_are_called_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLSTREAM_BUFFER_TOKEN", "secret")
    code = """
print("a print to stdout does not break the wire")
def get_group_data_meta_info(groups):
    try:
        typed = input()
    except EOFError:
        typed = "none"
    sizes = {one: len(items) for one, items in groups.items()}
    token = os.environ.get("ROLLSTREAM_BUFFER_TOKEN")
    return {"pid": os.getpid(), "sizes": sizes, "typed": typed, "token": token}
def is_valid_group(group, min_valid_group_size, timed_out):
    os.write(1, b"nor does this")
    return len(group[1]) >= min_valid_group_size, timed_out
def filter_item(item, task_type):
    return item["reward"] > 0 and task_type == "math"
"""
    write(tmp_path, "math", code)
    async with a_host(tmp_path) as host:
        assert host.overridden("math") == host.files["math"].overridden
        assert host.overridden("math") == {"filter_item", "get_group_data_meta_info", "is_valid_group"}
        assert host.overridden("code") == frozenset()
        assert await host.call("judge", "math", SETTINGS, [(7, stored(1.0))], False) == [False, False]
        assert await host.call("judge", "math", SETTINGS, [(7, stored(1.0, 0.0))], True) == [True, True]
        given = [("q", stored(0.0)), (7, stored(1.0)), (7, stored(1.0))]
        meta = await meta_info(host, "math", given)
        assert meta.pop("pid") != os.getpid()
        assert meta == {"sizes": {"q": 1, "7": 2}, "typed": "none", "token": None}
        for encoding in ("json", "msgpack"):
            mixed = stored(0.0, 0.5, encoding="msgpack")[:1] + stored(0.0, 0.5)[1:]
            done = await host.call("finish", "math", SETTINGS, [(7, mixed)], False, encoding)
            items = [load_item(body, encoding) for body in done]
            assert [(one["uid"], one["raw_reward"]) for one in items] == [("u1", 0.5), ("u1", 0.5)]
        assert await host.call("finish", "math", SETTINGS, [(7, stored(0.0, 0.0))], False, "json") == []


FAULTS = {
    "hang": ("time.sleep(600)", "filter_item did not return within 2 s"),
    "gil": ("import re; re.match('(a+)+$', 'a' * 60 + 'b')", "filter_item did not return within 2 s"),
    "leave": ("os._exit(3)", r"filter_item: the process of the hooks ended with exit code 3"),
    "crash": ("import ctypes; ctypes.string_at(0)", r"process of the hooks was killed by SIGSEGV"),
    "sys_exit": ("raise SystemExit(4)", "filter_item raised SystemExit: 4"),
    "interrupt": ("raise KeyboardInterrupt", "filter_item raised KeyboardInterrupt"),
    "closes": ("os.closerange(3, 99); time.sleep(600)", "filter_item: the process of the hooks ended"),
    "no_form": ("item['extra_info']['a'] = {1}; return True", "filter_item gave back an item that cannot be"),
}


async def test_a_hook_that_fails_raises_and_others_go_on(tmp_path: Path) -> None:
    for task, (code, _) in FAULTS.items():
        write(tmp_path, task, f"def filter_item(item):\n    {code}\n")
    write(tmp_path, "math", "def filter_item(item):\n    return True\n")
    async with a_host(tmp_path, seconds=2.0) as host:
        calls = [finish(host, task) for one in FAULTS for task in (one, "math")]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for (task, (_, said)), error in zip(FAULTS.items(), answers[::2], strict=True):
            with pytest.raises(HookError, match=f"^{tmp_path}/{task}_generator.py: .*{said}") as caught:
                raise error if isinstance(error, BaseException) else AssertionError(task)
            assert caught.value.hook == "filter_item"
            if task in ("hang", "gil", "crash", "sys_exit"):
                assert re.search(f'/{task}_generator.py", line 5,? in filter_item', caught.value.traceback)
        assert all(isinstance(answer, list) and len(answer) == 2 for answer in answers[1::2])


async def test_folders(tmp_path: Path) -> None:
    write(tmp_path / "a", "math")
    same = write(tmp_path / "b", "math")
    async with a_host(tmp_path / "a", tmp_path / "b") as host:
        assert host.files == {}
        (problem,) = host.problems
        assert f"/a/math_generator.py and {same} have the same TASK_TYPE 'math'; rename" in problem
        same.write_text(GOOD.format(task="code"))
        await host.refresh()
        assert (sorted(host.files), host.problems) == (["code", "math"], ())
        same.unlink()
        with pytest.raises(ConfigError, match=r"no generator file \(\*_generator.py\) in .*/b"):
            await host.refresh()
    with pytest.raises(ConfigError, match=r"no such folder: .*/missing"):
        await GeneratorFiles([tmp_path / "missing"]).refresh()
    await GeneratorFiles([]).refresh()


async def test_an_edit_is_taken_at_refresh_and_a_broken_one_is_not(tmp_path: Path) -> None:
    count = "with open(__file__ + '.runs', 'a') as f: f.write('x')\n"
    level = """
def filter_item(item):
    if item["reward"] == 0.25: os._exit(1)
    return item["reward"] >= {}
"""
    file = write(tmp_path, "math", count + level.format(1))
    settings = GroupSettings(group_size=3, min_valid_item_size_ratio=0.1)
    async with a_host(tmp_path) as host:

        async def uids() -> list[str]:
            done = await host.call("finish", "math", settings, [(7, stored(0.0, 0.5, 1.0))], False, "json")
            return sorted({orjson.loads(body)["uid"] for body in done})

        await host.refresh()
        assert await uids() == ["u2"]
        assert file.with_name(file.name + ".runs").read_text() == "x"
        write(tmp_path, "math", level.format(0.5))
        assert await uids() == ["u2"]
        await host.refresh()
        assert await uids() == ["u1", "u2"]

        file.write_text(count + "1 / 0")
        for runs, again in (("xx", False), ("xx", False), ("xxx", True)):  # not again for nothing
            await host.refresh(again)
            assert host.files == {} and "ZeroDivisionError" in host.problems[0]
            assert file.with_name(file.name + ".runs").read_text() == runs
        assert host.overridden("math") == {"filter_item"}
        assert await uids() == ["u1", "u2"]
        with pytest.raises(HookError, match="exit code 1"):
            await host.call("finish", "math", settings, [(7, stored(0.25))], False, "json")
        assert await uids() == ["u1", "u2"]  # a new process: the file itself cannot be run

        write(tmp_path, "math", level.format(0))
        await host.refresh()
        assert (list(host.files), host.problems) == (["math"], ())
        assert await uids() == ["u0", "u1", "u2"]


WAITS = """
def get_group_data_meta_info(groups):
    if 0 in groups:
        open(__file__ + ".began", "w").close()
        while not os.path.exists(__file__ + ".go"):
            time.sleep(0.01)
    return {"ids": list(groups)}
"""


async def test_calls_of_one_task_wait_for_each_other_and_are_answered_in_order(tmp_path: Path) -> None:
    file = write(tmp_path, "math", WAITS)
    write(tmp_path, "code", WHO)
    async with a_host(tmp_path) as host:
        before = await who(host, 1, task="code")
        os.kill(before["pid"], signal.SIGKILL)  # between calls: the next one does not fail
        running = asyncio.create_task(who(host, 0))
        await until(file.with_name(file.name + ".began").exists)
        after = await who(host, 2, task="code")  # another task's hooks do not wait for it
        assert after["ids"] == [2] and after["pid"] != before["pid"]
        queued = [asyncio.create_task(who(host, n)) for n in range(1, 9)]
        for cancelled in (running, queued[3]):
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        file.with_name(file.name + ".go").touch()
        answers = await asyncio.gather(*queued, return_exceptions=True)
        assert [one["ids"] for one in answers if isinstance(one, dict)] == [[1], [2], [3], [5], [6], [7], [8]]


async def test_items_are_parsed_in_a_child() -> None:
    process = HookProcess(60.0)
    try:
        for encoding in ("json", "msgpack"):
            body = stored(0.5, encoding=encoding)[0].body
            assert await process.parse(body, encoding) == [parse_item(body, encoding)]
            plain = load_item(body, encoding)
            del plain["uid"]
            plain["extra_info"]["text"] = "x" * 3_000_000  # more than is written at once
            without_uid = dump_item(plain, encoding)
            (parsed,) = await process.parse(without_uid, encoding)
            assert load_item(parsed.body, encoding) == {"uid": parsed.uid, **plain}
            assert parsed == parse_item(parsed.body, encoding)
            batch = {"items": [msgspec.Raw(body), msgspec.Raw(without_uid), msgspec.Raw(body)]}
            packed = (msgspec.json if encoding == "json" else msgspec.msgpack).encode(batch)
            first, second, third = await process.parse(packed, encoding)
            assert first == third == parse_item(body, encoding)
            assert load_item(second.body, encoding) == {"uid": second.uid, **plain}
        with pytest.raises(ItemError, match="messages: ") as caught:
            await process.parse(b'{"instance_id": 1, "messages": [], "reward": 1}', "json")
        assert caught.value.where == "messages"
        with pytest.raises(ItemError) as caught:
            await process.parse(b'{"items": [{"instance_id": 1, "messages": [], "reward": 1}]}', "json")
        assert caught.value.where == "items[0].messages"
    finally:
        await process.close()


async def test_close_ends_a_hanging_hook_at_once(tmp_path: Path) -> None:
    file = write(tmp_path, "math", WAITS)
    async with a_host(tmp_path) as host:
        calls = [asyncio.create_task(who(host, 0)) for _ in range(3)]
        await until(file.with_name(file.name + ".began").exists)
        await host.close()  # the hook would hang for ever
        for call in [*calls, who(host, 1)]:
            with pytest.raises(RollstreamError, match="the server is ending") as caught:
                await call
            assert not isinstance(caught.value, HookError)


async def test_the_child_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    code = "open(__file__ + '.pid', 'w').write(str(os.getpid()))\n"
    file = write(tmp_path, "math", code + WAITS)
    script = f"""
import asyncio
from rollstream.buffer.groups import GroupSettings
from rollstream.integrations.slime.generator_files import GeneratorFiles
async def main():
    host = GeneratorFiles([{str(tmp_path)!r}])
    await host.refresh()
    await host.call("meta_info", "math", GroupSettings(), [(0, [])])
asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", script])  # noqa: ASYNC220  quick enough
    try:
        await until(file.with_name(file.name + ".began").exists)
    finally:
        server.kill()
        server.wait()
    child = int(file.with_name(file.name + ".pid").read_text())
    await until(lambda: not command_line(child))


DAEMON = """
def get_group_data_meta_info(groups):
    pid = os.fork()
    if not pid:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.execve("/bin/sleep", ["sleep", "600"], {})
    return {"pid": pid}
"""


async def test_what_a_hook_leaves_behind_ends_with_its_process(tmp_path: Path) -> None:
    write(tmp_path, "math", DAEMON)
    async with a_host(tmp_path) as host:
        daemon = (await who(host, 1))["pid"]
        assert is_running(daemon)
    assert not is_running(daemon)
