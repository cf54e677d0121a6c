"""Small chat templates, each with what is peculiar to its family, and a tokenizer that knows their tokens."""

from functools import cache
from pathlib import Path
from typing import Any

from rollstream.chat.tokenizer import ChatTokenizer

NAMES = ("chatml", "chatml_thinking", "llama3", "mistral", "gemma", "deepseek", "gpt_oss", "glm")

END_TOKENS = {
    "chatml": ("<|im_end|>", "<|endoftext|>"),
    "chatml_thinking": ("<|im_end|>", "<|endoftext|>"),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "mistral": ("</s>",),
    "gemma": ("<end_of_turn>", "<eos>"),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "gpt_oss": ("<|return|>", "<|call|>"),
    "glm": ("<|user|>", "<|observation|>", "<|endoftext|>"),
}
"""Tokens at which an engine ends a turn; the template's own end is the first one."""

_SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
]

_ADDED = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
"""Tokens of their own, but not special: as the models' tokenizers have it."""


@cache
def load(name: str, template: str | None = None) -> ChatTokenizer:
    """A byte-level BPE tokenizer with merges over letters, digits and white space, and the named template.

    `template` stands in its place, with the tokens of the named one.
    """
    tokenizer = _build()
    tokenizer.chat_template = template or (Path(__file__).parent / f"{name}.jinja").read_text()
    return ChatTokenizer(
        tokenizer, end_ids=[tokenizer.convert_tokens_to_ids(end) for end in END_TOKENS[name]]
    )


def _build() -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # Line breaks apart from text, as the tokenizers of chat models have it.
    lines = pre_tokenizers.Split(Regex(r"[\r\n]+"), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([lines, letters])
    bpe.decoder = decoders.ByteLevel()
    corpus = ["\n\n", "assistant\n", "the answer is 12\n", '"}\n', "}}\n", '"name": "', "system\nuser\n"] * 50
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=320,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[],
            show_progress=False,
        ),
    )
    bpe.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    bpe.add_tokens([AddedToken(token, special=False) for token in _ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=bpe)
