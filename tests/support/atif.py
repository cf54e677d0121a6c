"""What a document of ATIF 1.6 has to be, after the models of Harbor 0.25.0 (`harbor.models.trajectories`).

Objects have no other keys than those named, a null is as good as a missing one, and what is needed is there.
"""

from typing import Any

KEYS: dict[str, dict[str, Any]] = {
    "document": {
        **dict.fromkeys(("schema_version", "session_id", "notes", "continued_trajectory_ref"), str),
        **{"agent": dict, "steps": list, "final_metrics": dict, "extra": dict},
    },
    "agent": {
        **dict.fromkeys(("name", "version", "model_name"), str),
        "tool_definitions": list,
        "extra": dict,
    },
    "step": {
        **dict.fromkeys(("timestamp", "source", "model_name", "message", "reasoning_content"), str),
        **{"step_id": int, "reasoning_effort": (str, float), "is_copied_context": bool},
        **{"tool_calls": list, "observation": dict, "metrics": dict, "extra": dict},
    },
    "tool call": {"tool_call_id": str, "function_name": str, "arguments": dict},
    "observation": {"results": list},
    "result": {"source_call_id": str, "content": str, "subagent_trajectory_ref": list},
    "metrics": {
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), int),
        **{"cost_usd": float, "prompt_token_ids": list, "completion_token_ids": list},
        **{"logprobs": list, "extra": dict},
    },
    "final metrics": {
        **dict.fromkeys(("total_prompt_tokens", "total_completion_tokens", "total_cached_tokens"), int),
        **{"total_cost_usd": float, "total_steps": int, "extra": dict},
    },
}
NEEDED = {
    "document": {"schema_version", "session_id", "agent", "steps"},
    "agent": {"name", "version"},
    "step": {"step_id", "source", "message"},
    "tool call": {"tool_call_id", "function_name", "arguments"},
    "observation": {"results"},
}
OF_AGENTS = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def check_atif(document: dict[str, Any]) -> None:
    """Raises `ValueError`, saying what is wrong, where Harbor would refuse it."""
    _check("document", document)
    _check("agent", document["agent"])
    _check("final metrics", document.get("final_metrics") or {})
    _need(document["schema_version"] == "ATIF-v1.6", "schema_version")
    _need(bool(document["steps"]), "no steps")
    for number, step in enumerate(document["steps"], 1):
        _check("step", step)
        _need(step["step_id"] == number, "step_id")
        _need(step["source"] in ("system", "user", "agent"), "source")
        if step["source"] != "agent":
            _need(all(step.get(name) is None for name in OF_AGENTS), "what only an agent's step has")
        for call in step.get("tool_calls") or []:
            _check("tool call", call)
        if (observation := step.get("observation")) is not None:
            _check("observation", observation)
            known = {None, *(call["tool_call_id"] for call in step.get("tool_calls") or [])}
            for result in observation["results"]:
                _check("result", result)
                _need(result.get("source_call_id") in known, "source_call_id")
        metrics = step.get("metrics") or {}
        _check("metrics", metrics)
        for name, kind in (("prompt_token_ids", int), ("completion_token_ids", int), ("logprobs", float)):
            _need(all(type(one) is kind for one in metrics.get(name) or []), name)


def _check(what: str, found: dict[str, Any]) -> None:
    there = {name: value for name, value in found.items() if value is not None}
    _need(there.keys() <= KEYS[what].keys(), f"keys of {what}: {there.keys() - KEYS[what].keys()}")
    _need(there.keys() >= NEEDED.get(what, set()), f"{what} lacks {NEEDED.get(what, set()) - there.keys()}")
    for name, value in there.items():
        _need(isinstance(value, KEYS[what][name]), f"{what}.{name} is {value!r}")


def _need(right: bool, what: str) -> None:
    if not right:
        raise ValueError(what)
