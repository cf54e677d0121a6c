"""One trajectory on the terminal: messages, reward, masks, tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from rollstream.chat.token_text import TokenText, read_token_text
from rollstream.errors import ConfigError
from rollstream.store.run import FoundTrajectory
from rollstream.trajectory import is_side_call
from rollstream.untrusted import printable

_ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def print_trajectory(found: FoundTrajectory, *, tokens: bool, console: Console | None = None) -> None:
    """Prints a trajectory; `tokens` adds every response token with mask and log-prob."""
    console = console or Console(highlight=False, soft_wrap=True)
    row = found.row
    kind = "snapshot" if row["is_snapshot"] else "final"
    if is_side_call(row["extra"]):
        kind = "side call"
    console.print(
        _text(
            f"index {row['index']} repeat {row['repeat']} trajectory {row['trajectory']} ({kind}, of "
            f"{found.siblings}) in {found.source}",
            style="bold",
        )
    )
    reward = "not scored" if row["reward"] is None else f"{row['reward']:g}"
    console.print(
        _text(f"reward {reward}   finish {row['finish_reason']}   data source {row['data_source']}")
    )
    if row["reward_extra"]:
        console.print(_text(f"reward says {orjson.dumps(row['reward_extra']).decode()}"))
    if not row["prompt_ids"]:
        console.print(_text("text only: the run had no tokenizer, so there are no token ids"))
    elif row["extra"].get("token_exact") is False:
        console.print(_text("token ids are the local tokenizer's, not those that were sampled"))
    console.print(_text(f"ground truth {orjson.dumps(row['ground_truth']).decode()}"))
    for message in row["messages"]:
        console.print()
        console.print(_text(str(message.get("role")), style=_ROLE_STYLES.get(str(message.get("role")), "")))
        console.print(_text(_message_words(message)))
    console.print()
    if not row["prompt_ids"]:
        usage = row["extra"].get("usage")
        counted = f"{usage['prompt_tokens']} prompt tokens, {usage['response_tokens']} response tokens"
        console.print(_text(f"{counted}, as the endpoint counts them" if usage else "lengths are not known"))
        return
    sampled = sum(row["response_mask"])
    console.print(
        _text(
            f"{len(row['prompt_ids'])} prompt tokens, {len(row['response_ids'])} response tokens, "
            f"{sampled} of them sampled (mask 1)"
        )
    )
    if row["response_logprobs"] is not None and found.run.manifest.logprobs_text:
        console.print(_text(f"log-probs: {found.run.manifest.logprobs_text}"))
    if len(row["policy_versions"]) > 1 or row["policy_versions"][0]["version"] != 0:
        console.print(_text(f"policy versions: {_versions(row['policy_versions'])}"))
    texts = _token_text(found)
    console.print(_text("response by mask: ").append(_by_mask(row, texts)))
    if tokens:
        for line in _token_lines(row, texts):
            console.print(_text(line))


def _text(words: str, style: str = "") -> Text:
    return Text(printable(words), style=style)


def _message_words(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else orjson.dumps(content).decode()
    if message.get("tool_calls"):
        text += "\ntool calls: " + orjson.dumps(message["tool_calls"]).decode()
    return text


def _versions(runs: Sequence[dict[str, int]]) -> str:
    """Each version with the response token at which it begins."""
    return ", ".join(f"{run['version']} from token {run['start']}" for run in runs)


def _token_text(found: FoundTrajectory) -> TokenText | None:
    """The texts of the run's tokens; None where it keeps no tokenizer."""
    try:
        return read_token_text(found.run.root)
    except ConfigError:
        return None


def _runs(mask: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """`(mask value, start, end)` of each stretch of equal mask."""
    start = 0
    for at in range(1, len(mask) + 1):
        if at == len(mask) or mask[at] != mask[start]:
            yield mask[start], start, at
            start = at


def _by_mask(row: dict[str, Any], texts: TokenText | None) -> Text:
    text = Text()
    for value, start, end in _runs(row["response_mask"]):
        ids = row["response_ids"][start:end]
        words = f"{len(ids)} tokens" if texts is None else texts.decode(ids)
        text.append(printable(f"[{value}:{words}]"), style="green" if value else "dim")
    return text


def _token_lines(row: dict[str, Any], texts: TokenText | None) -> Iterator[str]:
    logprobs = row["response_logprobs"] or [None] * len(row["response_ids"])
    yield f"{'at':>6} {'id':>8} mask {'log-prob':>9} token"
    for at, (token, mask, logprob) in enumerate(
        zip(row["response_ids"], row["response_mask"], logprobs, strict=True)
    ):
        word = "" if texts is None else repr(texts.decode([token]))
        value = "" if logprob is None else f"{logprob:9.4f}"
        yield f"{at:>6} {token:>8} {mask:>4} {value:>9} {word}"
