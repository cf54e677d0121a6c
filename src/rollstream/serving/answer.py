"""What an engine sampled, as text: without what ended it, and token by token."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.trajectory import Completion, SamplingParams

_INCOMPLETE = "\ufffd"
"""What a tokenizer writes for the first bytes of a character."""

_CONTEXT = 3
"""Up to three such marks can become one character with the next token."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of a completion."""

    text: str
    """Without the stop string or end token."""
    matched: str | int | None
    """The stop string or token id that ended it; None for another end."""
    ended_itself: bool = False
    """Whether the model's own end token ended it."""

    @property
    def stop_reason(self) -> str | int | None:
        """`matched`, unless it is the model's own end token, which vLLM does not name."""
        return None if self.ended_itself else self.matched


class AnswerReader:
    """Reads completions of one model."""

    def __init__(self, tokenizer: ChatTokenizer, end_ids: Collection[int]) -> None:
        """`end_ids`: the model's own end tokens."""
        self._tokenizer = tokenizer
        self._end_ids = frozenset(end_ids)

    def read(
        self, completion: Completion, sampling: SamplingParams, *, skip_special_tokens: bool = True
    ) -> Answer:
        """Text, and what ended it.

        Sampled ids include the token that completes a stop string, or the end token; the text ends before.
        """
        ids = completion.token_ids
        text = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if completion.finish_reason != "stop" or not ids:
            return Answer(text, None)
        if found := self._find_stop(text, ids, sampling.stop, skip_special_tokens=skip_special_tokens):
            at, stop = found
            return Answer(text[:at], stop)
        last = ids[-1]
        asked_for = last in sampling.stop_token_ids
        if asked_for or (last in self._end_ids and not sampling.ignore_eos):
            shown = self._tokenizer.decode(ids[:-1], skip_special_tokens=skip_special_tokens)
            return Answer(shown, last, ended_itself=not asked_for)
        raw = self._tokenizer.decode(ids, skip_special_tokens=False)
        if found := self._find_stop(raw, ids, sampling.stop, skip_special_tokens=False):
            # A stop string with special tokens in it, which the text does not show: whole tokens are kept.
            at, stop = found
            kept = len(ids) - 1
            while kept and len(self._tokenizer.decode(ids[:kept], skip_special_tokens=False)) > at:
                kept -= 1
            return Answer(self._tokenizer.decode(ids[:kept], skip_special_tokens=skip_special_tokens), stop)
        return Answer(text, None)

    def _find_stop(
        self, text: str, ids: list[int], stops: Sequence[str], *, skip_special_tokens: bool
    ) -> tuple[int, str] | None:
        """Where the stop string stands that the last token completed, the leftmost one first."""
        if not stops:
            return None
        before = len(self._tokenizer.decode(ids[:-1], skip_special_tokens=skip_special_tokens))
        found = [
            (at, stop)
            for stop in stops
            if (at := text.find(stop, max(0, before - len(stop) - _CONTEXT))) >= 0
        ]
        return min(found, default=None)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special ones included; joined they are the text of all.

        A token that ends inside a character is "", and the token that completes it has the character.
        """
        texts = []
        # Some tokenizers write a token another way at the beginning: so the tokens before go with it.
        start = read = 0
        for at in range(len(ids)):
            before = self._tokenizer.decode(list(ids[start:read]), skip_special_tokens=False)
            now = self._tokenizer.decode(list(ids[start : at + 1]), skip_special_tokens=False)
            last = at == len(ids) - 1
            if now.endswith(_INCOMPLETE) and not last:
                texts.append("")
            else:
                texts.append(now[len(before) :])
                start, read = read, at + 1
        return texts
