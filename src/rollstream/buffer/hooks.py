"""The hooks of a task type: the default ones of `groups`, or a generator file's own where it has them.

Hooks of files written for slime's rollout buffer are called as there. How a hook wants to be called is read
from its signature once, when the file is loaded.
"""

import difflib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy

from rollstream.buffer import groups
from rollstream.buffer.groups import Group, GroupSettings, ItemDict, Verdict
from rollstream.buffer.items import InstanceId
from rollstream.errors import ConfigError, RollstreamError
from rollstream.user_code import run_file

CONVENTIONS: Final[Mapping[str, Sequence[str]]] = {
    "get_group_data_meta_info": ("groups",),
    "is_valid_group": ("group", "min_valid_group_size", "task_type"),
    "filter_item": ("item", "task_type"),
    "normalize_group_data": ("group", "epsilon", "algo"),
    "pad_group_data": ("group", "group_size"),
    "transform_group": ("group", "task_type"),
}
"""The hooks, in the order of their calls, each with slime's order of arguments. `transform_group` stands for
filtering, normalising and padding at once."""

_EVERYWHERE: Final = ("task_type", "group_size", "min_valid_group_size", "settings", "timed_out")
"""What any hook gets that has a parameter of this name."""

_OWN_DEFAULT: Final = ("epsilon", "algo")
"""Where the hook has a default for these, that is better than ours."""

_NEAR: Final = 0.85
"""difflib's ratio from which on a name is a misspelt hook: normalise_group_data, filter_items, isValidGroup.
Less is a name of its own, such as pad_messages."""

_REQUIRED: Final = ("uid", "instance_id", "messages", "reward", "extra_info")
"""Keys that a reader of slime's wire insists on."""


class HookError(RollstreamError):
    """A hook raised, or gave back what cannot be handed out. The group is quarantined.

    Attributes:
        hook: Its name.
        traceback: Python's, as text; the message where the hook raised nothing.
    """

    def __init__(self, message: str, hook: str, trace: str = "") -> None:
        super().__init__(message)
        self.hook = hook
        self.traceback = trace or message


@dataclass(frozen=True, slots=True)
class _Hook:
    """A hook of the user's and how it is called."""

    name: str
    where: str
    function: Callable[..., Any]
    positional: tuple[str, ...]
    by_name: tuple[str, ...]

    def __call__(self, subject: Any, values: Mapping[str, Any]) -> Any:
        try:
            return self.function(
                subject,
                *[values[name] for name in self.positional],
                **{name: values[name] for name in self.by_name},
            )
        except (Exception, SystemExit) as error:  # sys.exit() in a hook must not end the server
            trace = "".join(traceback.format_exception(error))
            raise self.error(f"raised {type(error).__name__}: {error}", trace) from error

    def error(self, fault: str, trace: str = "") -> HookError:
        return HookError(f"{self.where}: {self.name} {fault}", self.name, trace)


class Hooks:
    """The hooks of one task type. Safe to use from several threads as far as the user's hooks are.

    A user's hook may change the items that it is given, so give it items that were loaded for this call.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        *,
        task_type: str = "",
        where: str = "",
    ) -> None:
        """Takes the user's hooks by name; the others are the default ones.

        Raises:
            ConfigError: A hook cannot be called as hooks are; names it and `where` it is.
        """
        self.task_type = task_type
        self._hooks = {name: _hook_of(name, function, where) for name, function in (functions or {}).items()}
        self.overridden = frozenset(self._hooks)
        """Names of the hooks that are the user's."""
        self.is_default_verdict = "is_valid_group" not in self._hooks
        """`groups.judge_rewards` gives the same verdict, without the items."""
        self.is_default_meta_info = "get_group_data_meta_info" not in self._hooks
        """`groups.summarize_rewards` says the same, without the items."""
        self.is_default_finish = not self.overridden & {
            "filter_item",
            "normalize_group_data",
            "pad_group_data",
            "transform_group",
        }
        """`finish` cannot fail and changes nothing but rewards."""

    @classmethod
    def default(cls, task_type: str = "") -> "Hooks":
        """The default hooks."""
        return cls(task_type=task_type)

    @classmethod
    def load(cls, path: str | Path, task_type: str = "") -> "Hooks":
        """The hooks of a Python file; those that it does not have are the default ones.

        Raises:
            ConfigError: The file cannot be run, or one of its hooks cannot be called.
        """
        return cls.of_module(run_file(path, key="hooks"), task_type=task_type, where=str(path))

    @classmethod
    def of_module(cls, module: ModuleType, *, task_type: str, where: str) -> "Hooks":
        """The hooks of a module that was run already.

        Raises:
            ConfigError: A hook cannot be called, or a function's name is nearly that of a hook: it would
                never be called, and nothing would tell.
        """
        _check_names(module, where)
        functions = {name: getattr(module, name) for name in CONVENTIONS if hasattr(module, name)}
        return cls(functions, task_type=task_type, where=where)

    def meta_info(
        self, groups_: Mapping[InstanceId, list[ItemDict]], settings: GroupSettings
    ) -> dict[str, Any]:
        """What a read says of all groups that are there. `finished_groups` is the caller's to add.

        Raises:
            HookError: The hook raised or did not give back a dict.
        """
        if (hook := self._hooks.get("get_group_data_meta_info")) is None:
            return groups.get_group_data_meta_info(groups_)
        told = hook(groups_, self._values(settings))
        if not isinstance(told, dict):
            raise hook.error(f"gave back {_kind(told)} instead of a dict")
        return told

    def judge(self, group: Group, settings: GroupSettings, *, timed_out: bool = False) -> Verdict:
        """Whether to hand a group out, and whether anything more is expected of it.

        A hook may say `is_valid` alone or `(is_valid, is_finished)`. Nothing more is expected of a group that
        is valid, whole or timed out, whatever the hook says. Of a timed out group, the hook is told as
        `min_valid_group_size` what a timed out group must have.

        Raises:
            HookError: The hook raised or said neither.
        """
        if (hook := self._hooks.get("is_valid_group")) is None:
            return groups.is_valid_group(group, settings, timed_out=timed_out)
        said = hook(group, self._values(settings, timed_out=timed_out))
        whole = timed_out or len(group[1]) >= settings.group_size
        if _is_bool(said):
            return Verdict(valid=bool(said), finished=bool(said) or whole)
        if isinstance(said, tuple | list) and len(said) == 2 and _is_bool(said[0]) and _is_bool(said[1]):
            return Verdict(valid=bool(said[0]), finished=bool(said[1]) or bool(said[0]) or whole)
        raise hook.error(f"gave back {_kind(said)} instead of True, False or (is_valid, is_finished)")

    def finish(self, group: Group, settings: GroupSettings, *, timed_out: bool = False) -> list[ItemDict]:
        """Filters, normalises and pads a valid group, or transforms it where there is `transform_group`.

        Every item that comes out has its `raw_reward`, at top level and in `extra_info`.

        Returns:
            `group_size` items (`transform_group` may give fewer); none where too few passed the filter.

        Raises:
            HookError: A hook raised, or gave back something else than a group, of another instance id, with
                too many items (`pad_group_data`: too few, too), or items that lack what a reader needs.
        """
        if self.is_default_finish:
            return groups.finish_group(group, settings)
        instance_id, items = group
        values = self._values(settings, timed_out=timed_out)
        if (transform := self._hooks.get("transform_group")) is not None:
            return self._ran(transform, instance_id, items, values, range(settings.group_size + 1))
        if (choose := self._hooks.get("filter_item")) is not None:
            items = [item for item in items if _chosen(choose, item, values)]
        else:
            items = [item for item in items if groups.filter_item(item)]
        if len(items) < settings.min_valid_items:
            return []
        if (normalize := self._hooks.get("normalize_group_data")) is not None:
            items = self._ran(normalize, instance_id, items, values, None)
        elif settings.group_size > 1:
            items = groups.normalize_group_data((instance_id, items))[1]
        else:
            items = [groups.keep_raw_reward(item, item["reward"]) for item in items]
        if (pad := self._hooks.get("pad_group_data")) is not None:
            return self._ran(pad, instance_id, items, values, (settings.group_size,), raw=False)
        return groups.pad_group_data((instance_id, items), settings.group_size)[1]

    def _ran(
        self,
        hook: _Hook,
        instance_id: InstanceId,
        items: list[ItemDict],
        values: Mapping[str, Any],
        sizes: Sequence[int] | None,
        raw: bool = True,
    ) -> list[ItemDict]:
        """Runs a hook from group to group and checks what it gives back."""
        if raw:  # so that items that the hook copies, drops or reorders still know theirs
            items = [groups.keep_raw_reward(item, item["reward"]) for item in items]
        given = hook((instance_id, items), values)
        if not (isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], list)):
            raise hook.error(f"gave back {_kind(given)} instead of (instance_id, list of items)")
        if type(given[0]) is not type(instance_id) or given[0] != instance_id:
            raise hook.error(f"gave back instance id {given[0]!r:.100} for {instance_id!r:.100}")
        result: list[ItemDict] = given[1]
        if sizes is not None and len(result) not in sizes:
            raise hook.error(f"gave back {len(result)} items; a group has {values['group_size']}")
        for index, item in enumerate(result):
            if fault := _fault_of(item, instance_id):
                raise hook.error(f"gave back items[{index}] {fault}")
            if "raw_reward" in item and item["extra_info"].get("raw_reward") != item["raw_reward"]:
                item["extra_info"] = {**item["extra_info"], "raw_reward": item["raw_reward"]}
        return result

    def _values(self, settings: GroupSettings, *, timed_out: bool = False) -> dict[str, Any]:
        return {
            "task_type": self.task_type,
            "group_size": settings.group_size,
            "min_valid_group_size": (
                settings.min_timeout_group_size if timed_out else settings.min_group_size
            ),
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
        if f"_{hook}" in name or f"{hook}_" in name:  # default_filter_item, filter_item_by_length
            continue
        raise ConfigError(
            f"{where}: {name} is no hook, did you mean {hook}? If not, rename it (_{name} will do)"
        )


def _hook_of(name: str, function: Any, where: str) -> _Hook:
    """Reads from a hook's signature what it wants to be given.

    A parameter gets what its name says; one of an unknown name, what stands in its place in slime's call.
    """
    convention = CONVENTIONS[name]
    asks = f"{where}: {name} must be a function of ({', '.join(convention)})"
    if not callable(function):
        raise ConfigError(f"{asks}, is {_kind(function)}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{asks}, is async")
    positional: list[str] = []
    by_name: list[str] = []
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some of Python's own functions
        raise ConfigError(f"{asks}; {_kind(function)} does not say what it takes: wrap it in a def") from None
    places = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    rest = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    if not places and not rest:
        raise ConfigError(f"{asks}; it takes no positional argument")
    skipped = False  # behind a parameter that keeps its default, others can be given by name only
    for index, parameter in enumerate(places[1:], start=1):
        has_default = parameter.default is not inspect.Parameter.empty
        wanted = _wanted(parameter.name, convention, index)
        if wanted is None or (has_default and wanted in _OWN_DEFAULT):
            if not has_default:
                raise ConfigError(f"{asks}; nothing is known to give to its parameter {parameter.name}")
            skipped = True
        elif not skipped:
            positional.append(wanted)
        elif parameter.name == wanted and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY:
            by_name.append(wanted)
    if rest and not skipped:
        positional += convention[max(len(places), 1) :]
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            has_default = parameter.default is not inspect.Parameter.empty
            if _wanted(parameter.name, convention) and not (has_default and parameter.name in _OWN_DEFAULT):
                by_name.append(parameter.name)
            elif not has_default:
                raise ConfigError(f"{asks}; nothing is known to give to its parameter {parameter.name}")
    return _Hook(name, where, function, tuple(positional), tuple(by_name))


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _wanted(name: str, convention: Sequence[str], index: int = sys.maxsize) -> str | None:
    if name in _EVERYWHERE or name in convention[1:]:
        return name
    return convention[index] if index < len(convention) else None


def _chosen(hook: _Hook, item: ItemDict, values: Mapping[str, Any]) -> bool:
    said = hook(item, values)
    if said is None:
        raise hook.error("gave back None instead of True or False")
    try:
        return bool(said)
    except Exception as error:  # an array has no truth of its own
        trace = "".join(traceback.format_exception(error))
        fault = f"gave back {_kind(said)} instead of True or False: {error}"
        raise hook.error(fault, trace) from error


def _fault_of(item: Any, instance_id: InstanceId) -> str:
    """What is wrong with an item that a hook gave back; "" if nothing."""
    if type(item) is not dict:
        return f"that is {_kind(item)}, not a dict"
    if missing := [key for key in _REQUIRED if key not in item]:
        return f"without {', '.join(missing)}"
    if item["instance_id"] != instance_id:
        return f"of instance id {item['instance_id']!r:.100}, not {instance_id!r:.100}"
    if not isinstance(item["extra_info"], dict):
        return f"whose extra_info is {_kind(item['extra_info'])}, not a dict"
    reward = item["reward"]
    if reward is None:
        return ""
    if isinstance(reward, bool) or not isinstance(reward, int | float | numpy.number):
        return f"whose reward is {_kind(reward)}, not a number"
    try:
        finite = math.isfinite(reward)
    except (OverflowError, TypeError):  # a whole number of hundreds of digits; a complex one
        return "whose reward is no number that JSON has a form for"
    return "" if finite else f"whose reward is {reward}"


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool | numpy.bool_)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
