"""Agent loops by name: from YAML files, with options, and what a run's identity sees of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.context import ContextAgent
from rollstream.agent.registry import AgentLoops, LoopEntry, load_agent_loops
from rollstream.agent.tool_agent import ToolAgent
from rollstream.errors import ConfigError
from tests.unit.agent.rollouts import completed, make_row, make_worker, resources, says, started

SOURCE = """
from rollstream.agent.single_turn import SingleTurnAgent

class Hints(SingleTurnAgent):
    built = []

    def __init__(self, *args, max_hints=3, words=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.max_hints = max_hints
        self.words = words

    @classmethod
    def build_shared(cls, resources, **options):
        cls.built.append(options)
        return {"built": len(cls.built)}

    async def run(self, sampling, **row):
        made = await super().run(sampling, **row)
        made.extra = {"hints": self.max_hints, "shared": self.shared}
        return made

def function(resources, **options):
    pass
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "loops.py").write_text(SOURCE)
    (tmp_path / "verls.py").write_text(
        "Loop = type('Loop', (), {'__module__': 'verl.experimental.agent_loop'})\n"
    )

    def save(text: str) -> str:
        file = tmp_path / "agents.yaml"
        file.write_text(text)
        return str(file)

    return save


async def test_a_file_beside_the_yaml_with_options_and_what_is_shared(write: Callable[[str], str]) -> None:
    loops = AgentLoops(
        load_agent_loops(
            write(
                "- {name: hints, _target_: 'loops.py:Hints', max_hints: 7, words: [a, {b: 1}]}\n"
                "- {name: plain, _target_: 'loops.py:Hints'}\n"
                "- {name: dotted, _target_: rollstream.agent.context.ContextAgent, max_snapshots: 2}\n"
            )
        )
    )
    assert loops.entry("hints").options == {"max_hints": 7, "words": ["a", {"b": 1}]}
    assert loops.entry("dotted") == LoopEntry(ContextAgent, {"max_snapshots": 2})
    engine = await started(says("12"))
    worker = make_worker(resources(engine), loop="hints", loops=loops)
    made = [completed(await worker.run(make_row(at), 0)).final.extra for at in range(3)]
    assert made == [{"hints": 7, "shared": {"built": 1}}] * 3
    other = completed(await worker.run(make_row(4, agent_name="plain"), 0)).final.extra
    assert other == {"hints": 3, "shared": {"built": 1}}, "each entry runs its file anew"
    built = loops.entry("hints").loop.built  # type: ignore[attr-defined]
    assert built == [{"max_hints": 7, "words": ["a", {"b": 1}]}]
    second = AgentLoops({"hints": loops.entry("hints")})
    second.create("hints", resources(engine), request_id="x")
    assert len(built) == 2, "once per worker"


def test_the_digest_changes_with_options_and_content(write: Callable[[str], str], tmp_path: Path) -> None:
    def digest(options: str = "", source: str = SOURCE) -> str:
        (tmp_path / "loops.py").write_text(source)
        return load_agent_loops(write(f"- {{name: it, _target_: 'loops.py:Hints'{options}}}"))["it"].digest

    whole = [
        digest(),
        digest(", max_hints: 3"),
        digest(", max_hints: 4"),
        digest(", words: {1: a}"),
        digest(source=SOURCE + "# changed"),
    ]
    assert len(set(whole)) == 5
    assert digest() == whole[0]
    assert digest(", max_hints: 3, words: [a]") == digest(", words: [a], max_hints: 3")


@pytest.mark.parametrize(
    "text",
    [
        "name: x",
        "- 3",
        "- {name: a}",
        "- {name: a, _target_: 'none.py:Loop'}",
        "- {name: a, _target_: 'loops.py:Hint'}",
        "- {name: a, _target_: 'loops.py:function'}",
        "- {name: a, _target_: 'verls.py:Loop'}",
        "- {name: a, _target_: '${nowhere}'}",
        "- {name: a, _target_: 'loops.py:Hints'}\n- {name: a, _target_: 'loops.py:Hints'}",
    ],
)
def test_file_that_cannot_be_used(write: Callable[[str], str], text: str) -> None:
    with pytest.raises(ConfigError, match=r"agent_loop_config_path: .*agents\.yaml"):
        load_agent_loops(write(text))


async def test_unknown_names_and_options_show_at_start() -> None:
    class Own(ContextAgent):
        def __init__(self, *args: Any, max_hints: int = 3, **options: Any) -> None:
            super().__init__(*args, **options)

    with pytest.raises(ConfigError, match="'tool_agent'"):
        AgentLoops().entry("tool_agnt")
    loops = AgentLoops({"own": LoopEntry(Own, {"max_hint": 3}), "good": LoopEntry(ToolAgent)})
    loops.check(["good", "single_turn_agent"], resources(await started()))
    with pytest.raises(ConfigError, match="max_hint"):
        loops.check_options("own")
    with pytest.raises(ConfigError, match="max_hint"):
        loops.check(["own"], resources(await started()))
