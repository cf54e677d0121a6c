"""Trajectories in the formats of other programmes: ATIF (Harbor) and the log of inspect_ai.

ATIF, the Agent Trajectory Interchange Format, version 1.6: a JSON document a trajectory, here one a line. An
assistant's message is a step of the agent, and the tool results behind it are that step's observation. The models of
`harbor.models.trajectories` (Harbor 0.25.0) accept it; tests/support/atif.py says what they ask for.

inspect_ai's log (`.eval`) is a zip: `header.json`, `summaries.json`, a file of each sample below `samples/`. A sample
is a prompt row, an epoch a rollout of it. Written without inspect_ai, as its version 0.3.285 writes it.
"""

import datetime
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from math import isfinite
from pathlib import Path
from typing import Any

import orjson

import rollstream
from rollstream.integrations.exports.examples import Row, prompt_groups
from rollstream.store.export.dataproto import shown_prompt
from rollstream.store.export.files import export_lines, replacing
from rollstream.store.manifest import Manifest
from rollstream.trajectory import sampled_stretches

_ATIF_VERSION = "ATIF-v1.6"

_STOP_REASONS = {"stop": "stop", "length": "max_tokens"}
"""Those of inspect_ai; any other is `unknown`."""


def export_atif(
    artifact: Path, target: Path, manifest: Manifest, cancelled: Callable[[], bool] = lambda: False
) -> int:
    """Writes one document a line, snapshots included; returns how many. Raises as `export_lines`."""
    return export_lines(artifact, target, partial(_atif, manifest=manifest), cancelled)


def _atif(row: Row, *, manifest: Manifest) -> Row:
    prompt = shown_prompt(row)
    calls = _calls(row) if prompt is not None and row["prompt_ids"] else []
    prompt_tokens = sum(call["prompt_tokens"] for call in calls)
    if not calls and row["metrics"]["engine_calls"] <= 1:
        prompt_tokens = row["prompt_tokens"]
    steps: list[Row] = []
    for number, message in enumerate(row["messages"] or [{"role": "assistant"}]):
        role = message.get("role")
        if role == "tool" and steps and steps[-1]["source"] == "agent":
            _observe(steps[-1], message)
            continue
        source = {"assistant": "agent", "system": "system", "developer": "system"}.get(str(role), "user")
        step: Row = {"step_id": len(steps) + 1, "source": source, "message": _text(message.get("content"))}
        if source == "agent":
            if reasoning := message.get("reasoning_content"):
                step["reasoning_content"] = str(reasoning)
            if tool_calls := _tool_calls(message):
                names = {"tool_call_id": "id", "function_name": "function", "arguments": "arguments"}
                step["tool_calls"] = [{key: call[name] for key, name in names.items()} for call in tool_calls]
            if prompt is not None and number >= len(prompt) and calls:
                step["metrics"] = calls.pop(0)
        if row["trajectory"] and prompt is not None and number < len(prompt):
            step["is_copied_context"] = True  # the trajectory before has it, too
        steps.append(step)
    key = ("index", "repeat", "trajectory", "prompt_key", "data_source", "ground_truth")
    return {
        "schema_version": _ATIF_VERSION,
        "session_id": f"{manifest.run_id}-{row['index']}-{row['repeat']}-{row['trajectory']}",
        "agent": {"name": "rollstream", "version": rollstream.__version__, "model_name": _model(manifest)},
        "steps": steps,
        "final_metrics": {
            **({"total_prompt_tokens": prompt_tokens} if prompt_tokens else {}),
            "total_completion_tokens": row["sampled_tokens"],
            "total_steps": len(steps),
            "extra": {"reward": row["reward"], "reward_extra": row["reward_extra"]},
        },
        "extra": {name: row[name] for name in (*key, "finish_reason", "is_snapshot")},
    }


def _observe(step: Row, message: Row) -> None:
    """Adds a tool's result to the step that called it."""
    observation = step.setdefault("observation", {"results": []})
    ids = [call["tool_call_id"] for call in step.get("tool_calls", [])]
    source, before = message.get("tool_call_id"), len(observation["results"])
    if source not in ids:  # results without an id stand in the order of the calls
        source = ids[before] if before < len(ids) else None
    result = {"content": _text(message.get("content"))}
    observation["results"].append({"source_call_id": source, **result} if source else result)


def _calls(row: Row) -> list[Row]:
    """What each engine call saw and sampled."""
    calls = []
    for start, end in sampled_stretches(row["response_mask"]):
        seen, ids = row["prompt_ids"] + row["response_ids"][:start], row["response_ids"][start:end]
        call = {"prompt_tokens": len(seen), "completion_tokens": len(ids), "prompt_token_ids": seen}
        call["completion_token_ids"] = ids
        logprobs = (row["response_logprobs"] or [])[start:end]
        if logprobs and all(map(isfinite, logprobs)):  # JSON has no others
            call["logprobs"] = logprobs
        calls.append(call)
    return calls


def _text(content: Any) -> str:
    """A message's content as text; what is no text is named: `[image]`."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
    kinds = (str(part.get("type", "part")).removesuffix("_url") for part in parts)
    return "\n".join(str(part.get("text", f"[{kind}]")) for part, kind in zip(parts, kinds, strict=True))


def _tool_calls(message: Row) -> list[Row]:
    """`id`, `function`, `arguments` (an object) of each call of a message; a call without an id gets one."""
    calls = []
    for number, call in enumerate(message.get("tool_calls") or []):
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments)
            except ValueError:
                arguments = {"raw": arguments}
        if not isinstance(arguments, dict):
            arguments = {} if arguments is None else {"raw": arguments}
        name, identity = str(function.get("name", "")), str(call.get("id") or f"call_{number}")
        calls.append({"id": identity, "function": name, "arguments": arguments})
    return calls


def _model(manifest: Manifest) -> str:
    model = manifest.setting("actor_rollout_ref", "model")
    return str(model.get("path") or "unknown").rstrip("/").rpartition("/")[2]


def export_inspect(
    artifact: Path, target: Path, manifest: Manifest, cancelled: Callable[[], bool] = lambda: False
) -> int:
    """Writes a log of inspect_ai; returns its samples, one a rollout. Raises as `export_atif`."""
    model = _model(manifest)
    prompts, rewards, times, summaries = 0, list[float](), list[float](), list[Row]()
    with (
        replacing(target) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        for group in prompt_groups(artifact, cancelled):
            prompts += bool(group)
            for row in group:
                sample = _sample(row, model)
                archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", orjson.dumps(sample))
                summaries.append(_summary(sample))
                rewards += [] if row["reward"] is None else [row["reward"]]
                times += [] if row["finished_at"] is None else [row["finished_at"]]
        first, last = (_iso(min(times)), _iso(max(times))) if times else ("", "")
        spec: Row = {
            "eval_id": manifest.run_id,
            "run_id": manifest.run_id,
            "created": first or _iso(0.0),
            "task": "rollstream",
            "task_id": manifest.run_id,
            "dataset": {"name": "prompts", "samples": prompts},
            "model": model,
            "config": {"epochs": max([1, *(sample["epoch"] for sample in summaries)])},
            "packages": {"rollstream": rollstream.__version__},
            "metadata": {"rollstream": {"run_id": manifest.run_id, "created": manifest.created}},
        }
        count, scores = len(summaries), list[Row]()
        if rewards:
            mean = {"name": "mean", "value": sum(rewards) / len(rewards)}
            score = {"name": "reward", "scorer": "reward", "scored_samples": len(rewards)}
            scores.append(score | {"unscored_samples": count - len(rewards), "metrics": {"mean": mean}})
        begin: Row = {"version": 2, "eval": spec, "plan": {"name": "plan", "steps": [], "config": {}}}
        header = begin | {
            "status": "success",
            "results": {"total_samples": count, "completed_samples": count, "scores": scores},
            "stats": {"started_at": first, "completed_at": last},
        }
        archive.writestr("_journal/start.json", orjson.dumps(begin))
        archive.writestr("summaries.json", orjson.dumps(summaries))
        archive.writestr("header.json", orjson.dumps(header))
    return count


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _sample(row: Row, model: str) -> Row:
    messages, prompt = [_chat_message(message) for message in row["messages"]], shown_prompt(row)
    before_answer = takewhile(lambda message: message["role"] != "assistant", messages)
    shown = len(list(before_answer)) if prompt is None else len(prompt)
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    text, truth = _text(answer["content"]) if answer else "", row["ground_truth"]
    usage = {"input_tokens": row["prompt_tokens"], "output_tokens": row["sampled_tokens"]}
    usage["total_tokens"] = row["prompt_tokens"] + row["sampled_tokens"]
    output: Row = {"model": model, "choices": [], "completion": text, "usage": usage}
    if answer:
        reason = _STOP_REASONS.get(row["finish_reason"], "unknown")
        output["choices"] = [{"message": answer, "stop_reason": reason}]
    facts = ("data_source", "prompt_key", "finish_reason", "attempts", "num_turns", "extra")
    sample: Row = {
        "id": row["index"],
        "epoch": row["repeat"] + 1,
        "input": messages[:shown],
        "target": truth if isinstance(truth, str) else "" if truth is None else orjson.dumps(truth).decode(),
        "messages": messages,
        "output": output,
        "scores": {},
        "metadata": {name: row[name] for name in facts},
        "store": {},
        "events": [],
        "model_usage": {model: usage},
        "total_time": row["metrics"]["total_s"],
        "working_time": row["metrics"]["generate_s"] + row["metrics"]["tool_s"],
    }
    if row["reward"] is not None:
        sample["scores"]["reward"] = {"value": row["reward"], "answer": text, "metadata": row["reward_extra"]}
    if row["finish_reason"] == "length":
        sample["limit"] = {"type": "token", "limit": row["sampled_tokens"]}
    return sample


def _summary(sample: Row) -> Row:
    """A sample as inspect_ai's list shows it."""
    kept = {name: sample[name] for name in ("id", "epoch", "target", "model_usage", "total_time")}
    kept["scores"] = {
        name: {"value": score["value"], "answer": score["answer"][:200]}
        for name, score in sample["scores"].items()
    }
    kept["input"] = _text(sample["input"][-1]["content"])[:500] if sample["input"] else ""
    return kept | {"completed": True, "message_count": len(sample["messages"])}


def _chat_message(message: Row) -> Row:
    role = "system" if message.get("role") == "developer" else message.get("role")
    role = role if role in ("system", "user", "assistant", "tool") else "user"
    known: Row = {"role": role, "content": _text(message.get("content"))}
    if role == "assistant":
        if reasoning := message.get("reasoning_content"):
            thought = {"type": "reasoning", "reasoning": str(reasoning)}
            known["content"] = [thought, {"type": "text", "text": known["content"]}]
        if calls := _tool_calls(message):
            known["tool_calls"] = [{**call, "type": "function"} for call in calls]
    if role == "tool":
        named = {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
        known |= {name: str(value) for name, value in named.items() if value}
    return known
