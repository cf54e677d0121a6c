"""`rollstream gateway serve` as a process: official clients, prompt files, weights, its end, what it refuses."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.store.export.run import export_run
from rollstream.store.run import Run
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from tests.faults.runs import stub_server, write_prompts
from tests.support.gateway import COMMAND, GatewayProcess, serve_gateway
from tests.support.view_runs import rollout, write_run

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text().partition("## As a service")[2]
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with stub_server("--response-tokens", "8") as url:
        yield url


def ask(session: dict[str, Any], **more: Any) -> Any:
    """A call by OpenAI's client, which knows only the session's address and key."""
    with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
        return client.chat.completions.create(model="any", messages=session["messages"], **more)


def play(server: GatewayProcess, reward: float | None, **asked: Any) -> dict[str, Any]:
    """A session from beginning to end."""
    status, session = server.post("/v1/sessions", asked)
    assert status == 200, session
    assert ask(session).choices[0].message.role == "assistant"
    status, info = server.post(f"/v1/sessions/{session['id']}/finish", {"reward": reward})
    assert status == 200, info
    return info  # type: ignore[no-any-return]


def test_a_fleet_works_off_a_prompt_file(tmp_path: Path, engine: str) -> None:
    """Rows by number, or the next one that is owed; a restart goes on; the directory is like any run's."""
    folder, prompts = tmp_path / "run", write_prompts(tmp_path / "prompts.jsonl", 3)
    (tmp_path / "reward.py").write_text(REWARD + "    return float(ground_truth == '8')\n")
    words = [
        f"data.train_files={prompts}",
        "actor_rollout_ref.rollout.n=2",
        f"custom_reward_function.path={tmp_path / 'reward.py'}",
    ]
    with serve_gateway(folder, engine, *words) as server:
        assert play(server, 0.25, instance_id=2) | {"id": ""} == {
            **{"id": "", "state": "finished", "index": 2, "repeat": 0},
            **{"trajectories": 1, "reward": 0.25},
        }
        assert play(server, None, instance_id=1)["reward"] == 1.0  # the run's reward function
        failing = server.post("/v1/sessions", {"instance_id": 0})[1]
        status, failed = server.request("DELETE", f"/v1/sessions/{failing['id']}")
        assert (status, failed["state"]) == (200, "failed")
        for asked in ({"instance_id": 3}, {"instance_id": "2"}, {"row": {"prompt": "x"}}):
            assert server.post("/v1/sessions", asked)[0] in (400, 404)
        assert server.stop() == 0
    assert [failure.index for failure in Run.open(folder).failures()] == [0]
    assert not (folder / "trajectories.parquet").exists()
    words = ["--config", str(folder / "config.yaml"), "generation.retry_failed=true"]
    with serve_gateway(folder, engine, *words) as server:
        played = [play(server, None) for _ in range(4)]
        assert [(one["index"], one["repeat"]) for one in played] == [(0, 0), (0, 1), (1, 1), (2, 1)]
        assert server.post("/v1/sessions", {})[1]["error"]["code"] == "all_done"
        assert server.post("/v1/sessions", {"instance_id": 1})[0] == 409
        assert server.stop() == 0
    found = read_status(folder)
    assert (found.completed, found.failed, found.owed) == (6, 0, 0)
    assert validate_run(folder).sound
    assert pq.read_metadata(folder / "trajectories.parquet").num_rows == 6
    run = subprocess.run(
        [sys.executable, "-m", "rollstream.cli", "generate", "--config", str(folder / "config.yaml")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2 and "default_agent_loop" in run.stderr


def test_the_page_s_example(tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = PAGE.partition("```python\n")[2].partition("```")[0]
    with serve_gateway(tmp_path / "run", engine) as server:
        exec(code.replace("http://127.0.0.1:8900", server.url), {})
    assert "'state': 'finished'" in capsys.readouterr().out


def test_tokens_and_what_other_machines_may_see(tmp_path: Path, engine: str) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    words = ["--token-file", str(token), "--public-url", "http://gateway.example:81/"]
    with serve_gateway(tmp_path / "run", engine, *words) as server:
        asked = {"row": {"prompt": "1 + 1 ="}}
        assert server.post("/v1/sessions", asked)[0] == 401
        status, session = server.post("/v1/sessions", asked, authorization="Bearer secret")
        assert (status, session["base_url"].partition("/s/")[0]) == (200, "http://gateway.example:81")
        path = "/s/" + session["base_url"].partition("/s/")[2] + "/chat/completions"
        body = {"model": "m", "messages": session["messages"]}
        assert server.post(path, body, host="gateway.example:81")[0] == 200
        assert server.post(path, body, host="elsewhere.example")[0] == 403
        assert server.post(path, body, origin="http://evil.example")[0] == 403
        assert server.stop() == 0
    assert session["api_key"] not in server.log.read_text()
    assert "secret" not in (tmp_path / "run" / "run.json").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "set a token"),
        (["--public-url", "https://gateway.example"], "--token-file"),
        (["gateway.command=[python]"], "gateway.command: no effect"),
        (["generation.max_attempts=2"], "generation.max_attempts: no effect"),
        (["trainer.logger=[console,wandb]"], "trainer.logger: no effect"),
        ([f"actor_rollout_ref.rollout.{key}" for key in ("server_urls=[]", "launch.where=ray")], "on Ray"),
        (["--buffer", "ftp://x"], "--buffer"),
        (["--expire-seconds", "0"], "--expire-seconds"),
        (["actor_rollout_ref.rollout.nn=2"], "nn"),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    tmp_path: Path, engine: str, words: list[str], said: str
) -> None:
    settings = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        "actor_rollout_ref.rollout.name=sglang",
        f"actor_rollout_ref.rollout.server_urls=[{engine}]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run([*COMMAND, "--port", "0", *settings, *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr


def test_sessions_neither_score_groups_nor_go_on_with_what_is_stored(tmp_path: Path, engine: str) -> None:
    prompts, reward = tmp_path / "prompts.jsonl", tmp_path / "reward.py"
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    reward.write_text("def compute_score(data_sources, solution_strs, ground_truths, extra_infos): ...\n")
    stored = f"run:{write_run(tmp_path / 'first', [rollout(0, 0)])}?at=turn:0"
    sources = f"[{{name: one, train_files: {prompts}}}, {{name: two, train_files: '{stored}'}}]"
    for words, said in (
        ([f"data.train_files=[{prompts},'{stored}']"], "cannot go on with a stored conversation"),
        ([f"data.sources={sources}"], "cannot go on with a stored conversation"),
        ([f"data.train_files={prompts}", f"custom_reward_function.path={reward}"], "solution_strs"),
    ):
        test_what_cannot_work_is_refused_at_start(tmp_path, engine, words, said)


def test_new_weights_are_recorded_with_each_token(tmp_path: Path, engine: str) -> None:
    (tmp_path / "weights" / "step-5").mkdir(parents=True)
    folder = tmp_path / "run"
    with serve_gateway(folder, engine, "--weights", str(tmp_path / "weights")) as server:
        session = server.post("/v1/sessions", {"id": "a", "row": {"prompt": "1 + 1 ="}})[1]
        ask(session)
        path = str(tmp_path / "weights" / "step-5")
        assert server.post("/v1/weights", {"model_path": path, "version": 5}) == (200, {"version": 5})
        ask(session)
        assert server.post("/v1/sessions/a/finish", {"reward": 1})[0] == 200
        assert server.stop() == 0
    export_run(folder, "jsonl", tmp_path / "rows.jsonl")
    rows = [orjson.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    versions = sorted(version for row in rows for _, version in map(_pair, row["policy_versions"]))
    assert versions[-1] == 5 and len(set(versions)) == 2


def _pair(run: Any) -> tuple[int, int]:
    return (run["start"], run["version"]) if isinstance(run, dict) else (run[0], run[1])


def test_the_end_gives_sessions_time_and_drops_the_others(tmp_path: Path, engine: str) -> None:
    with serve_gateway(tmp_path / "run", engine, "--grace-seconds", "0.2") as server:
        ask(server.post("/v1/sessions", {"id": "a", "row": {"prompt": "1 + 1 ="}})[1])
        assert server.stop() == 0
        assert "1 sessions did not finish" in server.log.read_text()
    with serve_gateway(tmp_path / "run", engine) as server:
        assert server.post("/v1/sessions/a/finish", {"reward": 1})[0] == 404
        assert play(server, 1.0, id="a", row={"prompt": "1 + 1 ="})["index"] == 0
        assert server.post("/v1/sessions/a/finish", {"reward": 1})[0] == 200
