"""One trajectory on the terminal: messages, reward, masks, tokens."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from rollstream.chat.token_text import TokenText, read_token_text
from rollstream.errors import ConfigError
from rollstream.store.run import FoundTrajectory
from rollstream.trajectory import CONTINUES, REWARD_STREAMS, is_side_call, reward_values
from rollstream.untrusted import printable

_ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


def print_trajectory(found: FoundTrajectory, *, tokens: bool, console: Console | None = None) -> None:
    """Prints a trajectory; `tokens` adds every response token with mask and log-prob."""
    console, row = console or Console(highlight=False, soft_wrap=True), found.row

    def line(words: str = "", style: str = "") -> None:
        console.print(Text(printable(words), style=style))

    kind = "side call" if is_side_call(row["extra"]) else "snapshot" if row["is_snapshot"] else "final"
    line(
        f"index {row['index']} repeat {row['repeat']} trajectory {row['trajectory']} ({kind}, of "
        f"{found.siblings}) in {found.source}",
        style="bold",
    )
    reward = "not scored" if row["reward"] is None else f"{row['reward']:g}"
    line(f"reward {reward}   finish {row['finish_reason']}   data source {row['data_source']}")
    if isinstance(begun := row["extra"].get(CONTINUES), dict):
        line(
            f"goes on with {', '.join(f'{name} {value}' for name, value in begun.items() if name != 'prompt')}"
        )
    said = dict(row["reward_extra"])
    if isinstance(said.get("tokens"), list):
        said["tokens"] = f"{len(said['tokens'])} numbers: --tokens"
    if said:
        line(f"reward says {orjson.dumps(said).decode()}")
    if not row["prompt_ids"]:
        line("text only: a hosted model gives no token ids")
    elif row["extra"].get("token_exact") is False:
        line("token ids are the local tokenizer's, not those that were sampled")
    line(f"ground truth {orjson.dumps(row['ground_truth']).decode()}")
    for message in row["messages"]:
        line()
        line(str(message.get("role")), style=_ROLE_STYLES.get(str(message.get("role")), ""))
        line(_message_words(message))
    line()
    if not row["prompt_ids"]:
        usage = row["extra"].get("usage")
        counts = (
            usage and f"{usage['prompt_tokens']} prompt tokens, {usage['response_tokens']} response tokens"
        )
        line(f"{counts}, as the endpoint counts them" if usage else "lengths are not known")
        return
    line(
        f"{len(row['prompt_ids'])} prompt tokens, {len(row['response_ids'])} response tokens, "
        f"{sum(row['response_mask'])} of them sampled (mask 1)"
    )
    if row["response_logprobs"] is not None and found.run.manifest.logprobs_text:
        line(f"log-probs: {found.run.manifest.logprobs_text}")
    versions = row["policy_versions"]
    if len(versions) > 1 or versions[0]["version"] != 0:
        begins = ", ".join(f"{run['version']} from token {run['start']}" for run in versions)
        line(f"policy versions: {begins}")
    try:
        texts = read_token_text(found.run.root)
    except ConfigError:  # the run keeps no tokenizer
        texts = None
    console.print(Text("response by mask: ").append(_by_mask(row, texts)))
    if tokens:
        for words in _token_lines(row, texts):
            line(words)


def _message_words(message: dict[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else orjson.dumps(content).decode()
    if message.get("tool_calls"):
        text += "\ntool calls: " + orjson.dumps(message["tool_calls"]).decode()
    return text


def _by_mask(row: dict[str, Any], texts: TokenText | None) -> Text:
    text = Text()
    pairs = zip(row["response_mask"], row["response_ids"], strict=True)
    for value, stretch in groupby(pairs, key=lambda pair: pair[0]):
        ids = [token for _, token in stretch]
        words = f"{len(ids)} tokens" if texts is None else texts.decode(ids)
        text.append(printable(f"[{value}:{words}]"), style="green" if value else "dim")
    return text


def _token_lines(row: dict[str, Any], texts: TokenText | None) -> Iterator[str]:
    found = {"log-prob": row["response_logprobs"] or [None] * len(row["response_ids"])}
    for stream in REWARD_STREAMS:
        values = reward_values(stream, row["reward_extra"], row["response_mask"])
        found |= {} if values is None else {stream.removesuffix("_rewards"): values}
    yield " ".join([f"{'at':>6} {'id':>8} mask", *(f"{name:>9}" for name in found), "token"])
    columns = zip(row["response_ids"], row["response_mask"], *found.values(), strict=True)
    for at, (token, mask, *numbers) in enumerate(columns):
        word = "" if texts is None else repr(texts.decode([token]))
        cells = [f"{'' if value is None else f'{value:.4f}':>9}" for value in numbers]
        yield " ".join([f"{at:>6} {token:>8} {mask:>4}", *cells, word])
