"""`data.sources`: rows know their source, agent and tools, and come in the shares of the weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.cli import main as cli
from rollstream.config.load import compose, to_settings, to_stored_yaml
from rollstream.data.prompts import PromptDataset, load_prompts
from rollstream.data.task_cache import resolve_tasks_into_config
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, DataError
from rollstream.generation.plan import resolve
from rollstream.generation.run import run_generation
from rollstream.integrations.configured_groups import ConfiguredGroups
from tests.support.view_runs import failure, rollout, write_run


def write(path: Path, count: int, **more: Any) -> str:
    path.write_bytes(
        b"".join(orjson.dumps({"prompt": f"{path.stem} {at}", **more}) + b"\n" for at in range(count))
    )
    return str(path)


def load(sources: Sequence[Any], **data: Any) -> PromptDataset:
    config = compose(layers=[{"data": {"sources": sources, **data}}])
    return load_prompts(to_settings(resolve_tasks_into_config(config)).data)


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    math = write(tmp_path / "math.jsonl", 12, agent_name="mine", source="olympiad")
    code = write(tmp_path / "code.jsonl", 3, extra_info='{"level": 2}')
    return [
        {
            "name": "math",
            "train_files": math,
            "weight": 3,
            "agent": "tool_agent",
            "data_source": "openai/gsm8k",
        },
        {"name": "code", "train_files": [code], "agent": "tool_agent", "tools": ["python"]},
    ]


def test_rows_have_what_their_source_says(sources: list[dict[str, Any]]) -> None:
    rows = load(sources)
    first, last = rows.row(0), rows.row(12)
    assert (first.columns["source"], first.columns["source_in_file"]) == ("math", "olympiad")
    assert (first.agent_name, first.data_source, first.extra_info) == ("mine", "openai/gsm8k", {})
    assert (last.columns["source"], last.agent_name, last.data_source) == ("code", "tool_agent", "unknown")
    assert last.extra_info == {"level": 2, "tool_selection": ["python"]}
    assert rows.location(12).endswith("code.jsonl, row 0 (line 1)")
    assert rows.file_digests is not None and len(rows.file_digests) == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_has_the_shares_from_the_first_row_on(sources: list[dict[str, Any]], shuffle: bool) -> None:
    rows = load(sources, shuffle=shuffle, seed=3)
    names = [rows.row(int(index)).columns["source"] for index in rows.order]
    assert sorted(rows.order.tolist()) == list(range(15))
    for start in range(0, 12, 4):
        assert names[start : start + 4].count("math") == 3
    assert names[12:] == ["math"] * 3  # there is no code any more
    some = load(sources, train_max_samples=8)
    assert some.source_names().count("math") == 6
    assert [some.row(int(index)).columns["source"] for index in some.order] == some.source_names()
    if not shuffle:
        assert np.all(np.diff(rows.order[np.array(names) == "math"]) == 1)


def test_a_task_is_a_source_and_the_configuration_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("ROLLSTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    task = {"name": "reasoning_gym", "dataset": "chain_sum", "size": 5}
    config = compose(
        ["data.sources.0.weight=2"],
        layers=[
            {
                "data": {
                    "sources": [{**sources[0], "train_files": "math.jsonl"}, {"name": "sums", "task": task}]
                }
            }
        ],
    )
    resolved = resolve(config)
    stored = to_stored_yaml(resolved)
    assert f"- {tmp_path / 'math.jsonl'}" in stored or f"train_files: {tmp_path / 'math.jsonl'}" in stored
    rows = load_prompts(to_settings(resolved).data)
    assert rows.row(12).columns["source"] == "sums" and len(rows) == 17
    assert [one.weight for one in rows.sources] == [2, 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([{"name": "a"}], "'a' has train_files, or a task"),
        ([{"name": "a", "train_files": "x", "wieght": 1}], "unknown key 'wieght'; did you mean 'weight'"),
        ([{"name": "a", "train_files": "x", "weight": 0}], "weight"),
        ([{"name": "a", "train_files": "x"}, {"name": "a", "train_files": "y"}], "two are called 'a'"),
        ([{"name": "a", "train_files": "x", "reward": {"file": "x.py"}}], "reward"),
    ],
)
def test_what_is_wrong_is_named(wrong: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(wrong)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, plus=0.0):
    return {"score": ADDED + plus, "scored_as": data_source}

def of_group(data_sources, solution_strs, ground_truths, extra_infos):
    return [0.0 for _ in solution_strs]
"""


def scored(root: Path) -> dict[str, tuple[float | None, str | None]]:
    table = pq.read_table(root / "trajectories.parquet", columns=["extra", "reward", "reward_extra"])
    found: dict[str, set[Any]] = {}
    for row in table.to_pylist():
        pair = row["reward"], orjson.loads(row["reward_extra"]).get("scored_as")
        found.setdefault(orjson.loads(row["extra"])["source"], set()).add(pair)
    assert all(len(pairs) == 1 for pairs in found.values())
    return {name: pairs.pop() for name, pairs in found.items()}


@pytest.mark.parametrize("processes", [0, 1])
def test_a_source_has_a_reward_of_its_own(tmp_path: Path, processes: int) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("ADDED = 1.0" + REWARD)
    second.write_text("ADDED = 2.0" + REWARD)
    sources = [
        {"name": "math", "train_files": write(tmp_path / "math.jsonl", 3), "reward": str(first)},
        {
            "name": "code",
            "train_files": write(tmp_path / "code.jsonl", 3),
            "data_source": "tests",
            "reward": {"path": str(second), "reward_kwargs": {"plus": 0.5}},
        },
        {"name": "plain", "train_files": write(tmp_path / "plain.jsonl", 3, data_source="chat")},
    ]
    root = tmp_path / "run"
    options = [
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        "actor_rollout_ref.rollout.response_length=2",
        "generation.show_progress=false",
        f"custom_reward_function.processes={processes}",
    ]

    def generate(*more: str) -> Any:
        layer = {"data": {"sources": sources}, "trainer": {"default_local_dir": str(root)}}
        return run_generation(compose([*options, *more], layers=[layer]))

    made = generate()
    wanted = {"math": (1.0, "math"), "code": (2.5, "tests")}
    assert scored(root) == wanted | {"plain": (None, None)}
    assert made.unscored_sources == {"chat": 3}
    assert cli(["score", str(root)]) == 2  # nothing that a run directory names is run by itself

    # The same rows by another reward: what is done is scored anew, and rows of no source's by the run's own.
    second.write_text("ADDED = 7.0" + REWARD)
    changed = f"custom_reward_function.path={first}", "generation.rescore=true"
    assert generate(*changed).generated == 0
    assert scored(root) == {"math": (1.0, "math"), "code": (7.5, "tests"), "plain": (1.0, "chat")}
    # A source that gets a reward later: its rows have another data source from then on, those that are done, too.
    sources[2]["reward"] = str(second)
    assert generate(*changed).generated == 0
    assert scored(root) == {"math": (1.0, "math"), "code": (7.5, "tests"), "plain": (7.0, "plain")}
    sources[0]["reward"] = str(tmp_path / "nowhere.py")
    with pytest.raises(ConfigError, match=r"data\.sources, the reward of 'math'.*nowhere\.py"):
        generate(*changed)
    sources[0]["reward"] = {"path": str(first), "name": "of_group"}
    with pytest.raises(ConfigError, match="solution_strs"):
        generate(*changed)


def test_the_reward_of_a_source_scores_no_other_source(tmp_path: Path) -> None:
    rewarded = {"name": "math", "train_files": write(tmp_path / "math.jsonl", 1), "reward": "first.py"}
    other = {"name": "more", "train_files": write(tmp_path / "more.jsonl", 1, data_source="math")}
    with pytest.raises(DataError, match="of another source"):
        load([rewarded, other]).row(1)
    found = load([rewarded, {**other, "data_source": "sums"}])
    assert [found.row(at).data_source for at in range(2)] == ["math", "sums"]


def test_other_rows_beside_them_are_refused(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources has all rows"):
        load(sources, train_files=write(tmp_path / "more.jsonl", 1))


def test_a_training_loop_gets_a_plan_with_the_shares(sources: list[dict[str, Any]]) -> None:
    more = [f"actor_rollout_ref.model.path={MODEL_PATH}"]
    groups = ConfiguredGroups(more, config=[{"data": {"sources": sources}}])
    plan = groups.plan(seed=1)
    for step in range(20):
        names = [groups.row(plan.at(at).index).columns["source"] for at in range(4 * step, 4 * step + 4)]
        assert names.count("math") == 3
    plain = ConfiguredGroups(more, config=[{"data": {"train_files": sources[0]["train_files"]}}])
    assert plain.plan(seed=1).identity()["kind"] == "shuffled"


def test_status_says_how_each_source_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = [("math", 1.0), ("math", 0.0), ("code", None), ("code", 0.5)]
    records = [
        rollout(at, 0, reward=reward, extra={"source": name}) for at, (name, reward) in enumerate(rewards)
    ]
    root = write_run(
        tmp_path / "run", [*records, rollout(9, 0, extra={"source": "math"}), failure(9, 1), failure(8, 1)]
    )
    manifest = orjson.loads((root / "run.json").read_bytes())
    manifest["config"]["data"] = {"sources": [{"name": "math"}]}
    (root / "run.json").write_bytes(orjson.dumps(manifest))
    assert cli(["status", str(root)]) == 0
    said = [
        line.split(None, 1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("source")
    ]
    assert said == [
        "not known: 0 done, 1 failed, mean reward -",
        "code: 2 done, 0 failed, mean reward 0.5000",
        "math: 3 done, 1 failed, mean reward 0.6667",
    ]


def test_a_source_has_at_most_so_many_in_flight(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        """
import asyncio
from rollstream.agent.base import AgentLoop
from rollstream.agent.conversation import Conversation

RUNNING, MOST = {}, {}

class Counting(AgentLoop):
    async def run(self, sampling, *, raw_prompt, prompt_key, source, **row):
        RUNNING[source] = RUNNING.get(source, 0) + 1
        MOST[source] = max(MOST.get(source, 0), RUNNING[source])
        while MOST.get("many", 0) < 3:
            await asyncio.sleep(0.001)
        RUNNING[source] -= 1
        conversation = Conversation(self, raw_prompt, await self.render(raw_prompt, prompt_key=prompt_key))
        await conversation.generate(sampling)
        done = conversation.trajectory("stop")
        done.extra["most"] = dict(MOST)
        return done
"""
    )
    (tmp_path / "loops.yaml").write_text(f"- name: counting\n  _target_: {tmp_path / 'loop.py'}:Counting\n")
    few, many = (write(tmp_path / f"{name}.jsonl", 8) for name in ("few", "many"))
    entries = f"[{{name: few, train_files: {few}, max_in_flight: 2}}, {{name: many, train_files: {many}}}]"
    result = run_generation(
        [
            f"actor_rollout_ref.model.path={MODEL_PATH}",
            "actor_rollout_ref.rollout.response_length=2",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=counting",
            f"data.sources={entries}",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "generation.show_progress=false",
        ]
    )
    assert result.completed == 16
    extras = pq.read_table(tmp_path / "run" / "trajectories.parquet", columns=["extra"])["extra"]
    most = [orjson.loads(extra)["most"] for extra in extras.to_pylist()]
    assert max(one.get("few", 0) for one in most) <= 2 < max(one.get("many", 0) for one in most)
