"""Training examples chosen by reward: SFT rows (`sft`) and preference pairs (`preference`), as JSON Lines.

A prompt row's rollouts are read together, one prompt row after another, so memory is that of the largest group.
Only final trajectories count: a snapshot is a part of its rollout's conversation.
"""

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import orjson

from rollstream.errors import ConfigError
from rollstream.store.export.dataproto import shown_prompt
from rollstream.store.export.files import read_rows, replacing

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_KEY = ("index", "repeat", "prompt_key", "data_source", "reward")
"""Columns that say of which rollout an example was made."""

_UNKNOWN = (
    "where the prompt of their conversations ends is not known (extra['prompt_messages'], docs/export.md)"
)
_OTHER = "the prompts of the two differ, as where a program shows a path or the time"
_ALIKE = "chosen and rejected are the same messages, with different rewards: look at the reward"
_UNLIKE = "the prompts of the two showed different tools"


@dataclass(frozen=True, slots=True)
class SftOptions:
    """Which rollouts become examples, and in which form."""

    best: int | None = None
    """So many of a prompt row, those with the highest rewards; None: all of them."""
    min_reward: float | None = None
    """Only those with at least this reward."""
    tokens: bool = False
    """The token ids as they were sampled, with a mask, instead of messages."""


@dataclass(frozen=True, slots=True)
class PreferenceOptions:
    """Which two rollouts of a prompt row become a pair."""

    pairs: Literal["best", "all"] = "best"
    """`best`: the best with the worst, one pair of a prompt row. `all`: every two whose rewards differ."""
    min_margin: float = 0.0
    """Rewards have to differ by more than nothing, and by at least this."""


def prompt_groups(artifact: Path, cancelled: Callable[[], bool] = lambda: False) -> Iterator[list[Row]]:
    """The final trajectories of each prompt row, JSON decoded, by repeat. Raises as `read_rows`."""
    for _, group in itertools.groupby(read_rows(artifact, cancelled), key=lambda row: row["index"]):
        yield [row for row in group if not row["is_snapshot"]]


def export_sft(
    artifact: Path,
    target: Path,
    options: SftOptions = SftOptions(),
    cancelled: Callable[[], bool] = lambda: False,
    *,
    tools: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Writes one example a line, each only once; returns how many. An older `target` stays after an error.

    `tools`: schemas by digest, as the run's manifest has them.

    Raises:
        ConfigError: no rollout is good enough, or there are no token ids to write.
        DamageError: the artifact is damaged.
        StorageError: `target` cannot be written.
        MergeCancelledError: `cancelled` said so.
    """
    if options.best is not None and options.best < 1:
        raise ConfigError(f"--best must be at least 1 (it is {options.best})")
    missing = 0

    def examples() -> Iterator[tuple[Any, Row]]:
        nonlocal missing
        for group in prompt_groups(artifact, cancelled):
            for row in _chosen(group, options):
                key = {name: row[name] for name in _KEY}
                if options.tokens:
                    if not row["prompt_ids"]:
                        raise ConfigError(
                            f"{artifact} has trajectories without token ids: leave --tokens away"
                        )
                    mask = [0] * len(row["prompt_ids"]) + row["response_mask"]
                    ids = row["prompt_ids"] + row["response_ids"]
                    yield (ids, mask), {"input_ids": ids, "assistant_masks": mask, **key}
                    continue
                shown = _schemas(row, tools)
                missing += not shown and _has_tools(row)
                yield (row["messages"], shown), {"messages": row["messages"], **shown, **key}

    wanted = "no rollout has a reward" if options.min_reward is None else "no rollout's reward is high enough"
    lines = _write(artifact, target, examples(), lambda: f"{wanted}: nothing would be left")
    _warn_of_missing(missing)
    return lines


def export_preference(
    artifact: Path,
    target: Path,
    options: PreferenceOptions = PreferenceOptions(),
    cancelled: Callable[[], bool] = lambda: False,
    *,
    tools: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Writes one pair a line, each only once; returns how many. Arguments and errors as of `export_sft`."""
    if not options.min_margin >= 0:
        raise ConfigError(f"--min-margin must be at least 0 (it is {options.min_margin})")
    left_out, missing = Counter[str](), 0

    def examples() -> Iterator[tuple[Any, Row]]:
        nonlocal missing
        for group in prompt_groups(artifact, cancelled):
            for better, worse in _pairs(_usable(group), options):
                prompt, shown = shown_prompt(better), _schemas(better, tools)
                start = len(prompt or ())
                chosen, rejected = better["messages"][start:], worse["messages"][start:]
                if prompt != shown_prompt(worse):
                    left_out[_OTHER] += 1
                elif prompt is None:
                    left_out[_UNKNOWN] += 1
                elif chosen == rejected:
                    left_out[_ALIKE] += 1
                elif shown != _schemas(worse, tools):
                    left_out[_UNLIKE] += 1
                else:
                    missing += not shown and (_has_tools(better) or _has_tools(worse))
                    yield (
                        (prompt, chosen, rejected, shown),
                        {
                            "prompt": prompt,
                            "chosen": chosen,
                            "rejected": rejected,
                            **shown,
                            "score_chosen": better["reward"],
                            "score_rejected": worse["reward"],
                            "margin": better["reward"] - worse["reward"],
                            **{name: better[name] for name in ("index", "prompt_key", "data_source")},
                            "repeat_chosen": better["repeat"],
                            "repeat_rejected": worse["repeat"],
                        },
                    )

    def reasons() -> list[str]:
        return [f"{count} pairs are left out: {reason}" for reason, count in left_out.items()]

    nothing = "no two rollouts of a prompt row have rewards that differ so much"
    lines = _write(
        artifact, target, examples(), lambda: f"there are no pairs: {'; '.join(reasons()) or nothing}"
    )
    for line in reasons():
        logger.warning("%s", line)
    _warn_of_missing(missing)
    return lines


def _schemas(row: Row, by_digest: Mapping[str, Any]) -> Row:
    """The column `tools`, which TRL's `SFTTrainer` and `DPOTrainer` hand to the chat template.

    As JSON text: as a list, Arrow would give each schema the keys of all. Nothing where the prompt shows no tools, or
    where the run does not have their schemas.
    """
    marked = row["extra"].get("shown_tools")
    marks = marked if isinstance(marked, list) else []
    shown = [mark if isinstance(mark, dict) else by_digest.get(str(mark)) for mark in marks]
    return {"tools": orjson.dumps(shown).decode()} if shown and None not in shown else {}


def _has_tools(row: Row) -> bool:
    return bool(row["extra"].get("shown_tools")) or any(
        message.get("tool_calls") for message in row["messages"]
    )


def _warn_of_missing(examples: int) -> None:
    if examples:
        logger.warning(
            "%d examples have tools and no schemas of them: the run does not say which ones their prompts "
            "showed (docs/export.md)",
            examples,
        )


def _usable(group: Iterable[Row]) -> list[Row]:
    """The best first; those that were scored and not broken off."""
    usable = (row for row in group if row["reward"] is not None and row["finish_reason"] != "aborted")
    return sorted(
        (row for row in usable if row["reward"] == row["reward"]),
        key=lambda row: (-row["reward"], row["repeat"]),
    )


def _chosen(group: Sequence[Row], options: SftOptions) -> list[Row]:
    least = options.min_reward
    rows = [row for row in _usable(group) if least is None or row["reward"] >= least]
    if options.best is None:
        return sorted(rows, key=lambda row: int(row["repeat"]))
    different: dict[bytes, Row] = {}  # the same answer twice is one of the best
    for row in rows:
        different.setdefault(_digest(row["messages"]), row)
    return list(different.values())[: options.best]


def _pairs(rows: Sequence[Row], options: PreferenceOptions) -> Iterator[tuple[Row, Row]]:
    best = [(rows[0], rows[-1])] if rows else []
    for better, worse in itertools.combinations(rows, 2) if options.pairs == "all" else best:
        if (margin := better["reward"] - worse["reward"]) > 0 and margin >= options.min_margin:
            yield better, worse


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def _write(
    artifact: Path, target: Path, examples: Iterable[tuple[Any, Row]], nothing: Callable[[], str]
) -> int:
    """Writes lines whose content, the first of each pair, was not written yet: 16 bytes of memory a line.

    `nothing` says why there are none.
    """
    seen: set[bytes] = set()
    with replacing(target) as temporary, temporary.open("wb") as file:
        for content, line in examples:
            if (digest := _digest(content)) not in seen:
                seen.add(digest)
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        if not seen:
            raise ConfigError(f"{artifact}: {nothing()}")
    return len(seen)
