"""Chat endpoints, hosted or local: messages in, a message out, by OpenAI's `/v1/chat/completions`."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.engine.base import ChatPrompt
from rollstream.engine.checks import no_longer_than, read_engine_kwargs
from rollstream.engine.http_server import CONNECTION_KWARGS
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.openai_replica import OpenAIReplica, needs_messages
from rollstream.engine.openai_wire import MAY_BE_OMITTED, OWN_FIELDS
from rollstream.engine.pool import POOL_KWARGS, PoolEngine
from rollstream.errors import ConfigError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)

ENGINE_KWARGS: dict[str, Any] = {
    **CONNECTION_KWARGS,
    "probe_after": POOL_KWARGS["probe_after"],
    "requests_per_minute": 0,  # to each endpoint, at most; 0 is no limit of our own
    "tokens_per_minute": 0,  # the same for prompt and answer tokens
    "honours_seed": False,  # whether the endpoint gives the same answer for the same seed
    "takes_images": False,  # whether its model sees images
    "continue_final_message": False,  # whether it can go on with an answer that was cut off
    "send_reasoning": False,  # whether earlier answers are sent with their thinking
    "check_model": True,  # refuse a model that the endpoint does not list
    "max_tokens_key": "max_tokens",  # or max_completion_tokens
    "omit": [],  # fields not to send where they have their default: temperature, top_p, stream_options, seed
    "extra_body": {},  # further fields of every request
}
"""Keys of `engine_kwargs` with their defaults."""

DATA_DECIDING_KWARGS = ("extra_body", "send_reasoning")
"""Those that decide what is answered."""

_DEFAULT_KEY = "OPENAI_API_KEY"
"""Where OpenAI's own clients look for a key."""


class OpenAIEngine(PoolEngine):
    """Chat endpoints that serve the same model.

    Args:
        server_urls: base URLs, with or without `/v1`.
        model_path: the model's name at the endpoints; of a folder, its name.
        max_model_len: prompt plus response tokens at most, by the local tokenizer; None takes what the
            endpoints say, if they do.
        engine_kwargs: see `ENGINE_KWARGS`.

    Raises:
        ConfigError: something is missing, or no such setting.
    """

    def __init__(
        self,
        server_urls: Sequence[str],
        *,
        model_path: str | None,
        max_model_len: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not server_urls:
            raise ConfigError(
                "engine 'openai' needs the endpoint's URL, also a hosted one's: "
                "actor_rollout_ref.rollout.server_urls=[https://api.openai.com/v1]"
            )
        if not model_path:
            raise ConfigError("engine 'openai' needs the model's name: actor_rollout_ref.model.path")
        kwargs = read_settings(engine_kwargs)
        self._key_name: str = kwargs["api_key_env"]

        super().__init__(
            [OpenAIReplica(url, model=model_path, kwargs=kwargs) for url in server_urls],
            own=no_longer_than(max_model_len),
            what="chat",
            hint="check actor_rollout_ref.rollout.server_urls, and that the endpoints can be reached",
            kwargs={"probe_after": kwargs["probe_after"]},
        )

    async def start(self) -> None:
        if self._key_name:
            _LOG.info("the API key in %s goes to %s", self._key_name, ", ".join(self.replicas))
        await super().start()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
        chat: ChatPrompt | None = None,
    ) -> Completion:
        """Refused without `chat`: a chat endpoint takes no ids."""
        if chat is None:
            raise needs_messages()
        return await super().generate(prompt_ids, sampling, request_id=request_id, chat=chat)

    async def chat(self, prompt: ChatPrompt, sampling: SamplingParams, *, request_id: str) -> Completion:
        return await self.generate(prompt.ids, sampling, request_id=request_id, chat=prompt)


def read_settings(engine_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The engine's settings with their defaults; `api_key_env` is `OPENAI_API_KEY` where that is set.

    Raises:
        ConfigError: an unknown key, or a value that makes no sense.
    """
    kwargs = read_engine_kwargs("openai", engine_kwargs or {}, ENGINE_KWARGS)
    if not kwargs["api_key_env"] and os.environ.get(_DEFAULT_KEY, "").strip():
        kwargs["api_key_env"] = _DEFAULT_KEY
    for key in ("requests_per_minute", "tokens_per_minute"):
        if kwargs[key] < 0:
            raise ConfigError(f"engine_kwargs.{key} must be 0 (no limit) or more, not {kwargs[key]}")
    if kwargs["max_tokens_key"] not in ("max_tokens", "max_completion_tokens"):
        raise ConfigError(
            "engine_kwargs.max_tokens_key must be max_tokens or max_completion_tokens, not "
            f"{kwargs['max_tokens_key']!r}"
        )
    if unknown := [name for name in kwargs["omit"] if name not in MAY_BE_OMITTED]:
        raise ConfigError(f"engine_kwargs.omit has {unknown[0]!r}; it may have {', '.join(MAY_BE_OMITTED)}")
    if taken := sorted(OWN_FIELDS.intersection(kwargs["extra_body"])):
        raise ConfigError(f"engine_kwargs.extra_body has {taken[0]!r}, which rollstream sets itself")
    return kwargs


def _create(options: EngineOptions) -> OpenAIEngine:
    return OpenAIEngine(
        options.server_urls,
        model_path=options.model_path,
        max_model_len=options.max_model_len,
        engine_kwargs=options.engine_kwargs,
    )


KIND = EngineKind("openai", _create, ENGINE_KWARGS, DATA_DECIDING_KWARGS, is_token_exact=False)
