"""The page docs/verifiers.md: its commands and programs, exactly as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("verifiers")
pytest.importorskip("openvino_genai")

from tests.compat.verifiers.parts import IS_V1

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "verifiers.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not IS_V1, reason="the page's environment is of verifiers 0.3 and later")
def test_the_example_runs(tmp_path: Path) -> None:
    (tmp_path / "src").symlink_to(ROOT / "src")
    program = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "sums.py").write_text(program)
    commands = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rows = pq.read_table(tmp_path / "outputs" / "sums" / "run" / "trajectories.parquet").to_pylist()
    assert [(row["index"], row["repeat"]) for row in rows] == [(i, r) for i in range(10) for r in range(4)]
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    assert max(row["num_turns"] for row in rows) > 2
