"""The reward of a coding task: whether what the agent left in its folder passes a test that it never saw."""

import secrets
from pathlib import Path

from rollstream.gateway.sandbox import run_in_sandbox

TESTS = Path(__file__).parent / "hidden_tests"


async def compute_score(ground_truth, extra_info, **_):
    """1 if the test passes: run in the agent's folder, and in a sandbox like the agent's.

    Exit code 0 alone does not say so: the agent's code may call `exit()` when it is imported.
    """
    passed = secrets.token_hex(16)
    test = (TESTS / f"{ground_truth}.py").read_text() + f"\nprint({passed!r})\n"
    ended = await run_in_sandbox(
        extra_info["sandbox"],
        ["python", "hidden_test.py"],
        folder=extra_info["workdir"],
        files={"hidden_test.py": test},
        seconds=20,
    )
    return {"score": float(ended.code == 0 and passed in ended.output), "output": ended.output[-500:]}
