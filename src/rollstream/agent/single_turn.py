"""The simplest loop: one prompt, one answer."""

from dataclasses import replace
from typing import Any

from rollstream.agent.base import AgentLoop
from rollstream.agent.tokens import TokenTrack
from rollstream.errors import EngineError
from rollstream.trajectory import Message, SamplingParams, Trajectory


class SingleTurnAgent(AgentLoop):
    """Renders the prompt, generates once, ends."""

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        messages: list[Message] = row["raw_prompt"]
        tools = self.with_row_tools(self.prompts.tools, row)
        prompt_ids = await self.render(
            messages, prompt_key=row["prompt_key"], tools=tools, images=row.get("images") or ()
        )
        limit = min(sampling.max_tokens, self.room(len(prompt_ids), 0))
        if limit < 1:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens leaves no room for a response in "
                f"{self.resources.max_model_len} tokens"
            )
        track = TokenTrack(prompt_ids, logprobs=sampling.logprobs)
        completion = await self.generate(
            prompt_ids, sampling if limit == sampling.max_tokens else replace(sampling, max_tokens=limit)
        )
        track.add_sampled(completion)
        text = self.tokenizer.decode(self.opened(prompt_ids) + completion.token_ids)
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=track.response_ids,
            response_mask=track.response_mask,
            response_logprobs=track.response_logprobs,
            policy_versions=track.policy_versions,
            messages=[*messages, {"role": "assistant", "content": text}],
            finish_reason="aborted" if completion.finish_reason == "abort" else completion.finish_reason,
            num_turns=2,
            metrics=self.metrics,
        )
