"""OpenAI's routes: `/v1/completions`, `/v1/chat/completions` and the list of models."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from aiohttp import web

from rollstream.chat.wires import openai_chat as wire
from rollstream.chat.wires.requests import HARMLESS, NEUTRAL, RequestError, read_parameters, request_object
from rollstream.serving.model import ServedModel
from rollstream.serving.service import EngineRequest, EngineService, build_sampling, samples
from rollstream.trajectory import Completion
from rollstream.web import Request, Route, json_response

_NEUTRAL = {**NEUTRAL, "suffix": "", "best_of": 1}

_COMPLETION_TOKENS = 16
"""Where a request for a completion does not say, as at OpenAI."""


class CompletionRequest(wire.OpenAIRequest, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: Any
    logprobs: int | None = None
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class OpenAIRoutes:
    """The handlers. The engine gives whole completions, so what goes wrong has its status also for a stream."""

    model: ServedModel
    service: EngineService

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/completions", self.complete),
            Route("POST", "/v1/chat/completions", self.chat),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{name...}", self.one_model),
        ]

    async def models(self, request: Request) -> web.Response:
        return json_response({"object": "list", "data": [self._describe()]})

    async def one_model(self, request: Request) -> web.Response:
        self._check(request.params["name"])
        return json_response(self._describe())

    async def complete(self, request: Request) -> web.Response:
        """Texts or token ids in, text out, and token ids if asked for."""
        capabilities = self.service.capabilities

        def read(body: dict[str, Any]) -> tuple[CompletionRequest, list[list[int]]]:
            asked = read_parameters(body, CompletionRequest, harmless=HARMLESS, neutral=_NEUTRAL)
            self._check(asked.model)
            asked.check_stream_options()
            if asked.logprobs:
                raise RequestError(
                    "this engine gives the log-prob of the sampled token and of no other: use logprobs=0",
                    param="logprobs",
                )
            limit, most = self.service.limit, self.service.max_queue
            return asked, self.model.read_prompts(asked.prompt, "prompt", limit, most=most)[0]

        asked, prompts = await request_object(request, read)
        logprobs = asked.logprobs is not None
        sampling = build_sampling(asked, capabilities, max_tokens=_COMPLETION_TOKENS, logprobs=logprobs)
        name = asked.answer_id("cmpl")
        answers = await self.service.generate(
            sample
            for at, prompt in enumerate(prompts)
            for sample in samples(f"{name}_{at}", prompt, sampling, asked.n)
        )
        completions = [completion for _, completion in answers]
        choices = [
            {"index": index, **self._choice(sample, completion, asked)}
            for index, (sample, completion) in enumerate(answers)
        ]
        head = wire.envelope("text_completion", name, self.model.name, completions)
        used = wire.usage(prompts, completions)
        if not asked.stream:
            return json_response({**head, "choices": choices, "usage": used})
        chunks = [{**head, "choices": [choice]} for choice in choices]
        return _stream(wire.with_usage(chunks, asked, head, used))

    async def chat(self, request: Request) -> web.Response:
        """Messages and tools in, a message out."""
        model, limit = self.model, self.service.limit

        def read(body: dict[str, Any]) -> tuple[wire.ChatRequest, list[int]]:
            asked = wire.read_chat(body)
            self._check(asked.model)
            if model.tokenizer.characters_beyond(limit, asked.messages, asked.tools):
                raise _too_long(f"are far longer than {limit} tokens")
            prompt_ids = model.tokenizer.render(
                asked.messages,
                tools=asked.tools or None,
                continue_final_message=asked.continue_final_message,
            )
            if len(prompt_ids) >= limit:
                raise _too_long(
                    f"have {len(prompt_ids)} tokens, which leaves no room for an answer in {limit}"
                )
            return asked, prompt_ids

        asked, prompt_ids = await request_object(request, read)
        sampling = build_sampling(
            asked,
            self.service.capabilities,
            max_tokens=limit - len(prompt_ids),
            logprobs=asked.logprobs,
            more_stop_ids=model.parser_stop_ids if asked.tools else (),
        )
        name = asked.answer_id("chatcmpl")
        answers = await self.service.generate(samples(name, prompt_ids, sampling, asked.n))
        # An answer that goes on with a message begins in its text: thinking that it opened has been closed.
        in_thinking = not asked.continue_final_message and model.template.in_thinking(prompt_ids)
        choices = []
        for _, completion in answers:
            sampled = model.read(completion, sampling, skip_special_tokens=False)
            parsed = model.parser.parse(sampled.text, in_thinking=in_thinking, tools=asked.tools)
            message = wire.assistant_message(parsed, model.special_texts, tools=bool(asked.tools))
            texts = model.token_texts(completion.token_ids) if asked.logprobs else None
            choices.append(wire.Choice(message, completion, texts, sampled.stop_reason))
        answer = wire.ChatAnswer(name, model.name, prompt_ids, choices)
        return _stream(answer.chunks(asked)) if asked.stream else json_response(answer.body(asked))

    def _describe(self) -> dict[str, Any]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.model.created,
            "owned_by": "rollstream",
            "root": self.model.path,
            "parent": None,
            "max_model_len": self.service.limit,
        }

    def _choice(
        self, sample: EngineRequest, completion: Completion, asked: CompletionRequest
    ) -> dict[str, Any]:
        ids = completion.token_ids
        read = self.model.read(completion, sample.sampling, skip_special_tokens=asked.skip_special_tokens)
        choice: dict[str, Any] = {
            "text": read.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": read.stop_reason,
        }
        if completion.logprobs is not None:
            texts = self.model.token_texts(ids)
            choice["logprobs"] = {
                "tokens": wire.token_names(ids, texts, as_ids=asked.return_tokens_as_token_ids),
                "token_logprobs": completion.logprobs,
                "top_logprobs": None,
                "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
            }
        if asked.return_token_ids:
            choice |= {"prompt_token_ids": sample.prompt_ids, "token_ids": ids}
        return choice

    def _check(self, name: str | None) -> None:
        """Refuses another model than the one that is served; no name means that one."""
        if name not in (None, self.model.name, self.model.path):
            raise RequestError(
                f"the model {name!r} is not served here, but {self.model.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )


def _too_long(why: str) -> RequestError:
    return RequestError(f"the messages {why}", param="messages", code="context_length_exceeded")


def _stream(chunks: Sequence[dict[str, Any]]) -> web.Response:
    return web.Response(
        body=wire.event_stream(chunks),
        content_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )
