"""A verl loop and a reward of a user's."""

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class PickyLoop(SingleTurnAgentLoop):
    """verl's single turn, which fails where the row says so and notes what it was told elsewhere."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        if (kwargs.get("extra_info") or {}).get("fails"):
            raise ValueError(f"row {kwargs['index']} is not to my taste")
        output = await super().run(sampling_params, **kwargs)
        output.extra_fields |= {"told": sorted(kwargs), "told_index": kwargs["index"], "odd": object()}
        output.reward_score = float(kwargs["index"])
        return output


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """1 when the answer is the number."""
    return float(solution_str.strip() == ground_truth)
