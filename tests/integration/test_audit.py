"""`rollstream annotate` and `audit` of runs that real engines made, right and wrong ones."""

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from rollstream.cli import main
from rollstream.demo import MODEL_PATH
from rollstream.engine.hf import HFEngine
from rollstream.generation.run import run_generation
from rollstream.store.manifest import require_manifest, write_manifest
from rollstream.store.run import Run
from rollstream.trajectory import Completion, Rollout
from tests.integration.test_generation import PAIRS, config, write_sums
from tests.support.engines import started
from tests.support.forward import Asked, answer, demo_module, requests
from tests.support.view_runs import rollout, write_run

pytest.importorskip("torch")
TEACHER = ["--name", "teacher", "--model", str(MODEL_PATH)]


def audit(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["audit", str(root), "--json", *words])
    return code, orjson.loads(capsys.readouterr().out)


def recorded(asked: Asked, answers: list[Completion], first: int = 0) -> list[Rollout]:
    """Rollouts of these answers."""
    return [
        rollout(
            first + at,
            0,
            prompt_ids=prompt,
            length=len(one.token_ids),
            response_ids=one.token_ids,
            response_logprobs=one.logprobs,
            policy_versions=one.policy_versions,
            source="late" if first else "early",
        )
        for at, ((prompt, _), one) in enumerate(zip(asked, answers, strict=True))
    ]


@pytest.mark.parametrize("engine", ["openvino", "hf"])
def test_a_run_agrees_with_its_own_model_until_its_log_probs_are_shifted(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root, sums = tmp_path / "run", write_sums(tmp_path / "sums.jsonl", PAIRS)
    run_generation(config(root, sums, actor_rollout_ref__rollout__name=engine))
    assert main(["annotate", str(root), "--same"]) == 0
    code, found = audit(root, capsys, "--max-kl", "1e-4")
    tokens = sum(sum(mask.as_py()) for table in Run.open(root).rows(["response_mask"]) for mask in table[0])
    assert (code, found["tokens"], found["left_out"], found["notes"]) == (0, tokens, 0, [])
    assert found["k3"] < 1e-4 and abs(found["k1"]) < 1e-4 and found["largest"] < 1e-3
    rollouts = [*Run.open(root).rollouts(np.arange(len(PAIRS)))]
    for one in rollouts:
        values = one.final.response_logprobs or []
        one.final.response_logprobs = [value and value + 0.2 for value in values]
    shifted = write_run(tmp_path / "shifted", rollouts, n=2, prompts=len(PAIRS))
    assert main(["annotate", str(shifted), *TEACHER, "--engine", engine]) == 0
    code, found = audit(shifted, capsys, "--max-kl", "0.01")
    assert (code, found["beyond_bound"]) == (1, 1.0)
    assert found["k1"] == pytest.approx(0.2, abs=1e-3)
    assert found["k3"] == pytest.approx(np.exp(-0.2) - 1 + 0.2, abs=1e-3)
    assert main(["audit", str(shifted)]) == 0
    printed = capsys.readouterr().out
    assert "KL(sampler || stream): k1 0.2" in printed and "⟦" in printed


def test_another_temperature_and_mixed_weights_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = requests(12, longest=30)
    hot = [(prompt, replace(how, temperature=1.5)) for prompt, how in asked]

    async def ask() -> tuple[list[Completion], list[Completion], list[Completion]]:
        module = copy.deepcopy(demo_module())
        engine = HFEngine(MODEL_PATH, model=module, engine_kwargs={"num_threads": 1, "num_kv_blocks": 512})
        async with started(engine):
            first, at_once = await answer(engine, asked), await answer(engine, hot)
            moved = {name: tensor * 1.1 for name, tensor in module.state_dict().items()}
            await engine.load_state_dict(moved, 1)
            return first, at_once, await answer(engine, asked)

    first, at_once, later = asyncio.run(ask())
    mixed = write_run(
        tmp_path / "mixed",
        recorded(asked, first) + recorded(asked, later, len(asked)),
        n=1,
        prompts=2 * len(asked),
    )
    assert main(["annotate", str(mixed), *TEACHER, "--engine", "hf"]) == 0
    code, found = audit(mixed, capsys, "--max-kl", "0.01")
    versions = found["by"]["version"]
    assert code == 1 and versions["0"]["k3"] < 1e-6 and versions["1"]["k3"] > 0.01
    assert found["by"]["data_source"]["late"]["k3"] == versions["1"]["k3"]
    assert all(one["index"] >= len(asked) for one in found["worst"])
    heated = write_run(tmp_path / "heated", recorded(hot, at_once), n=1, prompts=len(asked))
    assert main(["annotate", str(heated), *TEACHER, "--engine", "hf"]) == 0
    code, found = audit(heated, capsys, "--max-kl", "0.01")
    assert code == 1 and found["k3"] > 0.01 and found["notes"] == []  # the run does not say how hot
    manifest = require_manifest(heated)
    rollouts = {"actor_rollout_ref": {"rollout": {"temperature": 1.5}}}
    write_manifest(heated, msgspec.structs.replace(manifest, config=rollouts, logprobs="processed"))
    assert "after temperature 1.5" in audit(heated, capsys)[1]["notes"][0]


def test_which_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_run(tmp_path / "run", [rollout(0, 0)], n=1, prompts=1)
    assert main(["audit", str(root)]) == 2
    assert "annotate" in capsys.readouterr().err
    assert main(["annotate", str(root), "--same"]) == 2  # it does not say by which engine
    for name in ("one", "two"):
        assert main(["annotate", str(root), "--name", name, "--model", str(MODEL_PATH)]) == 0
    assert main(["audit", str(root)]) == 2
    assert "one, two" in capsys.readouterr().err
    assert main(["audit", str(root), "--stream", "two"]) == 0


def test_the_likeliest_ids_are_those_of_a_forward_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    root, sums = tmp_path / "run", write_sums(tmp_path / "sums.jsonl", PAIRS[:3])
    run_generation(config(root, sums))
    assert main(["annotate", str(root), *TEACHER, "--engine", "openvino", "--top-k", "8"]) == 2
    assert "--engine hf" in capsys.readouterr().err
    assert main(["annotate", str(root), "--name", "top", *TEACHER[2:], "--engine", "hf", "--top-k", "8"]) == 0
    compared = 0
    columns = ["prompt_ids", "response_ids"]
    for table in Run.open(root).rows(columns, ["top", "top.top_ids", "top.top_logprobs"]):
        for row in table.to_pylist():
            ids, start = row["prompt_ids"] + row["response_ids"], len(row["prompt_ids"])
            with torch.no_grad():
                logits = demo_module()(torch.tensor([ids])).logits[0, start - 1 : -1]
            logprobs = logits.log_softmax(-1)
            for place, own in enumerate(row["stream.top.top_ids"]):
                values = row["stream.top.top_logprobs"][place]
                assert values == pytest.approx(logprobs[place].topk(8).values.tolist(), abs=1e-4)
                assert values == pytest.approx(logprobs[place, own].tolist(), abs=1e-4)
                compared += 1
    assert compared > 6
    assert audit(root, capsys, "--max-kl", "1e-4")[0] == 0
