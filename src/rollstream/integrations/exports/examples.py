"""Training examples chosen by reward: SFT rows (`sft`) and preference pairs (`preference`), as JSON Lines.

A prompt row's rollouts are read together, one prompt row after another, so memory is that of the largest group.
Only final trajectories count: a snapshot is a part of its rollout's conversation.
"""

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import orjson

from rollstream.errors import ConfigError
from rollstream.store.export.dataproto import PROMPT_MESSAGES, prompt_messages
from rollstream.store.export.files import read_rows, replacing
from rollstream.trajectory import sampled_stretches

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_SAID = ("index", "repeat", "prompt_key", "data_source", "reward")
"""Columns that say of which rollout an example was made."""


@dataclass(frozen=True, slots=True)
class SftOptions:
    """Which rollouts become examples, and in which form."""

    best: int | None = None
    """So many of a prompt row, those with the highest rewards; None: all of them."""
    min_reward: float | None = None
    """Only those with at least this reward."""
    tokens: bool = False
    """The token ids as they were sampled, with a mask, instead of messages."""

    def check(self) -> None:
        """Raises `ConfigError`."""
        if self.best is not None and self.best < 1:
            raise ConfigError(f"--best must be at least 1 (it is {self.best})")


@dataclass(frozen=True, slots=True)
class PreferenceOptions:
    """Which two rollouts of a prompt row become a pair."""

    pairs: Literal["best", "all"] = "best"
    """`best`: the best with the worst, one pair of a prompt row. `all`: every two whose rewards differ."""
    min_margin: float = 0.0
    """Rewards have to differ by more than nothing, and by at least this."""

    def check(self) -> None:
        """Raises `ConfigError`."""
        if not self.min_margin >= 0:
            raise ConfigError(f"--min-margin must be at least 0 (it is {self.min_margin})")


def prompt_groups(artifact: Path, cancelled: Callable[[], bool] = lambda: False) -> Iterator[list[Row]]:
    """The final trajectories of each prompt row, JSON decoded, by repeat. Raises as `read_rows`."""
    for _, group in itertools.groupby(read_rows(artifact, cancelled), key=lambda row: row["index"]):
        yield [row for row in group if not row["is_snapshot"]]


def shown_prompt(row: Row) -> list[Row] | None:
    """The messages that a trajectory's prompt shows; None where that cannot be known. See `prompt_messages`."""
    calls = int(row["metrics"]["engine_calls"])
    return prompt_messages(
        row["messages"],
        stated=row["extra"].get(PROMPT_MESSAGES),
        engine_calls=calls,
        # Without a tokenizer there is no mask: then the calls alone tell.
        sampled_stretches=len(sampled_stretches(row["response_mask"])) if row["prompt_ids"] else calls,
        aborted=row["finish_reason"] == "aborted",
    )


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
    options.check()
    schemas = _Schemas(tools)

    def examples() -> Iterator[tuple[Any, Row]]:
        for group in prompt_groups(artifact, cancelled):
            for row in _chosen(group, options):
                if not options.tokens:
                    shown = schemas.column(row)
                    yield (row["messages"], shown), {"messages": row["messages"], **shown, **_said(row)}
                    continue
                if not row["prompt_ids"]:
                    raise ConfigError(f"{artifact} has trajectories without token ids: leave --tokens away")
                mask = [0] * len(row["prompt_ids"]) + row["response_mask"]
                ids = row["prompt_ids"] + row["response_ids"]
                yield (ids, mask), {"input_ids": ids, "assistant_masks": mask, **_said(row)}

    wanted = "no rollout has a reward" if options.min_reward is None else "no rollout's reward is high enough"
    lines = _write(artifact, target, examples(), lambda: f"{wanted}: nothing would be left")
    schemas.warn()
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
    options.check()
    schemas = _Schemas(tools)
    unknown = other = alike = unlike = 0

    def examples() -> Iterator[tuple[Any, Row]]:
        nonlocal unknown, other, alike, unlike
        for group in prompt_groups(artifact, cancelled):
            for better, worse in _pairs(_usable(group), options):
                prompt = shown_prompt(better)
                if prompt != shown_prompt(worse):
                    other += 1
                    continue
                if prompt is None:
                    unknown += 1
                    continue
                chosen, rejected = (row["messages"][len(prompt) :] for row in (better, worse))
                if chosen == rejected:
                    alike += 1
                    continue
                if schemas.of(better) != schemas.of(worse):
                    unlike += 1
                    continue
                shown = schemas.column(better, worse)
                pair = {
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
                }
                yield (prompt, chosen, rejected, shown), pair

    def left_out() -> list[str]:
        reasons = {
            "where the prompt of their conversations ends is not known (extra['prompt_messages'], "
            "docs/export.md)": unknown,
            "the prompts of the two differ, as where a program shows a path or the time": other,
            "chosen and rejected are the same messages, with different rewards: look at the reward": alike,
            "the prompts of the two showed different tools": unlike,
        }
        return [f"{count} pairs are left out: {reason}" for reason, count in reasons.items() if count]

    def nothing() -> str:
        why = "; ".join(left_out())
        return (
            f"there are no pairs: {why or 'no two rollouts of a prompt row have rewards that differ so much'}"
        )

    lines = _write(artifact, target, examples(), nothing)
    for line in left_out():
        logger.warning("%s", line)
    schemas.warn()
    return lines


class _Schemas:
    """The column `tools`: what TRL's `SFTTrainer` and `DPOTrainer` hand to the chat template."""

    def __init__(self, by_digest: Mapping[str, Any]) -> None:
        self._by_digest = by_digest
        self.missing = 0
        """Examples of tools whose schemas are not known."""

    def of(self, row: Row) -> Row:
        """The column as JSON text: as a list, Arrow would give each schema the keys of all.

        Nothing where the prompt shows no tools, or where the run does not have their schemas.
        """
        marked = row["extra"].get("shown_tools")
        shown = [
            one if isinstance(one, dict) else self._by_digest.get(str(one))
            for one in (marked if isinstance(marked, list) else [])
        ]
        return {"tools": orjson.dumps(shown).decode()} if shown and None not in shown else {}

    def column(self, *rows: Row) -> Row:
        """The same, of rows of one example; counts what is missing."""
        found = self.of(rows[0])
        if not found and any(map(_has_tools, rows)):
            self.missing += 1
        return found

    def warn(self) -> None:
        """Says what is missing."""
        if self.missing:
            logger.warning(
                "%d examples have tools and no schemas of them: the run does not say which ones their prompts "
                "showed (docs/export.md)",
                self.missing,
            )


def _has_tools(row: Row) -> bool:
    return bool(row["extra"].get("shown_tools")) or any(one.get("tool_calls") for one in row["messages"])


def _usable(group: Iterable[Row]) -> list[Row]:
    """Those that were scored and not broken off."""
    return [
        row
        for row in group
        if row["reward"] is not None and row["reward"] == row["reward"] and row["finish_reason"] != "aborted"
    ]


def _chosen(group: Sequence[Row], options: SftOptions) -> list[Row]:
    least = options.min_reward
    rows = [row for row in _usable(group) if least is None or row["reward"] >= least]
    best = sorted(rows, key=lambda row: (-row["reward"], row["repeat"]))
    if options.best is None:
        return rows
    # The same answer twice is one of the best.
    found: dict[bytes, Row] = {}
    for row in best:
        found.setdefault(_digest(row["messages"]), row)
    return list(found.values())[: options.best]


def _pairs(rows: Sequence[Row], options: PreferenceOptions) -> Iterator[tuple[Row, Row]]:
    ordered = sorted(rows, key=lambda row: (-row["reward"], row["repeat"]))
    every = itertools.combinations(ordered, 2)
    for better, worse in every if options.pairs == "all" else [(ordered[0], ordered[-1])] if ordered else []:
        if (margin := better["reward"] - worse["reward"]) > 0 and margin >= options.min_margin:
            yield better, worse


def _said(row: Row) -> Row:
    return {name: row[name] for name in _SAID}


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
