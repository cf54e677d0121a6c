"""inspect_ai's own metrics and reducers on the same scores say the same; it reads a log that was exported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollstream.evaluate.metrics import mean_of, pass_at_k, pass_hat_k, summarize
from rollstream.evaluate.samples import samples_of
from rollstream.store.export.run import export_run
from tests.support.view_runs import failure, rollout
from tests.unit.integrations.exports.test_interchange import a_run

scorer = pytest.importorskip("inspect_ai.scorer", reason="inspect_ai is in an environment of its own")


@pytest.mark.parametrize("seed", range(5))
def test_inspect_says_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = 2 + 10 * seed
    records = [
        rollout(index, repeat, reward=None if rng.random() < 0.1 else float(rng.choice([0.0, 0.3, 1.0])))
        for index in range(prompts)
        for repeat in range(int(rng.integers(1, 9)))
    ]
    ours = summarize(samples_of([*records, failure(0, 9)]), solved_at=1.0, ks=[1, 2, 4])
    scored = [(one.index, one.final.reward) for one in records if one.final.reward is not None]
    scores = [
        scorer.SampleScore(score=scorer.Score(value=reward), sample_metadata={"prompt": index})
        for index, reward in scored
    ]
    assert ours.reward is not None and ours.reward.mean == pytest.approx(scorer.mean()(scores))
    assert ours.reward.error == pytest.approx(scorer.stderr(cluster="prompt")(scores))
    between = scorer.ci(cluster="prompt")(scores)
    assert (ours.reward.low, ours.reward.high) == pytest.approx(
        (between["lower"], between["upper"]), abs=1e-6
    )
    by_prompt = [[reward for at, reward in scored if at == index] for index in range(prompts)]
    by_prompt = [some for some in by_prompt if some]
    counts = np.array([len(some) for some in by_prompt])
    solved = np.array([sum(one >= 1 for one in some) for some in by_prompt])
    for rate in ours.passes:
        for reducer, chance, found in (
            (scorer.pass_at(rate.k), pass_at_k, rate.pass_at),
            (scorer.pass_k(rate.k), pass_hat_k, rate.pass_hat),
        ):
            theirs = [reducer([scorer.Score(value=one) for one in some]).value for some in by_prompt]
            assert chance(counts, solved, rate.k) == pytest.approx(theirs, nan_ok=True)
            known = [one for one in theirs if one == one]
            assert rate.left_out == len(theirs) - len(known)
            if not known:
                assert found is None
                continue
            assert found is not None and found.mean == pytest.approx(np.mean(known))
            reduced = [scorer.SampleScore(score=scorer.Score(value=one)) for one in known]
            if len(known) > 1:
                assert found.error == pytest.approx(scorer.stderr()(reduced))


def test_without_clusters_it_is_the_plain_error() -> None:
    values = np.random.default_rng(0).random(50)
    scores = [scorer.SampleScore(score=scorer.Score(value=float(one))) for one in values]
    found = mean_of(values, np.arange(50))
    assert found is not None and found.error == pytest.approx(scorer.stderr()(scores))


async def test_inspect_itself_reads_the_log(tmp_path: Path) -> None:
    done = export_run(await a_run(tmp_path / "run"), "inspect")

    def dumped(*options: str) -> Any:
        command = [str(Path(sys.executable).with_name("inspect")), "log", "dump", *options, str(done.target)]
        return orjson.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    log = dumped()
    assert (log["status"], log["results"]["completed_samples"]) == ("success", 3)
    samples = {(one["id"], one["epoch"]): one for one in log["samples"]}
    assert samples[0, 1]["scores"]["reward"]["value"] == 1.0
    assert samples[0, 1]["output"]["completion"] == "two"
    called = samples[0, 1]["messages"][2]
    assert called["tool_calls"][0]["arguments"] == {"a": 1}
    assert called["content"][0]["reasoning"] == "hm"
    assert samples[1, 1]["target"] == '{"x":2}'
    assert dumped("--header-only")["eval"]["dataset"]["samples"] == 2
