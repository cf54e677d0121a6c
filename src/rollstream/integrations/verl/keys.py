"""What becomes of verl's keys in a configuration of rollstream's: an entry point of `rollstream.keys`.

A configuration that was written for verl is taken as it is, as far as that changes no data. Some keys are other names
for settings (`means`), training's have no effect, and a value that asks for something else than what happens here is
an error. keys.yaml has the tables.
"""

from collections.abc import MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_PLACEHOLDERS = ("dummy", "dummy_dtensor", "dummy_hf", "dummy_megatron")
"""Values of `load_format` by which a trainer's servers begin without weights."""

_LOAD_FORMAT = "actor_rollout_ref.rollout.load_format"

_NO_EFFECT = (
    "verl's; nothing here depends on them, launched servers take actor_rollout_ref.rollout.launch.args"
)


@cache
def _tables() -> Any:
    return OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("keys.yaml")))


class VerlKeys:
    """See `rollstream.config.load.ForeignKeys`."""

    def renamed(self, key: str) -> str:
        for theirs, ours in _tables()["means"].items():
            if _is_below(key, theirs):
                return f"{ours}{key.removeprefix(theirs)}"
        return key

    def take(
        self,
        values: MutableMapping[str, Any],
        written: set[str],
        problems: list[str],
        notes: MutableMapping[str, list[str]],
    ) -> None:
        tables = _tables()
        for theirs, ours in tables["means"].items():
            if theirs in values:
                self._rename(theirs, ours, values, written, problems)
        no_effect = [
            f"{parent}.{name}".lstrip(".") for parent, names in tables["no_effect"].items() for name in names
        ]
        for path, value in [*values.items()]:
            rule = next((rule for key, rule in tables["fine_with"].items() if _is_below(path, key)), None)
            parent = next((key for key in no_effect if _is_below(path, key)), None)
            if path == _LOAD_FORMAT and value in _PLACEHOLDERS:
                notes.setdefault("weights are read from the model: auto", []).append(f"{path}={value}")
            elif rule is not None:
                fine, why = rule
                # An interpolation of a config group's names another key, which is looked at by itself.
                is_elsewhere = path not in written and isinstance(value, str) and value.startswith("${")
                if value is None or value in fine or is_elsewhere:
                    notes.setdefault(_NO_EFFECT, []).append(path)
                else:
                    problems.append(f"{path}={value}: {why}")
            elif parent is not None or path.endswith("_target_"):
                notes.setdefault(_NO_EFFECT, []).append(parent or path)
            else:
                continue
            del values[path]

    def _rename(
        self,
        theirs: str,
        ours: str,
        values: MutableMapping[str, Any],
        written: set[str],
        problems: list[str],
    ) -> None:
        """Puts a value under rollstream's name.

        Where a layer has both names, one is often an interpolation of the other. Otherwise what its author wrote
        counts more than what config groups say, and two that the author wrote must be equal.
        """

        def refers(value: Any, key: str) -> bool:
            return value is None or (isinstance(value, str) and "${" in value and key in value)

        value, other = values.pop(theirs), values.get(ours)
        is_written = theirs in written
        if refers(value, ours):
            return
        if refers(other, theirs) or (is_written and ours not in written):
            values[ours] = value
            written |= {ours} if is_written else set()
        elif is_written and value not in (other, False):
            problems.append(f"{theirs} and {ours} are one setting (they are {value!r} and {other!r})")


def _is_below(path: str, key: str) -> bool:
    return f"{path}.".startswith(f"{key}.")


KEYS = VerlKeys()
