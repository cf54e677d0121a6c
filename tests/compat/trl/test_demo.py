"""The training demo runs: its environment, its optimizer, its curve, its figures."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("openvino_genai")

from demo_model import grpo


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 0])
def test_the_training_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ahead: int
) -> None:
    def measure(*_: Any) -> dict[str, float]:
        return {"sampled": 0.5, "expected": 0.6}

    monkeypatch.setattr(grpo, "measure", measure)
    monkeypatch.setattr(grpo, "_CURVE_PROBLEMS", 8)
    plan = grpo.Plan(steps=6, prompts=4, repeats=2, warm_up=1, every=2, stop_after=4)
    run = grpo.train(plan, seed=0, ahead=ahead, out=tmp_path)
    grpo.show(run)
    assert (run.steps, [step for step, _, _ in run.curve]) == (4, [0, 2, 4])
    assert run.times["steps"] == 2 and max(map(int, run.times["staleness"])) == ahead
    assert (tmp_path / f"model-0-{ahead}" / "model.safetensors").exists()
    assert json.loads(json.dumps(asdict(run)))["end"] == {"sampled": 0.5, "expected": 0.6}
    assert "+0.0 points at temperature 1 (+0.0 as sampled) in 4 steps" in capsys.readouterr().out
