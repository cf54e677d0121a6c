"""The demo model as plain as can be: one forward pass a token, in float32, by transformers alone."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstream.trajectory import Completion, SamplingParams

END = 2
"""The demo model's end token."""


class Reference:
    """What every engine is compared with.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch: Any = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(self, ids: Sequence[int]) -> str:
        """With special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def score(
        self, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
    ) -> tuple[list[int], list[float]]:
        """The likeliest id at each place of a response, and the log-prob of the one that is there."""
        torch = self._torch
        if not ids:
            return [], []
        with torch.no_grad():
            logits = self._model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / temperature).log_softmax(-1)
        return logits.argmax(-1).tolist(), logprobs.gather(1, torch.tensor([[i] for i in ids]))[:, 0].tolist()

    def top(self, ids: Sequence[int], start: int, top_k: int) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest ids in the places of `ids[start:]`, and their log-probs."""
        torch = self._torch
        with torch.no_grad():
            logits = self._model(torch.tensor([[*ids]])).logits[0, start - 1 : -1]
        found = logits.log_softmax(-1).topk(top_k)
        return found.indices.tolist(), found.values.tolist()

    def penalized(
        self,
        prompt: Sequence[int],
        length: int,
        *,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
    ) -> tuple[list[int], list[float]]:
        """A greedy response with penalties, as vLLM defines them, and the raw log-probs of its ids."""
        torch, ids, raw = self._torch, list[int](), list[float]()
        for _ in range(length):
            with torch.no_grad():
                logits = self._model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            scores = logits.clone()
            for token in {*prompt, *ids}:
                scores[token] *= repetition_penalty ** (1 if logits[token] < 0 else -1)
            for token in set(ids):
                scores[token] -= presence_penalty + frequency_penalty * ids.count(token)
            ids.append(int(scores.argmax()))
            raw.append(float(logits.log_softmax(-1)[ids[-1]]))
        return ids, raw

    async def answer(self, prompt: Sequence[int], sampling: SamplingParams) -> Completion:
        """Samples as an engine does: temperature, seed and every way to end, but neither top-p nor top-k.

        Log-probs are those after the temperature. It can be cancelled between two tokens.
        """
        torch = self._torch
        draws = torch.Generator().manual_seed(sampling.seed or 0)
        ids: list[int] = []
        logprobs: list[float] = []
        ends = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {END})
        context, cache = torch.tensor([list(prompt)]), None
        while len(ids) < sampling.max_tokens:
            await asyncio.sleep(0)
            with torch.no_grad():
                out = self._model(context, past_key_values=cache, use_cache=True)
            logits, cache = out.logits[0, -1], out.past_key_values
            scores = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            if sampling.temperature:
                token = int(torch.multinomial(scores.exp(), 1, generator=draws))
            else:
                token = int(scores.argmax())
            ids.append(token)
            logprobs.append(float(scores[token]))
            if token in ends or any(stop in self.text(ids) for stop in sampling.stop):
                return Completion(ids, logprobs, "stop")
            context = torch.tensor([[token]])
        return Completion(ids, logprobs, "length")
