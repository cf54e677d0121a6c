"""The tokenizer: byte-level BPE of 512 tokens, trained on the chats themselves."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from demo_model.chats import build_retry_chat, build_tool_chat, vary_tool_chat
from demo_model.problems import Split, draw_problem

VOCABULARY = 512
"""256 bytes, five added tokens and 251 merges: the chats' wording becomes about a token a word, and the
embedding stays a sixth of the model."""
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_TOOL_MARKERS = ("<tool_call>", "</tool_call>")
_ADDED = re.compile("|".join(map(re.escape, (PAD, START, END, *_TOOL_MARKERS))))
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""Within these merges are learnt: words, single digits, signs, white space. Single digits keep place values
apart, which addition needs. Encoding splits as Qwen2 does, which for the chats comes to the same tokens."""
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_CORPUS_CHATS = 2_000
"""Merges no longer change when it grows."""


def train_tokenizer(seed: int = 0) -> Qwen2Tokenizer:
    """Train the tokenizer; the same seed gives the same one.

    It is Qwen2's class because transformers 5 gives that to every model of type qwen2, and with it Qwen2's
    own split and normalisation, whatever ``tokenizer.json`` says: another would encode otherwise elsewhere.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(_TOOL_MARKERS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_write_corpus(random.Random(seed)), trainer)
    learnt = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.add_tokens([AddedToken(START, special=True, normalized=False)])
    # As in Qwen2.5: one token each, yet not special, so that decoding keeps them for the tool parser.
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in _TOOL_MARKERS])
    tokenizer.chat_template = TEMPLATE.read_text()
    if len(tokenizer) != VOCABULARY:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, not {VOCABULARY}: the corpus is too small"
        )
    return tokenizer


def _write_corpus(rng: random.Random) -> Iterator[str]:
    """Chats as the template renders them, less the added tokens, which no merge may cross."""
    bare = Qwen2Tokenizer()
    bare.chat_template = TEMPLATE.read_text()
    for _ in range(_CORPUS_CHATS):
        problem = draw_problem(rng, rng.choice((2, 3)), 2, Split.TRAIN)
        chat, tool = vary_tool_chat(build_tool_chat(problem), rng)
        for messages, tools in ((build_retry_chat(problem, rng), None), (chat, [tool])):
            text = str(bare.apply_chat_template(messages, tools=tools, tokenize=False))
            yield _ADDED.sub("\n", text)
