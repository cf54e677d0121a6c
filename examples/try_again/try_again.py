"""An agent loop: the model answers, is told when it was wrong, and answers again."""

import asyncio
from typing import Any

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.conversation import Conversation
from rollstream.trajectory import SamplingParams, Trajectory


class TryAgain(AgentLoop):
    """Answers up to `max_tries` times."""

    def __init__(self, *args: Any, max_tries: int = 2, feedback: str = "Incorrect.", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_tries = max_tries
        self.feedback = feedback

    @classmethod
    def build_shared(cls, resources: AgentResources, **options: Any) -> asyncio.Semaphore:
        """Once for all rollouts of a worker: whatever checks answers takes eight calls at once."""
        return asyncio.Semaphore(8)

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        """Executes one rollout."""
        messages = row["raw_prompt"]
        prompt_ids = await self.render(messages, prompt_key=row["prompt_key"])
        conversation = Conversation(self, messages, prompt_ids, logprobs=sampling.logprobs)
        scores: list[float] = []
        while True:
            turn = await conversation.generate(sampling)
            reason: str = turn.completion.finish_reason
            if reason != "stop":
                break  # the response is full, or the engine aborted
            async with self.shared:  # a real check asks a sandbox or a service here
                right = turn.message["content"].strip() == str(row["ground_truth"])
            scores.append(float(right))
            if right:
                break
            if len(scores) == self.max_tries:
                reason = "max_turns"
                break
            if not conversation.add([{"role": "user", "content": self.feedback}]):
                reason = "length"
                break
        return conversation.trajectory(reason, extra={"turn_scores": scores})
