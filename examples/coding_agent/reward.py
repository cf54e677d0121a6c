"""The reward of a coding task: whether what the agent left in its folder passes a test that it never saw."""

from pathlib import Path

from rollstream.gateway.sandbox import run_in_sandbox

TESTS = Path(__file__).parent / "hidden_tests"


async def compute_score(ground_truth, extra_info, **_):
    """1 if the test passes: run in the agent's folder, and in a sandbox like the agent's."""
    test = (TESTS / f"{ground_truth}.py").read_text()
    ended = await run_in_sandbox(
        extra_info["sandbox"],
        ["python", "hidden_test.py"],
        folder=extra_info["workdir"],
        files={"hidden_test.py": test},
        seconds=20,
    )
    return {"score": float(ended.code == 0), "output": ended.output[-500:]}
