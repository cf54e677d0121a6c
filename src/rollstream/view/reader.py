"""One trajectory or one group of a run, as the page shows it; and a search in all messages."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
import pyarrow.compute as pc

from rollstream.errors import NotFoundError
from rollstream.store.arrow import column_values
from rollstream.store.columns import Array, RunColumns
from rollstream.store.export.files import JSON_COLUMNS
from rollstream.trajectory import CALL_TIMES, STREAMS, is_side_call

Row = dict[str, Any]
Messages = list[dict[str, Any]]
Event = tuple[str, dict[str, Any]]

_LISTS: Final = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "policy_versions")
_SHOWN: Final = (
    *("index", "repeat", "prompt_key", "data_source", "ground_truth", "finish_reason", "reward_extra"),
    *("attempts", "num_turns", "is_snapshot", "extra", "prompt_tokens", "response_tokens", "finished_at"),
    *("reward", "metrics"),
)
_OF_ROLLOUT: Final = ("repeat", "reward", "finish_reason", "response_tokens", "num_turns")
_ROOM: Final = 1 << 25
"""Characters of JSON in an answer; cells beyond it are cut. A thousand pages of text are a tenth of it."""
_CUT: Final = 10_000
_SHOWN_TEXT: Final = 200
"""Characters of a text in a list."""
_MOST_HITS: Final = 1000
_AROUND: Final = 80
"""Characters before and after a match."""


def read_rows(columns: RunColumns, rows: Sequence[int] | Array) -> dict[int, Row]:
    """Trajectories by row, JSON decoded; lists of numbers stay Arrow's. What is gone from the disk is not there."""
    found: dict[int, Row] = {}
    room = _ROOM
    for numbers, table in columns.read(np.asarray(rows, np.int64)):
        for at in np.flatnonzero(numbers >= 0).tolist():
            one = table.slice(at, 1)
            row = one.drop_columns(list(_LISTS)).to_pylist()[0] | {name: one[name][0] for name in _LISTS}
            for name in JSON_COLUMNS:
                room -= len(text := row[name])
                row[name] = read_json(text) if room >= 0 else cut(text)
            found[int(numbers[at])] = row
    return dict(sorted(found.items(), key=lambda item: (item[1]["repeat"], item[1]["trajectory"])))


def cut(text: str) -> str:
    """The beginning of a cell that is too large for the page."""
    return f"too large for the page, {len(text)} characters: {text[:_CUT]}"


def read_json(text: str) -> Any:
    """A JSON cell; the text itself where it is damaged: there is nothing better to show."""
    try:
        return orjson.loads(text)
    except ValueError:
        return text


def as_messages(found: Any) -> Messages:
    """What a row has as messages; what is none becomes one."""
    parts = found if isinstance(found, list) else [found]
    return [one if isinstance(one, dict) else {"role": "damaged", "content": str(one)} for one in parts]


def find_rollout(columns: RunColumns, row: int) -> dict[int, Row]:
    """The trajectories of a row's rollout, by row, that row among them. Raises `NotFoundError`."""
    if not 0 <= row < columns.rows:
        raise NotFoundError(f"there is no row {row}; there are {columns.rows}")
    index, repeat = int(columns["index"][row]), int(columns["repeat"][row])
    found = read_rows(columns, columns.rollout_rows(index, repeat))
    if row not in found:
        raise NotFoundError(f"rollout (index {index}, repeat {repeat}) cannot be read (any more)")
    return found


def trajectory(columns: RunColumns, row: int) -> Row:
    """A trajectory for the page, without its tokens. Raises `NotFoundError`."""
    rollout = find_rollout(columns, row)
    siblings, mine, messages = [*rollout], rollout[row], as_messages(rollout[row]["messages"])
    extras = {at: one["extra"] for at, one in rollout.items() if isinstance(one["extra"], dict)}
    notes = []
    if not len(mine["prompt_ids"]):
        notes.append("text only: a hosted model gives no token ids")
    elif isinstance(mine["extra"], dict) and mine["extra"].get("token_exact") is False:
        notes.append("token ids are the local tokenizer's, not those that were sampled")
    if isinstance(mine["reward_extra"], dict) and "error" in mine["reward_extra"]:
        notes.append("the reward function failed on it")
    side_calls = [other for other, extra in extras.items() if is_side_call(extra)]
    before = [other for other in siblings[: siblings.index(row)] if {row, other}.isdisjoint(side_calls)]
    order, _ = columns.groups()
    at = int(np.flatnonzero(order == row)[0])
    return {
        "row": row,
        "number": mine["trajectory"],
        "of": len(rollout),
        "siblings": siblings,
        **{name: mine[name] for name in _SHOWN},
        "reward_extra": _without(mine["reward_extra"], "tokens"),
        "extra": _without(mine["extra"], STREAMS, CALL_TIMES),
        "side_calls": side_calls,
        "call_times": {
            other: times
            for other, extra in extras.items()
            if isinstance(times := extra.get(CALL_TIMES), list)
        },
        "messages": messages,
        "policy_versions": mine["policy_versions"].as_py(),
        "previous_row": int(order[at - 1]) if at else None,
        "next_row": int(order[at + 1]) if at + 1 < len(order) else None,
        "removed": _removed(as_messages(rollout[before[-1]]["messages"]), messages) if before else [],
        "notes": notes,
    }


def _without(values: Any, *names: str) -> Any:
    """What there is, without the lists of numbers that the page draws."""
    if not isinstance(values, dict):
        return values
    return {key: one for key, one in values.items() if key not in names or not isinstance(one, list | dict)}


def _removed(before: Messages, after: Messages) -> Messages:
    """Messages that were there before and are not any more."""
    left, gone = [orjson.dumps(one) for one in after], []
    for one in before:
        if (text := orjson.dumps(one)) in left:
            left.remove(text)
        else:
            gone.append(one)
    return gone


def group(columns: RunColumns, index: int) -> Row:
    """The rollouts of a prompt side by side. Raises `NotFoundError`."""
    by_repeat, failed = defaultdict[int, dict[int, Row]](dict), list[Row]()
    for row, one in read_rows(columns, columns.rollout_rows(index)).items():
        by_repeat[one["repeat"]][row] = one
    for failure in columns.failures():
        if failure.index == index:
            failed.append({"repeat": failure.repeat, "failed": failure})
    if not by_repeat and not failed:
        raise NotFoundError(f"there is no finished rollout of prompt row {index}")
    finals = [[*found.values()][-1] for found in by_repeat.values()]
    any_one: Row = finals[0] if finals else {"messages": []}
    messages = as_messages(any_one["messages"])
    shared = _prompt_length(messages)
    rollouts: list[Row] = [
        {
            **{name: one[name] for name in _OF_ROLLOUT},
            "reward_extra": _without(one["reward_extra"], "tokens"),
            "row": [*found][-1],
            "trajectories": [*found],
            "messages": as_messages(one["messages"])[shared:],
        }
        for one, found in zip(finals, by_repeat.values(), strict=True)
    ]
    order, starts = columns.groups()
    indices = columns["index"][order[starts]]
    before, after = indices[indices < index], indices[indices > index]
    return {
        "index": index,
        **{name: any_one.get(name) for name in ("prompt_key", "data_source", "ground_truth")},
        "prompt": messages[:shared],
        "previous": int(before[-1]) if len(before) else None,
        "next": int(after[0]) if len(after) else None,
        "rollouts": sorted(rollouts + failed, key=lambda one: int(one["repeat"])),
    }


def _prompt_length(messages: Messages) -> int:
    """Messages before the first answer of the model."""
    return next((at for at, one in enumerate(messages) if one.get("role") == "assistant"), len(messages))


def prompts(columns: RunColumns, rows: Array) -> list[str | None]:
    """The beginning of the prompt of each row; None where it cannot be read."""
    return [None if one is None else one["prompt"] for one in texts(columns, rows)]


def texts(columns: RunColumns, rows: Array) -> list[dict[str, str] | None]:
    """The beginnings of `prompt`, `answer` and `truth` of each row; None where they cannot be read."""
    found: dict[int, dict[str, str]] = {}
    for numbers, table in columns.read(rows, ["messages", "ground_truth"]):
        for at in np.flatnonzero(numbers >= 0).tolist():
            cells = [table[name][at].as_py() for name in ("messages", "ground_truth")]
            messages, truth = (read_json(text) if len(text) <= _ROOM else cut(text) for text in cells)
            first = _prompt_length(all_messages := as_messages(messages))
            answers = [one for one in all_messages[first:] if one.get("role") == "assistant"]
            found[int(numbers[at])] = {
                "prompt": text_of(all_messages[first - 1])[:_SHOWN_TEXT] if first else "",
                "answer": _answer_of(answers[-1])[:_SHOWN_TEXT] if answers else "",
                "truth": ("" if truth is None else truth if isinstance(truth, str) else _as_json(truth))[
                    :_SHOWN_TEXT
                ],
            }
    return [found.get(row) for row in rows.tolist()]


def _answer_of(message: Mapping[str, Any]) -> str:
    """What a message says; if that is nothing, what it thinks and calls."""
    return text_of({"content": message.get("content")}) or text_of(message)


def _as_json(value: Any) -> str:
    return orjson.dumps(value).decode()


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message: its thoughts, its parts, and its tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls")
    called = [_call_text(one) for one in calls] if isinstance(calls, list) else [calls]
    parts = (message.get("reasoning_content"), content, *called)
    return "\n".join(part if isinstance(part, str) else _as_json(part) for part in parts if part)


def _call_text(call: Any) -> Any:
    """A tool call with its arguments as they are shown, not as JSON within JSON."""
    said = call.get("function") if isinstance(call, dict) else None
    if not isinstance(said, dict) or "arguments" not in said:
        return call
    arguments = said["arguments"]
    return f"{said.get('name')} {arguments if isinstance(arguments, str) else _as_json(arguments)}"


def search(columns: RunColumns, text: str, rows: Array) -> Iterator[list[Event]]:
    """Looks for a text in the messages of some rows, whatever the case. Each step is short; close it to stop."""
    progress = {"scanned": 0, "total": len(rows), "hits": 0}
    # What JSON writes as it is, however deep: a message that does not hold it cannot hold the text.
    pattern = max(re.split(r"[\"\\\x00-\x1f]", text), key=len)
    for numbers, table in columns.read(rows, ["messages"]):
        events: list[Event] = []
        progress["scanned"] += int((numbers >= 0).sum())
        likely = column_values(pc.match_substring(table["messages"], pattern, ignore_case=True))
        for at in np.flatnonzero(likely & (numbers >= 0)).tolist():
            hit = _hit(text, table["messages"][at].as_py())
            if hit is not None and progress["hits"] < _MOST_HITS:
                progress["hits"] += 1
                row = np.array([numbers[at]])
                cells = {name: columns.values(name, row)[0] for name in ("index", "repeat", "reward")}
                events.append(("hit", {"row": int(row[0]), **cells, **hit}))
        yield [*events, ("progress", progress)]
        if progress["hits"] >= _MOST_HITS:
            break
    yield [("progress", progress), ("done", {**progress, "cut": progress["hits"] >= _MOST_HITS})]


def _hit(wanted: str, cell: str) -> dict[str, str] | None:
    for message in as_messages(read_json(cell)):
        text = text_of(message)
        lowered = text.lower()
        # A letter whose small form has another length moves what comes behind it.
        at = lowered.find(wanted.lower()) if len(lowered) == len(text) else text.find(wanted)
        if at >= 0:
            end = at + len(wanted)
            around = {"before": text[max(0, at - _AROUND) : at], "match": text[at:end]}
            return {"role": str(message.get("role")), **around, "after": text[end : end + _AROUND]}
    return None
