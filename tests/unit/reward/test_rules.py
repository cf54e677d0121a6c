import sys
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from rollstream.errors import ConfigError, RewardError
from rollstream.reward import rules
from rollstream.reward.base import RewardFunction
from rollstream.reward.rules import (
    RuleReward,
    default_reward,
    exact_match,
    register_reward,
    score_reasoning_gym,
)
from rollstream.trajectory import PromptRow


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))


@pytest.fixture
def reward() -> Iterator[RuleReward]:
    reward = RuleReward()
    yield reward
    reward.close()


def make_row(data_source: str, ground_truth: Any = None, **extra_info: Any) -> PromptRow:
    return PromptRow(
        index=0,
        prompt_key="0" * 32,
        messages=[],
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=extra_info,
    )


def problem(dataset: str, i: int = 0, **config: Any) -> tuple[dict[str, Any], PromptRow]:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset(dataset, seed=1, size=i + 1, **config)[i]
    text = orjson.dumps(entry, option=orjson.OPT_NON_STR_KEYS).decode()
    row = make_row(
        f"reasoning_gym/{dataset}", entry["answer"], entry=text, config=orjson.dumps(config).decode()
    )
    return entry, row


def test_the_longest_prefix_counts() -> None:
    @register_reward("sums")
    def sums(**kwargs: Any) -> float:
        return 1.0

    @register_reward("sums/hard")
    def hard(**kwargs: Any) -> float:
        return 2.0

    assert default_reward("sums") is default_reward("sums/easy/a") is sums
    assert default_reward("sums/hard") is default_reward("sums/hard/x") is hard
    assert default_reward("summs") is default_reward("sumsets") is default_reward("") is None
    assert default_reward("exact_match/mine") is exact_match
    assert default_reward("reasoning_gym/chain_sum") is score_reasoning_gym
    with pytest.raises(ConfigError, match="'sums' have a reward already"):
        register_reward("sums")(hard)


async def test_exact_match(reward: RuleReward) -> None:
    assert isinstance(reward, RewardFunction)
    assert await reward.score(make_row("exact_match", 42), " 42\n") == (1.0, {})
    assert await reward.score(make_row("exact_match", "42"), "43") == (0.0, {})
    with pytest.raises(RewardError, match=r"reward exact_match, row 0 .*no ground truth"):
        await reward.score(make_row("exact_match"), "43")


async def test_a_row_without_rule_is_not_scored(reward: RuleReward) -> None:
    assert await reward.score(make_row("unknown"), "42") == (None, {})
    assert await reward.prepare("unknown") is False
    assert await reward.prepare("exact_match") is True


async def test_async_rules_and_preparing(reward: RuleReward) -> None:
    prepared = []

    @register_reward("slow", prepare=lambda: prepared.append(threading.get_ident()))
    async def slow(**kwargs: Any) -> dict[str, Any]:
        return {"score": 0.5, "why": "slow"}

    assert await reward.prepare("slow/er")
    assert prepared and prepared[0] != threading.get_ident()
    assert await reward.score(make_row("slow/er"), "x") == (0.5, {"why": "slow"})
    register_reward("broken", prepare=lambda: 1 / 0)(exact_match)
    with pytest.raises(RewardError, match="cannot be prepared: ZeroDivisionError"):
        await reward.prepare("broken")


async def test_chain_sum_is_scored_by_reasoning_gym(reward: RuleReward) -> None:
    for i in range(5):
        entry, row = problem("chain_sum", i, min_terms=2, max_terms=2, min_digits=2, max_digits=2)
        assert (await reward.score(row, f" {entry['answer']}\n")).reward == 1.0
        wrong = await reward.score(row, str(int(entry["answer"]) + 1))
        assert wrong.reward is not None and wrong.reward < 1.0
        assert (await reward.score(row, "")).reward == 0.0


@pytest.mark.parametrize(
    "dataset", ["countdown", "graph_color", "polynomial_equations", "knights_knaves", "sudoku"]
)
def test_datasets_with_scores_of_their_own(dataset: str) -> None:
    entry, row = problem(dataset)
    reasoning_gym = pytest.importorskip("reasoning_gym")
    score_answer = reasoning_gym.get_score_answer_fn(dataset)
    answers = [
        entry["answer"] or orjson.dumps(entry["metadata"].get("possible_answer"), option=4).decode(),
        "nonsense",
    ]
    for answer in answers:
        scored = score_reasoning_gym(row.data_source, answer, row.ground_truth, row.extra_info)
        assert scored == score_answer(answer, entry)


def test_the_datasets_settings_reach_the_score() -> None:
    entry, row = problem("decimal_arithmetic", min_num_decimal_places=6, max_num_decimal_places=6)
    assert score_reasoning_gym(row.data_source, entry["answer"], None, row.extra_info) == 1.0


async def test_rows_that_reasoning_gym_cannot_score(reward: RuleReward) -> None:
    with pytest.raises(RewardError, match=r"no extra_info\.entry"):
        await reward.score(make_row("reasoning_gym/chain_sum", "1"), "1")
    _, row = problem("chain_sum")
    row.data_source = "reasoning_gym/chain_sums"
    with pytest.raises(RewardError, match="chain_sums"):
        await reward.score(row, "1")


async def test_without_reasoning_gym(reward: RuleReward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollstream\[tasks\]'"):
        await reward.prepare("reasoning_gym/chain_sum")
    with pytest.raises(RewardError, match=r"pip install 'rollstream\[tasks\]'"):
        await reward.score(make_row("reasoning_gym/chain_sum", entry={"question": "?"}), "1")


def test_the_digest_is_of_which_rule_scores_what(reward: RuleReward) -> None:
    before = reward.source_digest
    assert before == RuleReward().source_digest and len(before) == 32

    @register_reward("more")
    def more(**kwargs: Any) -> float:
        return 1.0

    assert reward.source_digest != before
