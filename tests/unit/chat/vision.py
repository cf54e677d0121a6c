"""A tiny model folder of the Qwen2-VL kind, without weights: tokenizer, chat template, image processor."""

import io
import json
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollstream.chat.processor import ChatProcessor, load_processor
from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer

PATCH, MERGE = 14, 2
CALL = '<tool_call> {"name": "look", "arguments": {}} </tool_call>'
WORDS = [
    "[UNK]",
    *["system", "user", "assistant", "tool", "look", "at", "this", "and", "that", "."],
    *CALL.split(),
]
SPECIAL = [
    f"<|{name}|>" for name in ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
]
IMAGE_PAD = len(WORDS) + SPECIAL.index("<|image_pad|>")

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} "
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %} {{ part.text }} {% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
TEXT_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")


def write_model(folder: Path, *, template: str = TEMPLATE, max_pixels: int = 28 * 28 * 64) -> Path:
    """Writes the folder; an image is shrunk to `max_pixels`, 28 x 28 of which are a token."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        eos_token="<|im_end|>",
        additional_special_tokens=SPECIAL,
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, min_pixels=28 * 28, max_pixels=max_pixels
    )
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "image_token_id": IMAGE_PAD}))
    return folder


def load_model(folder: Path) -> tuple[ChatTokenizer, ChatProcessor]:
    tokenizer = load_tokenizer(str(folder))
    processor = load_processor(str(folder), tokenizer)
    assert processor is not None
    return tokenizer, processor


def picture(width: int, height: int, color: str = "red") -> Image.Image:
    return Image.new("RGB", (width, height), color)


def png(width: int, height: int, color: str = "red") -> bytes:
    file = io.BytesIO()
    picture(width, height, color).save(file, format="PNG")
    return file.getvalue()
