"""Trajectories in the formats of other programmes: ATIF (Harbor) and the log of inspect_ai.

ATIF, the Agent Trajectory Interchange Format, version 1.6: a JSON document a trajectory, here one a line. An
assistant's message is a step of the agent, and the tool results behind it are that step's observation. The models of
`harbor.models.trajectories` (Harbor 0.25.0) accept it; tests/support/atif.py says what they ask for.

inspect_ai's log (`.eval`) is a zip: `header.json`, `summaries.json`, a file of each sample below `samples/`. A sample
is a prompt row, an epoch a rollout of it. Written without inspect_ai, as its version 0.3.285 writes it.
"""

import datetime
import zipfile
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import orjson

import rollstream
from rollstream.integrations.exports.examples import Row, prompt_groups, shown_prompt
from rollstream.store.batch import read_tables
from rollstream.store.export.files import read_rows, replacing
from rollstream.store.manifest import Manifest
from rollstream.trajectory import sampled_stretches

_ATIF_VERSION = "ATIF-v1.6"

_STOP_REASONS = {"stop": "stop", "length": "max_tokens"}
"""Those of inspect_ai; any other is `unknown`."""


def export_atif(
    artifact: Path, target: Path, manifest: Manifest, cancelled: Callable[[], bool] = lambda: False
) -> int:
    """Writes one document a line, snapshots included; returns how many.

    Raises:
        DamageError: the artifact is damaged.
        StorageError: `target` cannot be written.
        MergeCancelledError: `cancelled` said so. An older `target` stays.
    """
    lines = 0
    with replacing(target) as temporary, temporary.open("wb") as file:
        for row in read_rows(artifact, cancelled):
            file.write(orjson.dumps(_atif(row, manifest), option=orjson.OPT_APPEND_NEWLINE))
            lines += 1
    return lines


def _atif(row: Row, manifest: Manifest) -> Row:
    prompt = shown_prompt(row)
    calls = _calls(row) if prompt is not None and row["prompt_ids"] else []
    prompt_tokens = sum(call["prompt_tokens"] for call in calls)
    if not calls and row["metrics"]["engine_calls"] <= 1:
        prompt_tokens = row["prompt_tokens"]
    steps: list[Row] = []
    for number, message in enumerate(row["messages"] or [{"role": "assistant"}]):
        role = message.get("role")
        if role == "tool" and steps and steps[-1]["source"] == "agent":
            observation = steps[-1].setdefault("observation", {"results": []})
            asked = [call["tool_call_id"] for call in steps[-1].get("tool_calls", [])]
            source, given = message.get("tool_call_id"), len(observation["results"])
            if source not in asked:  # results without an id stand in the order of the calls
                source = asked[given] if given < len(asked) else None
            result = {"content": _text(message.get("content"))}
            observation["results"].append({"source_call_id": source, **result} if source else result)
            continue
        source = {"assistant": "agent", "system": "system", "developer": "system"}.get(str(role), "user")
        step: Row = {"step_id": len(steps) + 1, "source": source, "message": _text(message.get("content"))}
        if source == "agent":
            if reasoning := message.get("reasoning_content"):
                step["reasoning_content"] = str(reasoning)
            if asked_for := _tool_calls(message):
                step["tool_calls"] = [
                    {
                        "tool_call_id": call["id"],
                        "function_name": call["function"],
                        "arguments": call["arguments"],
                    }
                    for call in asked_for
                ]
            if prompt is not None and number >= len(prompt) and calls:
                step["metrics"] = calls.pop(0)
        if row["trajectory"] and prompt is not None and number < len(prompt):
            step["is_copied_context"] = True  # the trajectory before has it, too
        steps.append(step)
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
        "extra": {
            name: row[name]
            for name in (
                *("index", "repeat", "trajectory", "prompt_key", "data_source", "ground_truth"),
                *("finish_reason", "is_snapshot"),
            )
        },
    }


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
    parts = [one if isinstance(one, dict) else {"text": str(one)} for one in content]
    return "\n".join(
        str(part["text"]) if "text" in part else f"[{str(part.get('type', 'part')).removesuffix('_url')}]"
        for part in parts
    )


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
    count, prompts, epochs, total, scored = 0, 0, 0, 0.0, 0
    summaries: list[Row] = []
    first, last = _times(artifact)
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
                count, epochs = count + 1, max(epochs, sample["epoch"])
                if row["reward"] is not None:
                    total, scored = total + row["reward"], scored + 1
        spec: Row = {
            "eval_id": manifest.run_id,
            "run_id": manifest.run_id,
            "created": first or _iso(0.0),
            "task": "rollstream",
            "task_id": manifest.run_id,
            "dataset": {"name": "prompts", "samples": prompts},
            "model": model,
            "config": {"epochs": max(1, epochs)},
            "packages": {"rollstream": rollstream.__version__},
            "metadata": {"rollstream": {"run_id": manifest.run_id, "created": manifest.created}},
        }
        plan = {"name": "plan", "steps": [], "config": {}}
        metrics = {"mean": {"name": "mean", "value": total / scored}} if scored else {}
        score = {"name": "reward", "scorer": "reward", "scored_samples": scored, "metrics": metrics}
        score |= {"unscored_samples": count - scored}
        header: Row = {
            "version": 2,
            "status": "success",
            "eval": spec,
            "plan": plan,
            "results": {
                "total_samples": count,
                "completed_samples": count,
                "scores": [score] if scored else [],
            },
            "stats": {"started_at": first, "completed_at": last},
        }
        archive.writestr("_journal/start.json", orjson.dumps({"version": 2, "eval": spec, "plan": plan}))
        archive.writestr("summaries.json", orjson.dumps(summaries))
        archive.writestr("header.json", orjson.dumps(header))
    return count


def _times(artifact: Path) -> tuple[str, str]:
    """When the first and the last rollout were done; empty where that is not known."""
    times: list[float] = []
    for table in read_tables(artifact, ["finished_at"]):
        times += [one for one in table["finished_at"].to_pylist() if one is not None]
        times = [min(times), max(times)] if times else []
    return (_iso(times[0]), _iso(times[1])) if times else ("", "")


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _sample(row: Row, model: str) -> Row:
    messages = [_chat_message(message) for message in row["messages"]]
    prompt = shown_prompt(row)
    shown = len(prompt) if prompt is not None else _first_answer(messages)
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    text = _text(answer["content"]) if answer else ""
    usage = {"input_tokens": row["prompt_tokens"], "output_tokens": row["sampled_tokens"]}
    usage["total_tokens"] = row["prompt_tokens"] + row["sampled_tokens"]
    truth = row["ground_truth"]
    output: Row = {"model": model, "choices": [], "completion": text, "usage": usage}
    if answer:
        reason = _STOP_REASONS.get(row["finish_reason"], "unknown")
        output["choices"] = [{"message": answer, "stop_reason": reason}]
    sample: Row = {
        "id": row["index"],
        "epoch": row["repeat"] + 1,
        "input": messages[:shown],
        "target": truth if isinstance(truth, str) else "" if truth is None else orjson.dumps(truth).decode(),
        "messages": messages,
        "output": output,
        "scores": {},
        "metadata": {
            **{
                name: row[name]
                for name in ("data_source", "prompt_key", "finish_reason", "attempts", "num_turns")
            },
            "extra": row["extra"],
        },
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
    kept = {name: sample[name] for name in ("id", "epoch", "target", "scores", "model_usage", "total_time")}
    scores = {
        name: {"value": score["value"], "answer": score["answer"][:200]}
        for name, score in kept["scores"].items()
    }
    question = sample["input"][-1:]
    text = _text(question[0]["content"])[:500] if question else ""
    return kept | {
        "scores": scores,
        "input": text,
        "completed": True,
        "message_count": len(sample["messages"]),
    }


def _first_answer(messages: Sequence[Row]) -> int:
    answers = (at for at, message in enumerate(messages) if message["role"] == "assistant")
    return next(answers, len(messages))


def _chat_message(message: Row) -> Row:
    role = "system" if message.get("role") == "developer" else message.get("role")
    role = role if role in ("system", "user", "assistant", "tool") else "user"
    content = _text(message.get("content"))
    reasoning = message.get("reasoning_content")
    known: Row = {"role": role, "content": content}
    if role == "assistant":
        if reasoning:
            known["content"] = [
                {"type": "reasoning", "reasoning": str(reasoning)},
                {"type": "text", "text": content},
            ]
        if calls := _tool_calls(message):
            known["tool_calls"] = [{**call, "type": "function"} for call in calls]
    if role == "tool":
        known |= {
            name: str(message[key])
            for name, key in (("tool_call_id", "tool_call_id"), ("function", "name"))
            if message.get(key)
        }
    return known
