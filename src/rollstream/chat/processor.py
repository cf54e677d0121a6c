"""The processor of a model that sees images: messages and images to prompt ids.

The chat template writes one placeholder for an image; the processor knows how many tokens the image is, from
its size, and writes the placeholder as often. That is what the model is shown, so it is what is kept.
"""

import hashlib
import inspect
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.chat.images import require_pillow
from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.errors import ConfigError, DataError
from rollstream.trajectory import Message

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""A model folder that has neither is of a model for text."""

_PROBE: list[Message] = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "."}]}]
"""A conversation with one image."""


class ChatProcessor:
    """A Hugging Face processor, with the tokenizer whose chat template is used.

    Its methods may be called from several threads; one call works at a time. They take as long as it takes to
    resize the images: call them in a thread.
    """

    def __init__(self, processor: Any, tokenizer: ChatTokenizer) -> None:
        """`processor` is a transformers processor with an `image_processor`."""
        self._processor = processor
        self._tokenizer = tokenizer
        # Calling a transformers tokenizer sets padding and truncation on it, which two threads cannot.
        self._lock = threading.Lock()

    @cached_property
    def placeholder(self) -> str | None:
        """What the chat template writes for an image; None when it writes nothing the processor knows."""
        try:
            text = self._tokenizer.render_text(_PROBE)
        except DataError:
            return None
        # Gemma 3's template writes the beginning of an image, and its processor the image's tokens after it.
        names = (getattr(self._processor, name, None) for name in ("image_token", "boi_token"))
        return next((name for name in names if isinstance(name, str) and text.count(name) == 1), None)

    def render(
        self,
        messages: list[Message],
        images: Sequence["Image"],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """As `ChatTokenizer.render`, with `images`: one for each image part of the messages, in order.

        Raises `DataError`: the template refuses these messages or does not show each image once, or the
        processor refuses an image.
        """
        text = self._tokenizer.render_text(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.encode(text, images)

    def encode(self, text: str, images: Sequence["Image"]) -> list[int]:
        """Ids of rendered text, with each placeholder written as often as its image needs; nothing is added.

        For whole conversations, and for what is rendered later: a tool result with images (RGB, in the order of
        the placeholders).

        Raises:
            DataError: another number of placeholders, or the processor refuses an image.
        """
        self._check_count(text, len(images))
        if not images:
            return self._tokenizer.encode(text)
        return [int(token_id) for token_id in self._call(text, images)["input_ids"][0]]

    @cached_property
    def image_token_id(self) -> int | None:
        """The token that stands in prompts for a part of an image; None where the processor does not say."""
        known = getattr(self._processor, "image_token_id", None)
        if known is None and (token := getattr(self._processor, "image_token", None)) is not None:
            known = self._processor.tokenizer.convert_tokens_to_ids(token)
        return known

    def pixels(self, images: Sequence["Image"]) -> "tuple[dict[str, torch.Tensor], int]":
        """What a model takes for images, by the names of its `forward`, and how many tokens they are. Needs torch.

        Raises:
            DataError: the processor refuses an image, or the chat template shows none.
        """
        text = (self.placeholder or "") * len(images)
        self._check_count(text, len(images))
        encoded = self._call(text, images, return_tensors="pt")
        ids = encoded["input_ids"]
        of_text = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
        tensors = {name: value for name, value in encoded.items() if name not in of_text}
        return tensors, int((ids == self.image_token_id).sum())

    def _call(self, text: str, images: Sequence["Image"], **kwargs: Any) -> Any:
        try:
            with self._lock:
                return self._processor(text=[text], images=list(images), add_special_tokens=False, **kwargs)
        except Exception as error:  # a model's own code, which raises what it likes
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise DataError(
                f"the model's processor refuses the prompt's images ({sizes} pixels): "
                f"{type(error).__name__}: {error}"
            ) from error

    def digest(self) -> str:
        """Hash of what decides how images become tokens: 32 hexadecimal digits."""
        settings = {"class": type(self._processor).__name__, **self._processor.image_processor.to_dict()}
        known = {key: value for key, value in settings.items() if value is not None}
        content = json.dumps(known, sort_keys=True, default=str).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def _check_count(self, text: str, images: int) -> None:
        """The processor itself would drop images, or leave placeholders that stand for nothing."""
        shown = text.count(self.placeholder) if self.placeholder else 0
        if images and not self.placeholder:
            raise DataError(
                "the chat template shows no images that the model's processor knows; use the template "
                "that came with the model, or give one by actor_rollout_ref.model.custom_chat_template"
            )
        if shown != images:
            raise DataError(
                f"the prompt has {images} images, but {self.placeholder} stands in it {shown} times: "
                "the chat template leaves images out, or the text itself holds that token"
            )


def load_processor(
    path: str, tokenizer: ChatTokenizer, *, trust_remote_code: bool = False
) -> ChatProcessor | None:
    """Loads the processor of a model, by folder or hub name; None if transformers knows none for it.

    Raises `ConfigError`: it cannot be loaded, or Pillow is not installed.
    """
    local = Path(path).expanduser()
    if local.is_dir() and not any((local / name).is_file() for name in _PROCESSOR_FILES):
        return None
    require_pillow()
    from transformers import AutoProcessor

    source = str(local) if local.is_dir() else path
    try:
        try:
            processor = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        except ImportError:
            processor = _load_without_video(source, trust_remote_code)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"the image processor of {path!r} cannot be loaded: {reason} "
            "(some processors need torch and torchvision: pip install torch torchvision)"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        return None
    return ChatProcessor(processor, tokenizer)


def _load_without_video(source: str, trust_remote_code: bool) -> Any:
    """A processor whose video part, which needs torchvision, is left out.

    Models that see videos have one (the Qwen-VL family, InternVL, ...), and transformers makes no processor
    for them without it. Nothing else in such a processor needs more than Pillow and numpy.
    """
    from transformers import AutoConfig, AutoTokenizer

    # The name in `transformers` itself refuses without torchvision; this class takes the one for Pillow.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    processor_class = PROCESSOR_MAPPING[type(config)]
    parts = set(processor_class.get_attributes())
    if not parts <= {"image_processor", "tokenizer", "video_processor"}:
        raise ValueError(f"{processor_class.__name__} also needs {', '.join(sorted(parts))}")

    def check(self: Any, name: str, argument: Any) -> Any:
        if name == "video_processor":
            return type(None)
        return processor_class.check_argument_for_proper_class(self, name, argument)

    images_only = type(
        processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check}
    )
    settings, _ = processor_class.get_processor_dict(source)
    arguments = set(inspect.signature(processor_class.__init__).parameters) - parts - {"self"}
    return images_only(
        image_processor=AutoImageProcessor.from_pretrained(source, trust_remote_code=trust_remote_code),
        tokenizer=AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code),
        video_processor=None,
        **{key: value for key, value in settings.items() if key in arguments},
    )
