"""OpenAI's routes: `/v1/completions`, `/v1/chat/completions` and the list of models."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Any

from aiohttp import web

from rollstream.chat.wires import openai_chat as wire
from rollstream.chat.wires.requests import (
    HARMLESS,
    NEUTRAL,
    RequestError,
    read_parameters,
    request_object,
)
from rollstream.serving.model import ServedModel
from rollstream.serving.service import EngineRequest, EngineService, build_sampling, samples
from rollstream.trajectory import Completion
from rollstream.web import Request, Route, json_response

_NEUTRAL = {**NEUTRAL, "suffix": "", "best_of": 1}

_COMPLETION_TOKENS = 16
"""Where a request for a completion does not say, as at OpenAI."""

_CHAT_TOKENS = 1024
"""Of a chat's answer, where neither the request nor the engine has a limit."""


class CompletionRequest(wire.OpenAIRequest, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: Any
    logprobs: int | None = None
    skip_special_tokens: bool = True


class OpenAIRoutes:
    """The handlers. The engine gives whole completions, so what goes wrong has its status also for a stream."""

    def __init__(self, model: ServedModel, service: EngineService) -> None:
        self._model = model
        self._service = service

    def routes(self) -> list[Route]:
        """What goes where."""
        return [
            Route("POST", "/v1/completions", self.complete),
            Route("POST", "/v1/chat/completions", self.chat),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{name...}", self.one_model),
        ]

    async def models(self, request: Request) -> web.Response:
        """The one that is served."""
        return json_response({"object": "list", "data": [self._describe()]})

    async def one_model(self, request: Request) -> web.Response:
        """The same by its name."""
        self._check(request.params["name"])
        return json_response(self._describe())

    def _describe(self) -> dict[str, Any]:
        capabilities = self._service.capabilities
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "rollstream",
            "root": self._model.path,
            "parent": None,
            "max_model_len": capabilities.max_model_len,
            # No field of OpenAI's or vLLM's: spares our own client the questions that it asks a vLLM.
            "capabilities": asdict(capabilities),
        }

    async def complete(self, request: Request) -> web.Response:
        """Texts or token ids in, text out, and token ids if asked for."""
        read = partial(read_parameters, kind=CompletionRequest, harmless=HARMLESS, neutral=_NEUTRAL)
        asked = await request_object(request, read)
        self._check(asked.model)
        asked.check_stream_options()
        if asked.logprobs:
            raise RequestError(
                "this engine gives the log-prob of the sampled token and of no other: use logprobs=0",
                param="logprobs",
            )
        capabilities = self._service.capabilities
        sampling = build_sampling(
            asked, capabilities, max_tokens=_COMPLETION_TOKENS, logprobs=asked.logprobs is not None
        )
        prompts, _ = await self._model.read_prompts(
            asked.prompt, "prompt", capabilities.max_model_len, most=self._service.max_queue
        )
        self._service.check_count(len(prompts) * asked.n)
        name = asked.answer_id("cmpl")
        requests = [
            one
            for at, prompt in enumerate(prompts)
            for one in samples(f"{name}_{at}", prompt, sampling, asked.n)
        ]
        completions = await self._service.generate(name, requests)
        choices = [
            self._choice(index, one, completion, asked)
            for index, (one, completion) in enumerate(zip(requests, completions, strict=True))
        ]
        head = wire.envelope("text_completion", name, self._model.name, completions)
        used = wire.usage(prompts, completions)
        if not asked.stream:
            return json_response({**head, "choices": choices, "usage": used})
        chunks = [{**head, "choices": [choice]} for choice in choices]
        return _stream(wire.with_usage(chunks, asked, head, used))

    def _choice(
        self, index: int, request: EngineRequest, completion: Completion, asked: CompletionRequest
    ) -> dict[str, Any]:
        ids = completion.token_ids
        read = self._model.read(completion, request.sampling, skip_special_tokens=asked.skip_special_tokens)
        choice: dict[str, Any] = {
            "index": index,
            "text": read.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": read.stop_reason,
        }
        if completion.logprobs is not None:
            texts = self._model.token_texts(ids)
            choice["logprobs"] = {
                "tokens": wire.token_names(ids, texts, as_ids=asked.return_tokens_as_token_ids),
                "token_logprobs": completion.logprobs,
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
            }
        if asked.return_token_ids:
            choice |= {"prompt_token_ids": request.prompt_ids, "token_ids": ids}
        return choice

    async def chat(self, request: Request) -> web.Response:
        """Messages and tools in, a message out."""
        model, capabilities = self._model, self._service.capabilities
        limit = capabilities.max_model_len

        def read_body(body: dict[str, Any]) -> tuple[wire.ChatRequest, list[int]]:
            asked = wire.read_chat(body)
            self._check(asked.model)
            if limit is not None and model.tokenizer.characters_beyond(limit, asked.messages, asked.tools):
                raise RequestError(
                    f"the messages are far longer than {limit} tokens",
                    param="messages",
                    code="context_length_exceeded",
                )
            prompt_ids = model.tokenizer.render(
                asked.messages,
                tools=asked.tools or None,
                continue_final_message=asked.continue_final_message,
            )
            return asked, prompt_ids

        asked, prompt_ids = await request_object(request, read_body)
        if limit is not None and len(prompt_ids) >= limit:
            raise RequestError(
                f"the messages have {len(prompt_ids)} tokens, which leaves no room for an answer in {limit}",
                param="messages",
                code="context_length_exceeded",
            )
        sampling = build_sampling(
            asked,
            capabilities,
            max_tokens=_CHAT_TOKENS if limit is None else limit - len(prompt_ids),
            logprobs=asked.logprobs,
            more_stop_ids=model.parser_stop_ids if asked.tools else (),
        )
        self._service.check_count(asked.n)
        name = asked.answer_id("chatcmpl")
        completions = await self._service.generate(name, list(samples(name, prompt_ids, sampling, asked.n)))
        # What an answer goes on with is text: thinking that it opened has been closed.
        in_thinking = not asked.continue_final_message and model.template.in_thinking(prompt_ids)
        choices = []
        for completion in completions:
            read = model.read(completion, sampling, skip_special_tokens=False)
            parsed = model.parser.parse(read.text, in_thinking=in_thinking, tools=asked.tools)
            message = wire.assistant_message(parsed, model.special_texts, tools=bool(asked.tools))
            texts = model.token_texts(completion.token_ids) if asked.logprobs else None
            choices.append(wire.Choice(message, completion, texts, read.stop_reason))
        answer = wire.ChatAnswer(name, model.name, prompt_ids, choices)
        return _stream(answer.chunks(asked)) if asked.stream else json_response(answer.body(asked))

    def _check(self, name: str | None) -> None:
        """Refuses another model than the one that is served; no name means that one."""
        if name is not None and name not in (self._model.name, self._model.path):
            raise RequestError(
                f"the model {name!r} is not served here, but {self._model.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )


def _stream(chunks: Sequence[dict[str, Any]]) -> web.Response:
    return web.Response(
        body=wire.event_stream(chunks),
        content_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )
