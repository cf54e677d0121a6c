import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer import groups
from rollstream.buffer.groups import Group, GroupSettings, HookError, StoredItem, Verdict, finish_group
from rollstream.buffer.items import dump_item, load_item
from rollstream.errors import ConfigError
from rollstream.integrations.slime.hooks import CONVENTIONS, Hooks
from rollstream.user_code import run_file
from tests.support.buffer import named_group

SETTINGS = GroupSettings(group_size=4)

SLIME_STYLE = """
TASK_TYPE = "math"

def run_rollout(data: dict):
    pass

def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
    assert algo == "grpo"
    instance_id, data = group
    rewards = [item["reward"] for item in data]
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    for item, reward in zip(data, rewards):
        item["reward"] = (reward - mean) / (std + epsilon)
        item["raw_reward"] = reward
    return (instance_id, data)

def is_valid_group(group, min_valid_group_size, task_type="math"):
    instance_id, items = group
    answered = [item for item in items if item["messages"][-1]["content"].strip()]
    is_finished = len(items) >= min_valid_group_size
    return is_finished and len(answered) >= min_valid_group_size, is_finished
"""


def hooks_of(**functions: Any) -> Hooks:
    return Hooks(SimpleNamespace(**functions), "math", "/g/math_generator.py")  # type: ignore[arg-type]


def hooks_in(folder: Path, code: str) -> Hooks:
    file = folder / "math_generator.py"
    return Hooks(run_file(file, key="hooks", source=code.encode()), "math", str(file))


def finish_by_default(group: Group) -> list[dict[str, Any]]:
    stored = [StoredItem(one["uid"], one["reward"], "msgpack", dump_item(one, "msgpack")) for one in group[1]]
    return [load_item(body, "msgpack") for body in finish_group(stored, SETTINGS, "msgpack")]


def test_a_file_written_for_slime(tmp_path: Path) -> None:
    hooks = hooks_in(tmp_path, SLIME_STYLE)
    assert hooks.overridden == {"normalize_group_data", "is_valid_group"}
    assert hooks.judge(named_group([0, 1, 1]), SETTINGS) == Verdict(False, False)
    assert hooks.judge(named_group([0, 1, 1]), SETTINGS, timed_out=True) == Verdict(True, True)
    assert hooks.judge(named_group([0, 1]), SETTINGS, timed_out=True) == Verdict(False, True)
    assert hooks.judge(named_group([1, 1, 1, 1]), SETTINGS) == Verdict(True, True)
    items = hooks.finish(named_group([0, 1, 1]), SETTINGS)
    default = finish_by_default(named_group([0, 1, 1]))
    assert [item["reward"] for item in items] == pytest.approx([item["reward"] for item in default])
    assert hooks.judge(named_group([7.0, None]), GroupSettings(group_size=2, raw=True)) == Verdict(True, True)


@given(st.lists(st.sampled_from([0, 0.25, 1, -1.0, None]), max_size=6).map(named_group), st.booleans())
def test_hooks_that_only_call_the_default_ones_change_nothing(group: Any, timed_out: bool) -> None:
    hooks = hooks_of(
        is_valid_group=lambda group, settings, timed_out: groups.is_valid_group(group, settings, timed_out),
        filter_item=lambda item, task_type: groups.filter_item(item, task_type),
        normalize_group_data=lambda group, epsilon, algo: groups.normalize_group_data(group, epsilon, algo),
        pad_group_data=lambda group, group_size: groups.pad_group_data(group, group_size),
        get_group_data_meta_info=lambda read: groups.get_group_data_meta_info(read),
    )
    before = copy.deepcopy(group)
    verdict = groups.is_valid_group(group, SETTINGS, timed_out=timed_out)
    assert hooks.judge(group, SETTINGS, timed_out=timed_out) == verdict
    expected = finish_by_default(group)
    for some in (hooks, hooks_of(pad_group_data=groups.pad_group_data)):
        got = some.finish(group, SETTINGS)
        assert [(item["uid"], item["raw_reward"]) for item in got] == [
            (item["uid"], item["raw_reward"]) for item in expected
        ]
        assert all(item["extra_info"]["raw_reward"] == item["raw_reward"] for item in got)
        assert [item["reward"] for item in got] == pytest.approx([item["reward"] for item in expected])
    assert group == before
    assert hooks.meta_info({"q": group[1]}, SETTINGS) == groups.get_group_data_meta_info({"q": group[1]})


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        (True, (True, True)),
        (False, (False, False)),
        ((False, True), (False, True)),
        ([True, False], (True, True)),
        ((numpy.bool_(False), numpy.bool_(False)), (False, False)),
        (numpy.bool_(True), (True, True)),
    ],
)
def test_a_verdict_may_be_one_word_or_two(said: Any, verdict: tuple[bool, bool]) -> None:
    hooks = hooks_of(is_valid_group=lambda group, n, task: said)
    assert hooks.judge(named_group([0, 1]), SETTINGS) == Verdict(*verdict)
    # Nothing can come any more: finished, whatever it says.
    assert hooks.judge(named_group([0, 1]), SETTINGS, timed_out=True).finished
    assert hooks.judge(named_group([0, 1, 0, 1]), SETTINGS).finished


ASKING = """
seen = {}
def filter_item(item, kind, *, group_size):
    seen["filter"] = (kind, group_size)
    return True
def normalize_group_data(group, eps, *, algo, epsilon=3, extra=5):
    seen["normalize"] = (eps, algo, epsilon, extra)
    return group
def pad_group_data(group, group_size, **more):
    seen["pad"] = (group_size, more)
    return group[0], group[1] * 2
def is_valid_group(group, unused=3, *, timed_out, settings):
    seen["valid"] = (unused, timed_out, settings)
    return True
"""
OWN_DEFAULTS = """
seen = {}
def normalize_group_data(group, epsilon=0.5, algo="mine", task_type=""):
    seen["own"] = (epsilon, algo, task_type)
    return group
"""


def test_hooks_are_given_what_they_ask_for(tmp_path: Path) -> None:
    module = run_file(tmp_path / "a.py", key="hooks", source=ASKING.encode())
    hooks = Hooks(module, "math", "a.py")
    hooks.judge(named_group([0, 1]), SETTINGS, timed_out=True)
    hooks.finish(named_group([0, 1]), GroupSettings(group_size=4, min_valid_item_size_ratio=0.5))
    seen = {"filter": ("math", 4), "normalize": (1e-8, "grpo", 3, 5), "pad": (4, {})}
    assert module.seen == {**seen, "valid": (3, True, SETTINGS)}
    module = run_file(tmp_path / "b.py", key="hooks", source=OWN_DEFAULTS.encode())
    Hooks(module, "math", "b.py").finish(named_group([0, 1, 1]), SETTINGS)
    assert module.seen["own"] == (0.5, "mine", "math")


async def an_async_hook(item: Any) -> bool:
    return True


@pytest.mark.parametrize(
    "function",
    [
        an_async_hook,
        3,
        lambda: True,
        lambda item, task_type, threshold: True,
        lambda item, *, threshold: True,
    ],
)
def test_hooks_that_cannot_be_called_are_refused(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"/g/math_generator.py: filter_item must be a function of"):
        hooks_of(filter_item=function)


TRANSFORM = """
def transform_group(group, task_type):
    assert task_type == "math"
    for item in group[1]:
        item["reward"] *= 2
    return [group[0], group[1][:2]]
def filter_item(item, task_type):
    return 1 / 0
"""
RAW_REWARD = """
def normalize_group_data(group):
    return group[0], [{**item, "reward": 0.5, "raw_reward": 9.0} for item in group[1]]
"""


def test_items_have_their_raw_reward_in_both_places_whatever_hooks_do(tmp_path: Path) -> None:
    items = hooks_in(tmp_path, TRANSFORM).finish(
        named_group([0, -1.0, 1]), SETTINGS
    )  # in place of the others
    assert [(item["reward"], item["raw_reward"]) for item in items] == [(0, 0), (-2.0, -1.0)]
    assert [item["extra_info"]["raw_reward"] for item in items] == [0, -1.0]
    none = hooks_of(transform_group=lambda group, task_type: (group[0], []))
    assert none.finish(named_group([1]), SETTINGS) == []
    few = hooks_of(filter_item=lambda item, task_type: item["uid"] in ("u0", "u1"))  # of four, 0.7 must stay
    assert few.finish(named_group([0, 1, 0.5, 0.7]), SETTINGS) == []
    items = hooks_in(tmp_path, RAW_REWARD).finish(named_group([0, 1, 1, 1]), SETTINGS)
    assert {(item["raw_reward"], item["extra_info"]["raw_reward"]) for item in items} == {(9.0, 9.0)}


def call_all(hooks: Hooks, group: Group) -> None:
    if "get_group_data_meta_info" in hooks.overridden:
        hooks.meta_info({"q": group[1]}, SETTINGS)
    if "is_valid_group" in hooks.overridden:
        hooks.judge(group, SETTINGS)
    hooks.finish(group, SETTINGS)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_a_hook_that_raises_is_named_with_its_traceback(tmp_path: Path, name: str) -> None:
    hooks = hooks_in(tmp_path, f"def {name}({', '.join(CONVENTIONS[name])}):\n    return 1 / 0\n")
    with pytest.raises(HookError, match=f"math_generator.py: {name} raised ZeroDivisionError") as caught:
        call_all(hooks, named_group([0, 1, 1, 1]))
    assert caught.value.hook == name
    assert f'math_generator.py", line 2, in {name}' in caught.value.traceback


@pytest.mark.parametrize(
    ("name", "give_back"),
    [
        ("is_valid_group", lambda group: None),
        ("is_valid_group", lambda group: 1),
        ("is_valid_group", lambda group: (True,)),
        ("get_group_data_meta_info", lambda temp: None),
        ("filter_item", lambda item: None),
        ("filter_item", lambda item: numpy.zeros(2)),
        ("normalize_group_data", lambda group: None),
        ("normalize_group_data", lambda group: group[1]),
        ("normalize_group_data", lambda group: ("other", group[1])),
        ("normalize_group_data", lambda group: (group[0], [1])),
        ("pad_group_data", lambda group: (group[0], group[1][:3])),
        ("pad_group_data", lambda group: (group[0], group[1] * 2)),
        ("transform_group", lambda group: (group[0], group[1] * 2)),
    ],
)
def test_what_cannot_be_handed_out_is_refused(name: str, give_back: Any) -> None:
    hooks = hooks_of(**{name: give_back})
    with pytest.raises(HookError, match=f"^/g/math_generator.py: {name} gave back") as caught:
        call_all(hooks, named_group([0, 1, 1, 0.5]))
    assert caught.value.traceback


@pytest.mark.parametrize(
    "change",
    [
        {"messages": None},
        {"instance_id": 3},
        {"extra_info": 5},
        *({"reward": reward} for reward in (math.nan, numpy.float32("inf"), "1", True, 10**400)),
    ],
)
def test_items_that_a_reader_cannot_use_are_refused(change: dict[str, Any]) -> None:
    def transform_group(group: Any) -> Any:
        items = [{**item, **change} for item in group[1]]
        return group[0], [{k: v for k, v in item.items() if k != "messages" or v} for item in items]

    with pytest.raises(HookError, match=rf"transform_group gave back items\[0\] .*{next(iter(change))}"):
        hooks_of(transform_group=transform_group).finish(named_group([0, 1, 1, 0.5]), SETTINGS)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("normalise_group_data", "normalize_group_data"),
        ("normalize_group", "normalize_group_data"),
        ("filter_items", "filter_item"),
        ("isValidGroup", "is_valid_group"),
        ("transfrom_group", "transform_group"),
        ("get_group_meta_info", "get_group_data_meta_info"),
    ],
)
def test_a_misspelt_hook_is_an_error(tmp_path: Path, name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is no hook, did you mean {meant}"):
        hooks_in(tmp_path, f"def {name}(group): return group\n")


def test_other_functions_are_no_misspelt_hooks(tmp_path: Path) -> None:
    names = ["_filter_items", "filter_rows", "default_filter_item", "my_is_valid_group", "pad_messages"]
    names += ["compute_score", "filter_item_by_length", "transform_row", "normalize_answer", "run_rollout"]
    code = "".join(f"def {name}(*_): return True\n" for name in names)
    code += "class FilterItems: pass\nfilter_itms = 5\n"
    code += "def filter_item(item): return filter_items([item])\ndef filter_items(items): return True\n"
    assert hooks_in(tmp_path, code).overridden == {"filter_item"}
