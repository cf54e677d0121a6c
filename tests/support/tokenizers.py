"""Tokenizers of every kind that chat models have, small, as folders that transformers would load."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rollstream.demo import MODEL_PATH

CORPUS = [
    "The answer is 12345, isn't it?\n\nHe'll say: no!\n  def f(x):\n\treturn x ** 2  # x's\n",
    '{"name": "look_up", "arguments": {"query": "caf\u00e9 \u4f60\u597d"}}\n<tool_call>\n</tool_call>\n',
    "WHAT IS 3.14159 + 2.71828?   I'VE DONE 100,000 of them; what's next...\r\n",
] * 20
_TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _byte_level(*patterns: str, normalizer: Any = None, use_regex: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level]) if splits else level
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    _train(tokenizer, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return tokenizer


def _train(tokenizer: Tokenizer, trainer: Any, **options: Any) -> None:
    tokenizer.train_from_iterator(CORPUS, trainer(vocab_size=500, show_progress=False, **options))


def _sentencepiece() -> Tokenizer:
    """As of Llama 2, Gemma and older Mistral models."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _train(
        tokenizer, trainers.BpeTrainer, special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _train(tokenizer, trainers.UnigramTrainer, special_tokens=["<unk>"], unk_token="<unk>")
    return tokenizer


_KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any], str]] = {
    "qwen": (
        lambda: _byte_level(_QWEN, normalizer=normalizers.NFC()),
        {"tokenizer_class": "Qwen2Tokenizer"},
        "qwen2",
    ),
    "qwen_fast": (
        lambda: _byte_level(_QWEN, normalizer=normalizers.NFC()),
        {"tokenizer_class": "Qwen2TokenizerFast", "bos_token": None},
        "qwen3",
    ),
    "not_quite_qwen": (lambda: _byte_level(_LLAMA3), {"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen2"),
    "llama3": (lambda: _byte_level(_LLAMA3), {"tokenizer_class": "PreTrainedTokenizerFast"}, "llama"),
    "gpt_oss": (lambda: _byte_level(_O200K), {"tokenizer_class": "PreTrainedTokenizerFast"}, "gpt_oss"),
    "deepseek": (lambda: _byte_level(*_DEEPSEEK), {"tokenizer_class": "LlamaTokenizerFast"}, "deepseek_v3"),
    "gpt2": (lambda: _byte_level(use_regex=True), {"tokenizer_class": "GPT2Tokenizer"}, "gpt2"),
    "llama2": (_sentencepiece, {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"}, "llama"),
    "sentencepiece": (
        _sentencepiece,
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"},
        "glm4",
    ),
    "unigram": (_unigram, {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}, "glm4"),
}
NAMES = ("demo", *_KINDS)


def write(name: str, folder: Path) -> Path:
    """Writes a model folder with the named tokenizer, and returns it."""
    files = _files(name)
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file).write_text(content, "utf-8")
    return folder


@cache
def _files(name: str) -> dict[str, str]:
    if name == "demo":
        names = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
        return {file: (MODEL_PATH / file).read_text() for file in (*names, "chat_template.jinja")}
    make, config, model_type = _KINDS[name]
    tokenizer = make()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("<think>", normalized=True)]
    )
    listed = {
        str(token_id): {
            "content": token.content,
            **{
                key: getattr(token, key)
                for key in ("single_word", "lstrip", "rstrip", "normalized", "special")
            },
        }
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    own = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "added_tokens_decoder": listed}
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps({**own, **config}),
        "config.json": json.dumps({"model_type": model_type}),
        "chat_template.jinja": _TEMPLATE,
    }
