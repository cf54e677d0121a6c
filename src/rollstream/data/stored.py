"""Prompt rows that are stored conversations up to a turn: `data.train_files=run:DIR?at=turn:3&where=reward=0`.

    prompt ids | answer | result | answer | result | answer        a stored trajectory
    <------------- at=turn:2 ------------->|                       the prompt: the model answers next
    <---------------------- at=end ------------------------->      goes on with an answer that was cut off, or, with
                                                                   ask=TEXT, shows the model a user's message

A row has the columns of the row that the rollout was of, the messages up to there, and a column `continues`: run, key
and turn, which stay with the new trajectories, and `prompt`, with the token ids. See `PromptRow.stored_prompt`.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa

from rollstream.chat.tool_schema import schema_digest
from rollstream.config.settings import DataSettings
from rollstream.data.sources import JsonLines
from rollstream.data.values import BadRow, Row
from rollstream.errors import ConfigError, DataError
from rollstream.store.columns import Array, RunColumns
from rollstream.store.filter import Filter, FilterError
from rollstream.store.run import Run
from rollstream.trajectory import CALL_TIMES, CONTINUES, OWN_REWARD, STREAMS, Message, sampled_stretches

logger = logging.getLogger(__name__)

STORED_RUN = "run:"
"""How a reference begins."""
_FORM = f"{STORED_RUN}DIR?at=turn:3, or at=end; then, if wanted, &where=FILTER, &ask=TEXT, &until=UNIX_TIME"
_READ_TOGETHER = 512
"""Trajectories in memory at once."""
_COLUMNS = [
    *("index", "repeat", "trajectory", "data_source", "ground_truth", "extra", "messages", "num_turns"),
    *("finish_reason", "prompt_ids", "response_ids", "response_mask"),
]
_LOOPS_OWN = (
    *("tool_counts", "tool_rewards", "tool_metrics", "tool_scores", "turn_scores", "interaction_score"),
    *("shown_tools", "training_store", "teacher_error", STREAMS, OWN_REWARD, CONTINUES, CALL_TIMES),
)
"""Keys of a trajectory's `extra` that its prompt row did not have."""


@dataclass(frozen=True, slots=True)
class StoredPrompts:
    """A reference to stored conversations, read."""

    root: Path
    turn: int | None
    """Answers that are kept; None: all."""
    where: str = ""
    ask: str | None = None
    until: float | None = None
    """Rollouts that were finished later are left out. Unix time."""

    @classmethod
    def read(cls, text: str) -> "StoredPrompts":
        """Reads `run:DIR?…`. Raises `ConfigError`."""
        place, _, query = text.removeprefix(STORED_RUN).partition("?")
        given = dict(part.partition("=")[::2] for part in query.split("&"))
        at, turn = given.pop("at", ""), None
        more = given.keys() - {"where", "ask", "until"}
        if not place or more or (at != "end" and not at.removeprefix("turn:").isdecimal()):
            raise ConfigError(f"data.train_files: {text}: want {_FORM}")
        if at != "end":
            turn = int(at.removeprefix("turn:"))
            if "ask" in given:
                raise ConfigError(
                    f"data.train_files: {text}: ask=… follows the last answer, so it goes with at=end"
                )
        try:
            until = float(given["until"]) if "until" in given else None
        except ValueError:
            raise ConfigError(f"data.train_files: {text}: until={given['until']} is no time") from None
        return cls(Path(place).expanduser(), turn, given.get("where", ""), given.get("ask"), until)


def pinned(text: str, before: Sequence[str]) -> str:
    """A reference from any folder, and to what is finished by now: it means the same rows when the run has grown.

    Args:
        text: what `data.train_files` names; other files stay as they are.
        before: pinned at an earlier start: the same reference is pinned as it was then.

    Raises:
        ConfigError: it cannot be read.
        RunDirectoryError: there is no run.
    """
    if not text.startswith(STORED_RUN):
        return text
    asked = StoredPrompts.read(text)
    text = f"{STORED_RUN}{asked.root.absolute()}?{text.partition('?')[2]}"
    if asked.until is not None:
        return text
    known = [one for one in before if one.startswith(f"{text}&until=")]
    if known:
        return known[0]
    columns = _columns(asked.root)
    return f"{text}&until={max(columns['finished_at'].tolist(), default=0.0)!r}"


def open_stored(text: str, data: DataSettings) -> JsonLines:
    """The rows of a reference, in a temporary file without a name.

    Raises:
        ConfigError: it cannot be read.
        RunDirectoryError: there is no run.
        DataError: no trajectory is there that can be continued; says why.
    """
    asked = StoredPrompts.read(text)
    run, columns = Run.open(asked.root), _columns(asked.root)
    try:
        passing = Filter(asked.where, columns).rows(columns)
    except FilterError as error:
        raise ConfigError(f"{text}: where, character {error.position}: {error}") from error
    passing &= ~columns["is_snapshot"]
    if asked.until is not None:
        passing &= columns["finished_at"] <= asked.until
    order, _ = columns.groups()
    chosen = order[passing[order]]
    left_out, spool, written = Counter[str](), tempfile.TemporaryFile(), 0  # noqa: SIM115  JsonLines keeps it open
    for stored in _stored_rows(columns, chosen):
        try:
            row = _prompt_row(stored, asked, run, data)
        except BadRow as error:
            left_out[str(error)] += 1
            continue
        spool.write(orjson.dumps(row) + b"\n")
        written += 1
    why = "; ".join(f"{count}: {reason}" for reason, count in left_out.most_common())
    for line in columns.damage:
        logger.warning("%s: damaged: %s", asked.root, line)
    if not written:
        raise DataError(f"{text}: none of {len(chosen)} trajectories can be continued{why and f' ({why})'}")
    if left_out:
        logger.warning(
            "%s: %d of %d trajectories are left out (%s)", text, left_out.total(), len(chosen), why
        )
    spool.seek(0)
    rows = JsonLines(spool, Path(text))
    rows.files = None  # nobody else can read them
    return rows


def _columns(root: Path) -> RunColumns:
    columns = RunColumns([Run.open(root)])
    columns.refresh()
    return columns


def _stored_rows(columns: RunColumns, chosen: Array) -> Iterator[Row]:
    """Some trajectories, in this order, whichever files they are in."""
    for start in range(0, len(chosen), _READ_TOGETHER):
        numbers = chosen[start : start + _READ_TOGETHER]
        found = dict[int, Row]()
        for places, table in columns.read(numbers, _COLUMNS):
            there = np.flatnonzero(places >= 0)
            rows = table.select(_COLUMNS).take(pa.array(there.tolist(), pa.int64())).to_pylist()
            found |= zip(places[there].tolist(), rows, strict=True)
        yield from (found[number] for number in numbers.tolist() if number in found)


def _prompt_row(stored: Row, asked: StoredPrompts, run: Run, data: DataSettings) -> Row:
    """The row that a stored trajectory is continued by. Raises `BadRow`: it cannot be."""
    extra, messages = orjson.loads(stored["extra"]), orjson.loads(stored["messages"])
    _check(stored, extra, messages)
    ids, stretches = stored["prompt_ids"] + stored["response_ids"], sampled_stretches(stored["response_mask"])
    begun, answers = (
        len(stored["prompt_ids"]),
        [at for at, one in enumerate(messages) if one["role"] == "assistant"],
    )
    if len(answers) < len(stretches) or stored["num_turns"] not in (0, *_turns(len(stretches))):
        raise BadRow("its answers cannot be told apart")
    known, opened = extra.get(CONTINUES), 0
    # The first answer may have begun in the prompt: what is stored goes on with an answer that was cut off.
    before = (known.get("opened") or 0) if isinstance(known, dict) else 0
    last = stretches[-1][1] - stretches[-1][0] + (before if len(stretches) == 1 else 0) if stretches else 0
    if asked.turn is not None:
        if asked.turn >= len(stretches):
            raise BadRow(f"turns count from 0, and it has {len(stretches)}")
        ids, opened = ids[: begun + stretches[asked.turn][0]], before if asked.turn == 0 else 0
        messages = messages[: answers[asked.turn - len(stretches)]]
    elif not stretches or stretches[-1][1] < len(stored["response_ids"]) or messages[-1].get("tool_calls"):
        raise BadRow("its end is no answer in words")
    elif asked.ask is not None:
        messages = [*messages, {"role": "user", "content": asked.ask}]
    elif stored["finish_reason"] in ("length", "aborted"):
        opened, messages = last, messages[:-1]
    else:
        raise BadRow("its last answer was not cut off, and nothing is asked after it (ask=TEXT)")
    tools = [one if isinstance(one, str) else schema_digest(one) for one in extra.get("shown_tools", ())]
    identity = run.manifest.identity
    row = {name: value for name, value in extra.items() if name not in _LOOPS_OWN}
    row |= {data.prompt_key: messages, "data_source": stored["data_source"]}
    truth, _, key = (data.ground_truth_key or "ground_truth").partition(".")
    value = orjson.loads(stored["ground_truth"])
    row[truth] = {**(row.get(truth) or {}), key: value} if key else value
    # Of `prompt`, `opened` counts the ids at its end that begin an answer; `asked_after` those of the answer that the
    # last message follows, which the prompt shows behind the ids.
    row[CONTINUES] = {
        "run": run.manifest.run_id,
        **{name: stored[name] for name in ("index", "repeat", "trajectory")},
        "turn": len(stretches) if asked.turn is None else asked.turn,
        **({"opened": opened} if opened else {}),
        "prompt": {
            "ids": ids,
            "opened": opened,
            "asked_after": 0 if asked.ask is None else last,
            "tokenizer": identity.get("model.tokenizer"),
            "template_kwargs": identity.get("data.apply_chat_template_kwargs") or {},
            "tools": tools,
        },
    }
    return row


def _turns(answers: int) -> tuple[int, int]:
    """What `num_turns` says of so many answers: the last one may have been given something."""
    return 2 * answers, 2 * answers + 1


def _check(stored: Row, extra: Row, messages: Sequence[Message]) -> None:
    """Raises `BadRow`: nobody could go on from this trajectory."""
    if not stored["prompt_ids"] or extra.get("token_exact") is False:
        raise BadRow("it has no token ids that were sampled")
    if "prompt_messages" in extra:
        raise BadRow("an agent program made it, and where that was is not stored")
    if stored["trajectory"]:
        raise BadRow("its context was edited")
    contents = [message.get("content") for message in messages]
    if any(
        part.get("type") != "text" for content in contents if isinstance(content, list) for part in content
    ):
        raise BadRow("it shows images, which are not stored")
