"""Agent loops by name: from YAML files, with options, and what a run's identity sees of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.context import ContextAgent
from rollstream.agent.registry import AgentLoops, LoopEntry, load_agent_loops, register
from rollstream.agent.single_turn import SingleTurnAgent
from rollstream.agent.tool_agent import ToolAgent
from rollstream.errors import ConfigError
from rollstream.trajectory import SamplingParams, Trajectory
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


def test_the_built_in_loops_are_known_and_an_unknown_name_has_its_nearest() -> None:
    loops = AgentLoops()
    assert loops.entry("single_turn_agent") == LoopEntry(SingleTurnAgent)
    assert loops.entry("tool_agent").loop is ToolAgent
    assert loops.entry("context_agent").loop is ContextAgent
    with pytest.raises(
        ConfigError, match=r"unknown agent loop 'tool_agnt'; did you mean 'tool_agent'\? \(known: "
    ):
        loops.entry("tool_agnt")
    with pytest.raises(ConfigError, match=r"unknown agent loop 'xyz' \(known: .*context_agent"):
        loops.entry("xyz")


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


@register("own_test_agent")
class OwnAgent(SingleTurnAgent):
    """Registered by code."""

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        made = await super().run(sampling, **row)
        made.extra = {"who": "own"}
        return made


async def test_names_of_the_file_come_before_registered_ones_in_this_run_only(
    write: Callable[[str], str],
) -> None:
    loops = AgentLoops(load_agent_loops(write("- {name: own_test_agent, _target_: 'loops.py:Hints'}")))
    assert loops.entry("own_test_agent").loop.__name__ == "Hints"
    assert AgentLoops().entry("own_test_agent").loop is OwnAgent
    engine = await started(says("12"))
    mine = make_worker(resources(engine), loop="own_test_agent", loops=loops)
    others = make_worker(resources(engine), loop="own_test_agent")
    assert completed(await mine.run(make_row(), 0)).final.extra["hints"] == 3
    assert completed(await others.run(make_row(), 0)).final.extra == {"who": "own"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: x", "needs a list of entries"),
        ("- 3", "entry 0: needs `name` and `_target_`, both text"),
        ("- {name: a}", "entry 0: needs `name`"),
        ("- {name: a, _target_: 'none.py:Loop'}", r"entry 0: no such file: none\.py"),
        ("- {name: a, _target_: 'loops.py:Hint'}", "has no Hint; did you mean Hints"),
        ("- {name: a, _target_: 'loops.py:function'}", "loops.py:function is no agent loop: a subclass of"),
        ("- {name: a, _target_: pathlib.Path}", "entry 0: pathlib.Path is no agent loop"),
        ("- {name: a, _target_: 'verls.py:Loop'}", "is no agent loop.*generation.executor=verl"),
        ("- {name: a, _target_: '${nowhere}'}", "cannot be read as YAML"),
        (
            "- {name: a, _target_: 'loops.py:Hints'}\n- {name: a, _target_: 'loops.py:Hints'}",
            "entry 1: the name 'a' is there twice",
        ),
    ],
)
def test_mistakes_in_the_file_are_named(write: Callable[[str], str], text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_agent_loops(write(text))
    assert str(caught.value).startswith("actor_rollout_ref.rollout.agent.agent_loop_config_path: ")
    assert "agents.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_named_and_none_is_none(tmp_path: Path) -> None:
    assert load_agent_loops(None) == {}
    for path in (str(tmp_path / "none.yaml"), str(tmp_path), "~/none.yaml"):
        with pytest.raises(ConfigError, match="agent_loop_config_path: no such file: "):
            load_agent_loops(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_agent_loops(str(tmp_path / "binary.yaml"))


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


def test_built_in_loops_have_a_digest_without_their_source() -> None:
    assert LoopEntry(ToolAgent).digest == "rollstream.agent.tool_agent ToolAgent {}"
    digests = {LoopEntry(loop).digest for loop in (ToolAgent, ContextAgent, SingleTurnAgent)}
    assert len(digests) == 3
    assert LoopEntry(ContextAgent, {"max_snapshots": 1}).digest != LoopEntry(ContextAgent).digest
    assert LoopEntry(OwnAgent).digest != LoopEntry(SingleTurnAgent).digest


async def test_options_that_a_loop_does_not_have_show_at_start() -> None:
    shared = resources(await started())
    loops = AgentLoops({"mine": LoopEntry(ToolAgent, {"max_hints": 3}), "good": LoopEntry(ToolAgent)})
    loops.check(["good", "single_turn_agent"], shared)
    said = r"'mine' cannot be made \(unknown option 'max_hints' \(known: .*its class is ToolAgent"
    with pytest.raises(ConfigError, match=said):
        loops.check(["good", "mine"], shared)


def test_a_misspelt_option_has_its_nearest() -> None:
    class Own(ContextAgent):
        def __init__(self, *args: Any, max_hints: int = 3, **options: Any) -> None:
            super().__init__(*args, **options)

    for wrong, right in (("max_snapshot", "max_snapshots"), ("max_hint", "max_hints")):
        loops = AgentLoops({"own": LoopEntry(Own, {wrong: 2})})
        said = rf"unknown option '{wrong}'; did you mean '{right}'\? \(known: .*max_hints, max_snapshots"
        with pytest.raises(ConfigError, match=said):
            loops.check_options("own")
