"""The images of a run's rows, for a DataProto: read again, and put through the model's processor.

Pixels are never stored. A trajectory's messages say which images they were: the first are those of its prompt row,
in order, and the others, of tools, are read by their path or URL.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import orjson

from rollstream.chat.images import ImageSource, describe, load_image
from rollstream.chat.processor import ChatProcessor, load_processor
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.config.load import compose, to_settings
from rollstream.data.prompts import PromptDataset, load_prompts
from rollstream.errors import ConfigError, DataError, RollstreamError, TransientError
from rollstream.store.export.dataproto import MEDIA, image_parts

if TYPE_CHECKING:
    import torch


class RunImages:
    """What a model takes for the images of trajectories; see `rollstream.store.export.dataproto.ImageInputs`."""

    def __init__(
        self,
        processor: ChatProcessor,
        model_path: str,
        dataset: PromptDataset | str,
        *,
        allow_http: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Args:
        processor: of the model.
        model_path: its folder or hub name, for its configuration.
        dataset: the prompt rows, or why there are none.
        allow_http: fetch images that are named by `http(s):` URLs.
        trust_remote_code: as transformers has it.

        Raises:
            ConfigError: the model's configuration cannot be read.
        """
        self._processor = processor
        self._dataset = dataset
        self._allow_http = allow_http
        self._positions = _model_positions(model_path, trust_remote_code)
        self._last: tuple[object, dict[str, torch.Tensor], int] = None, {}, 0

    @property
    def position_rows(self) -> int:
        """1: positions count tokens; 4: those, and three of the model for time, height and width."""
        return 1 if self._positions is None else 4

    def inputs(self, row: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
        """`multi_modal_inputs` of a trajectory; rollouts of one prompt row share theirs. Raises `ConfigError`."""
        parts = list(image_parts(row["messages"]))
        where = f"row {row['index']}, repeat {row['repeat']}"
        if not parts:
            return {}
        key = row["index"], row["prompt_key"], orjson.dumps(parts)
        if self._last[0] != key:
            try:
                images = [load_image(one, allow_http=self._allow_http) for one in self._sources(row, parts)]
                tensors, tokens = self._processor.pixels(images)
            except (DataError, TransientError) as error:
                raise ConfigError(f"{where}: {error}") from error
            if (grid := tensors.get("image_grid_thw")) is not None:
                import torch

                tensors["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
            self._last = key, tensors, tokens
        _, tensors, tokens = self._last
        ids = np.array([*row["prompt_ids"], *row["response_ids"]], np.int64)
        if (there := int((ids == self._processor.image_token_id).sum())) != tokens:
            raise ConfigError(
                f"{where}: its images are {tokens} tokens now, and the model was shown {there}: an image, or the "
                "model's image processor, has changed since"
            )
        return tensors

    def positions(
        self, ids: npt.NDArray[np.int64], inputs: "Mapping[str, torch.Tensor]"
    ) -> npt.NDArray[np.int64]:
        """The model's own positions of a sequence without padding, shape (3, length). Raises `ConfigError`."""
        import torch

        assert self._positions is not None
        tokens = torch.from_numpy(ids).unsqueeze(0)
        kinds = (tokens == self._processor.image_token_id).to(torch.int64)
        try:
            found, _ = self._positions.get_rope_index(
                input_ids=tokens, mm_token_type_ids=kinds, image_grid_thw=inputs.get("image_grid_thw")
            )
        except Exception as error:  # a model's own code, which raises what it likes
            raise ConfigError(f"the model's positions cannot be computed: {error}") from error
        return cast("npt.NDArray[np.int64]", found[:, 0].numpy())

    def _sources(self, row: Mapping[str, Any], parts: Sequence[dict[str, Any]]) -> Iterator[ImageSource]:
        given: Sequence[ImageSource] = ()
        reason = self._dataset
        if isinstance(reason, PromptDataset):
            try:
                prompt = reason.row(row["index"])
            except (RollstreamError, IndexError) as error:
                raise DataError(f"its prompt row cannot be read: {error}") from error
            if prompt.prompt_key != row["prompt_key"]:
                raise DataError(f"{reason.location(row['index'])} is another row than the run had")
            given, reason = prompt.images, "it is not one of its prompt row, such as a tool's"
        for number, part in enumerate(parts):
            if MEDIA in part:
                raise DataError(f"image {number + 1} is not kept: verl's datasets read it (docs/images.md)")
            source = given[number] if number < len(given) else part.get("image")
            digest = part.get("sha256")
            if isinstance(source, bytes):
                known = hashlib.sha256(source).hexdigest() == digest
            else:
                known = digest is None and part.get("type") == "image"
            if source is not None and known:
                yield source
            elif number >= len(given):
                raise DataError(f"image {number + 1} is not stored, and {reason}")
            else:
                raise DataError(f"image {number + 1} is another one now: {describe(given[number])}")


def run_images(config: Path) -> RunImages:
    """Reads images as a configuration says that they were read: its model, and its prompt rows.

    Args:
        config: its file.

    Raises:
        ConfigError: the model has no image processor, or something of it cannot be loaded.
    """
    settings = to_settings(compose(layers=[config]))
    model = settings.actor_rollout_ref.model
    path = model.tokenizer_path or model.path
    if path is None:
        raise ConfigError(f"{config} names no model (actor_rollout_ref.model.path)")
    tokenizer = load_tokenizer(
        path, custom_chat_template=model.custom_chat_template, trust_remote_code=model.trust_remote_code
    )
    processor = load_processor(path, tokenizer, trust_remote_code=model.trust_remote_code)
    if processor is None:
        raise ConfigError(f"the conversations have images, and {path!r} has no image processor")
    dataset: PromptDataset | str
    try:
        dataset = load_prompts(settings.data)
    except RollstreamError as error:
        dataset = f"the prompt rows cannot be read: {error}"
    return RunImages(
        *(processor, path, dataset),
        allow_http=settings.data.fetch_images,
        trust_remote_code=model.trust_remote_code,
    )


def _model_positions(path: str, trust_remote_code: bool) -> Any | None:
    """An object with the model's `get_rope_index`; None of a model whose positions count tokens."""
    try:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = MODEL_MAPPING.get(type(config), None)
    except Exception as error:  # whatever a folder's files and a model's own code raise
        raise ConfigError(f"the model's configuration of {path!r} cannot be read: {error}") from error
    if isinstance(model, tuple):
        model = model[0]
    if model is None or not hasattr(model, "get_rope_index"):
        return None
    # The methods look at nothing but the configuration, so no model has to be made.
    positions = SimpleNamespace(config=config)
    for name in ("get_rope_index", "get_vision_position_ids"):
        if hasattr(model, name):
            setattr(positions, name, MethodType(getattr(model, name), positions))
    return positions
