import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from rollstream import user_calls
from rollstream.errors import ConfigError, RewardError
from rollstream.reward.base import RewardFunction
from rollstream.reward.custom import load_reward
from rollstream.trajectory import PromptRow

ROW = PromptRow(
    index=4,
    prompt_key="0" * 32,
    messages=[{"role": "user", "content": "2 + 2?"}],
    data_source="sums",
    ground_truth="4",
    extra_info={"level": 1},
)

REWARDS = '''
import asyncio
import functools
import threading

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert threading.current_thread().daemon and threading.current_thread() is not threading.main_thread()
    extra_info["changed"] = True
    return {"score": float(solution_str == ground_truth) + bonus, "source": data_source}

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return solution_str == ground_truth

class Judge:
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 2

class AsyncJudge:
    async def __call__(self, **kwargs):
        return 3

def with_worth(worth, data_source, solution_str, ground_truth, extra_info):
    return worth

judge = Judge()
five = functools.partial(with_worth, 5)
wrapped = lambda **kwargs: later(**kwargs)

def raises(**kwargs):
    """Raises from a place of its own."""
    return helper_that_raises()

def helper_that_raises():
    raise StopIteration("the reason")

async def raises_later(**kwargs):
    return helper_that_raises()

def exits(**kwargs):
    raise SystemExit(1)

async def interrupts_in_a_task(**kwargs):
    async def leave():
        raise KeyboardInterrupt("by hand")

    await asyncio.gather(asyncio.create_task(leave()))

class Leaves:
    def __init__(self):
        raise SystemExit(1)

def returns_text(**kwargs):
    return "1"

def hangs(release, **kwargs):
    release.wait()

async def blocks(release, **kwargs):
    release.wait()

def narrow(data_source, solution_str):
    return 0

class NeedsArguments:
    def __init__(self, x):
        pass

constant = 3
'''


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("compute_score", (1.0, {"source": "sums"})),
        ("later", (1.0, {})),
        ("Judge", (2.0, {})),
        ("judge", (2.0, {})),
        ("AsyncJudge", (3.0, {})),
        ("five", (5.0, {})),
        ("wrapped", (1.0, {})),
    ],
)
async def test_every_kind_of_function(path: str, name: str, expected: tuple[float, dict[str, Any]]) -> None:
    reward = load_reward(path, name)
    assert isinstance(reward, RewardFunction)
    assert await reward.score(ROW, "4") == expected
    assert ROW.extra_info == {"level": 1}
    reward.close()


async def test_reward_kwargs(path: str) -> None:
    reward = load_reward(path, reward_kwargs={"bonus": 0.5})
    assert (await reward.score(ROW, "5")).reward == 0.5
    reward.close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "raised StopIteration: the reason"),
        ("raises_later", r"raised RuntimeError: .*StopIteration"),
        ("exits", "raised SystemExit: 1"),
        ("interrupts_in_a_task", "raised KeyboardInterrupt: by hand"),
        ("returns_text", r"returned '1' \(str\)"),
    ],
)
async def test_what_goes_wrong_is_the_functions_own(path: str, name: str, said: str) -> None:
    reward = load_reward(path, name, timeout=20.0)
    for _ in range(2):
        with pytest.raises(RewardError, match=rf"{name} in rewards\.py, row 4 \(sums\): {said}") as caught:
            await reward.score(ROW, "4")
        shown = "".join(traceback.format_exception(caught.value))
        assert ("helper_that_raises" in shown) == name.startswith("raises")
    reward.close()


@pytest.mark.parametrize("name", ["hangs", "blocks"])
async def test_a_timeout_hurts_its_own_rollout_only(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_calls, "BLOCKED_AFTER", 0.05)
    event = threading.Event()
    reward = load_reward(path, name, {"release": event}, timeout=0.05, max_concurrency=1)
    for _ in range(2):
        with pytest.raises(RewardError, match=r"took longer than 0\.05 seconds"):
            await reward.score(ROW, "4")
    event.set()
    reward.close()


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("compute_scor", {}, "did you mean .compute_score.?"),
        ("constant", {}, "constant in .* cannot be called"),
        ("narrow", {}, "narrow in rewards.py cannot be called with data_source, solution_str, ground_truth"),
        ("compute_score", {"bonsu": 1}, "cannot be called with .*bonsu"),
        ("compute_score", {"extra_info": 1}, "extra_info comes from the prompt row"),
        ("Leaves", {}, r"class Leaves .* cannot be made without arguments \(SystemExit: 1\)"),
        ("NeedsArguments", {}, "class NeedsArguments .* cannot be made without arguments"),
    ],
)
def test_a_function_that_cannot_be_used(path: str, name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(path, name, kwargs)


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    named = tmp_path / "named.py"
    named.write_text("from math import floor\ndef my_reward(**_): return floor(1)\ndef _helper(): ...\n")
    with pytest.raises(ConfigError, match=r"compute_score. .known: my_reward."):
        load_reward(str(named))
    with pytest.raises(ConfigError, match=r"custom_reward_function: no such file"):
        load_reward(str(tmp_path / "no.py"))
    bad = tmp_path / "bad.py"
    bad.write_text("import nothing_of_the_kind")
    with pytest.raises(ConfigError, match=r"bad\.py raised ModuleNotFoundError"):
        load_reward(str(bad))
    for arguments in ({"timeout": 0.0}, {"max_concurrency": 0}):
        with pytest.raises(ConfigError, match="custom_reward_function"):
            load_reward(str(bad), **arguments)  # type: ignore[arg-type]


def test_the_digest_is_of_source_name_and_kwargs(path: str, tmp_path: Path) -> None:
    digest = load_reward(path).source_digest
    assert len(digest) == 32
    copy = tmp_path / "copy.py"
    copy.write_text(REWARDS)
    assert load_reward(str(copy), timeout=3).source_digest == digest
    copy.write_text(REWARDS + "\n")
    others = [load_reward(str(copy)), load_reward(path, "judge"), load_reward(path, "five", {})]
    others.append(load_reward(path, reward_kwargs={"bonus": 1}))
    assert len({digest, *(reward.source_digest for reward in others)}) == 5
