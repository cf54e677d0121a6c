"""The hooks of a task type: functions of a generator file, found by name.

Hooks of files written for slime's rollout buffer are called as there. They run in the child process of
`hook_process`. Where a file lacks one of the hooks that finish a group, that of `groups` stands for it.
"""

import difflib
import inspect
import math
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final

import numpy

from rollstream.buffer import groups
from rollstream.buffer.groups import FINISHING, Group, GroupSettings, HookError, ItemDict, Verdict
from rollstream.buffer.items import InstanceId
from rollstream.errors import ConfigError

CONVENTIONS: Final[Mapping[str, Sequence[str]]] = {
    "get_group_data_meta_info": ("groups",),
    "is_valid_group": ("group", "min_valid_group_size", "task_type"),
    "filter_item": ("item", "task_type"),
    "normalize_group_data": ("group", "epsilon", "algo"),
    "pad_group_data": ("group", "group_size"),
    "transform_group": ("group", "task_type"),
}
"""The hooks in the order of their calls, each with slime's order of arguments."""

_KNOWN: Final = ("task_type", "group_size", "min_valid_group_size", "settings", "timed_out")
"""A parameter of such a name gets this value in every hook."""

_OWN_DEFAULT: Final = ("epsilon", "algo")
"""If the hook has a default for these, it keeps it."""

_NEAR: Final = 0.85
"""Likeness from which on a name is a misspelt hook (normalise_group_data, isValidGroup; not pad_messages)."""

_REQUIRED: Final = ("uid", "instance_id", "messages", "reward", "extra_info")
"""Keys without which a reader of slime's wire fails."""


class _Hook:
    """A function of the user's, and how it wants its arguments. Raises `ConfigError` if it cannot be called.

    A parameter gets the value of its name; one of an unknown name the value at its place in slime's call.
    """

    def __init__(self, name: str, function: Any, where: str) -> None:
        self._name, self._function, self._where = name, function, where
        convention = CONVENTIONS[name]
        wrong = f"{where}: {name} must be a function of ({', '.join(convention)})"
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"{wrong}, is {function!r:.100}")
        try:
            _, *rest = inspect.signature(function).parameters.values()
        except ValueError:  # no parameters, or no signature, as some of Python's own functions
            raise ConfigError(f"{wrong}; it takes no positional argument") from None
        self._by_name: dict[str, str] = {}
        for place, parameter in enumerate(rest, start=1):
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            value: str | None = None
            if parameter.name in _KNOWN or parameter.name in convention[1:]:
                value = parameter.name
            elif place < len(convention) and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                value = convention[place]
            has_default = parameter.default is not parameter.empty
            if value is None and not has_default:
                raise ConfigError(f"{wrong}; nothing can be given to its parameter {parameter.name}")
            if value is not None and not (has_default and value in _OWN_DEFAULT):
                self._by_name[parameter.name] = value

    def __call__(self, subject: Any, values: Mapping[str, Any]) -> Any:
        by_name = {parameter: values[value] for parameter, value in self._by_name.items()}
        try:
            return self._function(subject, **by_name)
        except BaseException as error:  # SystemExit and KeyboardInterrupt, too: nobody else raises them here
            raise self.error(f"raised {type(error).__name__}: {error}", error) from error

    def error(self, fault: str, cause: BaseException | None = None) -> HookError:
        trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
        return HookError(f"{self._where}: {self._name} {fault}", self._name, trace)

    def group(
        self, group: Group, values: Mapping[str, Any], sizes: Sequence[int] | None = None
    ) -> list[ItemDict]:
        """Calls a hook that gives back a group, and checks what it gave back."""
        instance_id = group[0]
        answer = self(group, values)
        if not (isinstance(answer, tuple | list) and len(answer) == 2 and isinstance(answer[1], list)):
            raise self.error(f"gave back {answer!r:.100} instead of (instance_id, list of items)")
        if type(answer[0]) is not type(instance_id) or answer[0] != instance_id:
            raise self.error(f"gave back instance id {answer[0]!r:.100} for {instance_id!r:.100}")
        items: list[ItemDict] = answer[1]
        if sizes is not None and len(items) not in sizes:
            raise self.error(f"gave back {len(items)} items; a group has {values['group_size']}")
        for index, item in enumerate(items):
            if fault := _fault_of(item, instance_id):
                raise self.error(f"gave back items[{index}] {fault}")
            if "raw_reward" in item and item["extra_info"].get("raw_reward") != item["raw_reward"]:
                item["extra_info"] = {**item["extra_info"], "raw_reward": item["raw_reward"]}
        return items


class Hooks:
    """The hooks of one task type. They may change the items that they are given.

    Args:
        module: The generator file that was run.
        task_type: Its task.
        where: The file, for messages.

    Raises:
        ConfigError: A hook cannot be called, or a function's name is nearly that of a hook.
    """

    def __init__(self, module: ModuleType, task_type: str, where: str) -> None:
        _check_names(module, where)
        self._task_type = task_type
        self.overridden = frozenset(name for name in CONVENTIONS if hasattr(module, name))
        """Names of the hooks that are the file's."""
        names = self.overridden | FINISHING - {"transform_group"}
        self._hooks = {
            name: _Hook(name, getattr(module if name in self.overridden else groups, name), where)
            for name in names
        }

    def meta_info(self, read: Mapping[InstanceId, list[ItemDict]], settings: GroupSettings) -> dict[str, Any]:
        """The file's own `meta_info` of a read, from all groups that it took. Raises `HookError`."""
        hook = self._hooks["get_group_data_meta_info"]
        meta = hook(read, self._values(settings, False))
        if not isinstance(meta, dict):
            raise hook.error(f"gave back {meta!r:.100} instead of a dict")
        return meta

    def judge(self, group: Group, settings: GroupSettings, *, timed_out: bool = False) -> Verdict:
        """The verdict of the file's own `is_valid_group`. Raises `HookError`.

        A group is finished, whatever the hook says, once it is valid, whole or timed out. The hook is not
        called with `settings.raw`.
        """
        if settings.raw:
            return groups.is_valid_group(group, settings, timed_out=timed_out)
        hook = self._hooks["is_valid_group"]
        answer = hook(group, self._values(settings, timed_out))
        words = answer if isinstance(answer, tuple | list) and len(answer) == 2 else (answer, False)
        if not all(isinstance(word, bool | numpy.bool_) for word in words):
            raise hook.error(f"gave back {answer!r:.100} instead of True, False or (is_valid, is_finished)")
        valid, finished = map(bool, words)
        return Verdict(valid, finished or valid or timed_out or len(group[1]) >= settings.group_size)

    def finish(self, group: Group, settings: GroupSettings, *, timed_out: bool = False) -> list[ItemDict]:
        """Filters, normalises and pads a valid group, or transforms it if there is a `transform_group`.

        Returns:
            `group_size` items (`transform_group` may give fewer), each with `raw_reward`, at top level and in
            `extra_info`; none if too few passed the filter.

        Raises:
            HookError: A hook raised, or gave back no group, another instance id, a wrong number of items, or
                items that lack what a reader needs.
        """
        hooks, values, size = self._hooks, self._values(settings, timed_out), settings.group_size
        instance_id, items = group
        if transform := hooks.get("transform_group"):
            return transform.group(_with_raw_rewards(group), values, range(size + 1))
        choose, chosen = hooks["filter_item"], []
        for item in items:
            answer = choose(item, values)
            try:
                is_chosen = bool(answer)
            except Exception as error:  # an array has no truth value
                raise choose.error(f"gave back {answer!r:.100}: {error}", error) from error
            if answer is None:
                raise choose.error("gave back None instead of True or False")
            if is_chosen:
                chosen.append(item)
        if len(chosen) < settings.min_valid_items:
            return []
        group = _with_raw_rewards((instance_id, chosen))
        if size > 1 or "normalize_group_data" in self.overridden:  # alone, every reward would become 0
            group = instance_id, hooks["normalize_group_data"].group(group, values)
        return hooks["pad_group_data"].group(group, values, (size,))

    def _values(self, settings: GroupSettings, timed_out: bool) -> dict[str, Any]:
        return {
            "task_type": self._task_type,
            "group_size": settings.group_size,
            "min_valid_group_size": settings.min_timeout_group_size if timed_out else settings.min_group_size,
            "settings": settings,
            "timed_out": timed_out,
            "epsilon": groups.EPSILON,
            "algo": "grpo",
        }


def _check_names(module: ModuleType, where: str) -> None:
    plain = {hook.replace("_", ""): hook for hook in CONVENTIONS}
    for name, value in vars(module).items():
        if name.startswith("_") or name in CONVENTIONS or not callable(value) or isinstance(value, type):
            continue
        near = difflib.get_close_matches(name.replace("_", "").lower(), plain, n=1, cutoff=_NEAR)
        if not near or hasattr(module, hook := plain[near[0]]):
            continue
        if f"_{hook}" not in name and f"{hook}_" not in name:  # default_filter_item, filter_item_by_length
            hint = f"did you mean {hook}? If not, rename it (_{name} will do)"
            raise ConfigError(f"{where}: {name} is no hook, {hint}")


def _with_raw_rewards(group: Group) -> Group:
    """Done before a hook is called, so that items that it copies, drops or reorders keep theirs."""
    return group[0], [groups.keep_raw_reward(item, item["reward"]) for item in group[1]]


def _fault_of(item: Any, instance_id: InstanceId) -> str:
    """The fault of an item that a hook gave back; "" if it has none."""
    if type(item) is not dict:
        return f"that is {item!r:.100}, not a dict"
    if missing := [key for key in _REQUIRED if key not in item]:
        return f"without {', '.join(missing)}"
    if item["instance_id"] != instance_id:
        return f"of instance_id {item['instance_id']!r:.100}, not {instance_id!r:.100}"
    if not isinstance(item["extra_info"], dict):
        return f"whose extra_info is {item['extra_info']!r:.100}, not a dict"
    reward = item["reward"]
    is_number = isinstance(reward, int | float | numpy.number) and not isinstance(reward, bool)
    try:
        good = reward is None or (is_number and math.isfinite(reward))
    except (OverflowError, TypeError):  # a whole number of hundreds of digits; a complex one
        good = False
    return "" if good else f"whose reward is {reward!r:.100}, not a finite number or None"
