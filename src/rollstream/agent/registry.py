"""Agent loops by name: built-in, registered by code, or listed in a YAML file."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.errors import ConfigError, unknown_name
from rollstream.user_code import import_name, read_yaml, source_digest

_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"

_LoopT = TypeVar("_LoopT", bound=type[AgentLoop])
_registered: dict[str, type[AgentLoop]] = {}


def register(name: str) -> Callable[[_LoopT], _LoopT]:
    """Class decorator: makes an agent loop known under a name, for every run of this process.

    A name that is registered again has the later class.
    """

    def decorate(loop: _LoopT) -> _LoopT:
        _registered[name] = loop
        return loop

    return decorate


@dataclass(frozen=True, slots=True)
class LoopEntry:
    """An agent loop and the options it is made with."""

    loop: type[AgentLoop]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Changes when the loop's code or options do; part of a run's identity."""
        module = self.loop.__module__
        own = module.startswith("rollstream.agent.")
        form = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
        deciding = dict(self.loop.deciding_options(self.options))
        scoring = self.loop.snapshot_scoring  # of the class: for who scores a run anew
        if isinstance(scoring, str) and scoring != AgentLoop.snapshot_scoring:
            deciding = {"snapshot_scoring": scoring, **deciding}
        options = orjson.dumps(deciding, option=form, default=repr).decode()
        return " ".join([module if own else source_digest(self.loop), self.loop.__qualname__, options])


class AgentLoops:
    """The agent loops of one worker.

    What a loop class builds once per worker (`AgentLoop.build_shared`) is kept here.
    """

    def __init__(self, entries: Mapping[str, LoopEntry] | None = None) -> None:
        """`entries`: loops that are known to this run only; they come before registered ones, which come
        before those that rollstream has itself.
        """
        self._entries = dict(entries or {})
        self._shared: dict[str, Any] = {}

    def entry(self, name: str) -> LoopEntry:
        """The loop of a name. Raises `ConfigError` with the nearest name."""
        if (own := self._entries.get(name)) is not None:
            return own
        loops = {**_built_in(), **_registered}
        if name not in loops:
            raise unknown_name("agent loop", name, {**loops, **self._entries})
        return LoopEntry(loops[name])

    def check_options(self, name: str) -> None:
        """Raises `ConfigError` for options that the loop does not take, as far as that shows without an engine."""
        entry = self.entry(name)
        try:
            entry.loop(None, request_id="check", shared=None, **entry.options)  # type: ignore[arg-type]
        except (ConfigError, TypeError) as error:
            raise _cannot_be_made(name, entry, error) from error
        except Exception:
            return  # it needs more than its options: `check` tells

    def check(self, names: Iterable[str], resources: AgentResources) -> None:
        """Makes one loop of each name. Raises `ConfigError`, at start, if one cannot be made; names it."""
        for name in names:
            try:
                self.create(name, resources, request_id="check")
            except Exception as error:
                raise _cannot_be_made(name, self.entry(name), error) from error

    def create(self, name: str, resources: AgentResources, *, request_id: str) -> AgentLoop:
        """A loop for one attempt at a rollout. `resources` are the same at every call."""
        entry = self.entry(name)
        if name not in self._shared:
            shared = entry.loop.build_shared(resources, **entry.options)
            if inspect.iscoroutine(shared):
                shared.close()
                raise ConfigError("build_shared must not be async")
            self._shared[name] = shared
        return entry.loop(resources, request_id=request_id, shared=self._shared[name], **entry.options)


def _cannot_be_made(name: str, entry: LoopEntry, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return ConfigError(f"agent loop {name!r}: {error}")
    return ConfigError(
        f"agent loop {name!r} cannot be made ({type(error).__name__}: {error}); its class is "
        f"{entry.loop.__qualname__}, its options are {dict(entry.options)}"
    )


def load_agent_loops(path: str | None) -> dict[str, LoopEntry]:
    """Reads `agent_loop_config_path`: a YAML list of `{name, _target_, ...}`, as verl has it.

    `_target_` is `package.module.Class` or `path/to/file.py:Class` (beside the YAML file, or relative to
    where the run is started); what else an entry holds is handed to the class as keywords.

    Raises:
        ConfigError: no such file, not such a list, a class that cannot be imported or is no agent loop.
    """
    if path is None:
        return {}
    file = Path(path).expanduser()
    try:
        content = msgspec.convert(read_yaml(file, key=_KEY), list[dict[str, Any]])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_KEY}: {file}: {error}") from error
    entries: dict[str, LoopEntry] = {}
    for at, options in enumerate(content):
        where = f"{_KEY}: {file}, entry {at}"
        name, target = options.pop("name", None), options.pop("_target_", None)
        if not isinstance(name, str) or not isinstance(target, str):
            raise ConfigError(f"{where}: needs `name` and `_target_`, both text")
        loop = import_name(target, key=where, beside=file)
        if not (isinstance(loop, type) and issubclass(loop, AgentLoop)):
            is_verls = any(base.__module__.startswith("verl.") for base in getattr(loop, "__mro__", ()))
            hint = "; loops of verl's are run by generation.executor=verl" if is_verls else ""
            raise ConfigError(f"{where}: {target} is no subclass of rollstream.agent.base.AgentLoop{hint}")
        if name in entries:
            raise ConfigError(f"{where}: the name {name!r} is there twice")
        entries[name] = LoopEntry(loop, options)
    if not entries:
        raise ConfigError(f"{_KEY}: {file} has no entry")
    return entries


@cache
def _built_in() -> dict[str, type[AgentLoop]]:
    from rollstream.agent.chat_agent import ChatAgent
    from rollstream.agent.context import ContextAgent
    from rollstream.agent.single_turn import SingleTurnAgent
    from rollstream.agent.tool_agent import ToolAgent

    return {
        "single_turn_agent": SingleTurnAgent,
        "tool_agent": ToolAgent,
        "context_agent": ContextAgent,
        "chat_agent": ChatAgent,
    }
