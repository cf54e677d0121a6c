"""What an environment takes, and what it leaves to the trainer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

pytest.importorskip("trl")

from rollstream.data.row import parse_row
from rollstream.errors import ConfigError, DataError
from rollstream.integrations.configured_groups import ConfiguredGroups
from rollstream.integrations.trl.environment import (
    RolloutEnvironment,
    check_dataset,
    read_row,
)
from rollstream.integrations.trl.plan import SamplerReplay, check_prompts, sample_prompts
from rollstream.trajectory import SamplingParams

pytest.importorskip("torch")

SAMPLING = SamplingParams(64)


def args(**changed: Any) -> Any:
    """As much of the trainer's arguments as an environment takes."""
    values = {"temperature": 1.0, "max_completion_length": 8, "num_generations": 2, "seed": 0}
    values |= {"weight_sync": "drain", "weight_transfer": "folder"}
    return SimpleNamespace(**{"weights_dir": None, "chat_template_kwargs": None, **values, **changed})


@pytest.mark.parametrize(
    ("word", "argument"),
    [
        ("actor_rollout_ref.rollout.temperature=0.5", "temperature"),
        ("actor_rollout_ref.rollout.n=4", "num_generations"),
        ("generation.seed=3", "seed"),
        ("actor_rollout_ref.rollout.weight_transfer=gloo", "weight_transfer"),
    ],
)
def test_what_the_trainer_decides_is_refused(word: str, argument: str) -> None:
    with pytest.raises(ConfigError, match=f"set {argument} in its arguments"):
        RolloutEnvironment([word])


@pytest.mark.parametrize(
    "word",
    [
        "data.filter_overlong_prompts=true",
        "generation.shard=0/2",
        "generation.metrics_port=0",
        "generation.adaptive_in_flight=true",
        "generation.adaptive_in_flight=false",
        "generation.export=[jsonl]",
        "trainer.logger=[wandb]",
    ],
)
def test_keys_without_effect_are_refused(word: str) -> None:
    for make in (RolloutEnvironment, ConfiguredGroups):
        with pytest.raises(ConfigError, match=word.partition("=")[0]):
            make([word])


@pytest.mark.parametrize("word", ["data.prompt_key=question", "data.train_files=a.jsonl"])
def test_keys_of_data_are_refused_beside_a_dataset(word: str) -> None:
    RolloutEnvironment(["generation.max_in_flight=3"]).refuse_data()
    with pytest.raises(ConfigError, match=f"{word.partition('=')[0]}: no effect where a dataset is given"):
        RolloutEnvironment([word]).refuse_data()


def test_servers_that_are_launched_load_weights_from_the_trainers_folder(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    environment = RolloutEnvironment([f"{rollout}.name=sglang", f"{rollout}.launch.server=rollstream"])
    config = environment.resolve(args(weights_dir=str(tmp_path)), "model")
    assert config.actor_rollout_ref.rollout.launch.args == {"weights": [str(tmp_path)]}
    with pytest.raises(ConfigError, match="weights_dir"):
        environment.resolve(args(), "model")


def test_weights_are_sent_to_servers_alone() -> None:
    for engine in ("vllm", "sglang"):
        config = RolloutEnvironment([f"actor_rollout_ref.rollout.name={engine}"]).resolve(
            args(weight_transfer="nccl"), "model"
        )
        assert config.actor_rollout_ref.rollout.weight_transfer == "nccl"
    with pytest.raises(ConfigError, match="leave it out for engine 'openvino'"):
        RolloutEnvironment(["actor_rollout_ref.rollout.name=openvino"]).resolve(
            args(weight_transfer="gloo"), "model"
        )


def test_datasets_that_cannot_be_trained_on_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    text = {"prompt": [{"role": "user", "content": "1 + 1"}]}
    parts = [{"type": "text", "text": "what is"}, {"type": "image", "image": "cat.png"}]
    photo = pytest.importorskip("PIL.Image").new("RGB", (2, 2))
    for none in ([], None):
        check_dataset(datasets.Dataset.from_list([{**text, "images": none}]), SAMPLING)
    with pytest.raises(ConfigError, match="have images"):
        check_dataset(datasets.Dataset.from_dict({"prompt": [text["prompt"]], "image": [photo]}), SAMPLING)
    with pytest.raises(ConfigError, match="no column 'prompt'; it has: question, answer"):
        check_dataset(datasets.Dataset.from_list([{"question": "1 + 1", "answer": "2"}]), SAMPLING)
    with pytest.raises(ConfigError, match="IterableDataset"):
        check_dataset(datasets.Dataset.from_list([text]).to_iterable_dataset(), SAMPLING)
    for row in ({**text, "images": ["cat.png"]}, {"prompt": [{"role": "user", "content": parts}]}):
        with pytest.raises((ConfigError, DataError), match="have images"):
            check_dataset(datasets.Dataset.from_list([row]), SAMPLING)
        with pytest.raises(DataError):
            read_row(row, 0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": []},
        {"prompt": [{"content": "1 + 1"}]},
        {"extra_info": "no JSON"},
        {"sampling_params": {"temperature": 0.0}},
        {"sampling_params": '{"top_p": 0.5}'},
        {"sampling_params": {"logit_bias": {"7": 1.0}}},
        {"sampling_params": {"max_tokens": 65}},
        {"rollstream_row": '{"sampling_params": {"top_k": 3}}'},
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named_before_the_training(row: dict[str, object]) -> None:
    datasets = pytest.importorskip("datasets")
    good = {"prompt": [{"role": "user", "content": "1 + 1"}]}
    with pytest.raises(DataError, match="row 1 of the dataset"):
        check_dataset(datasets.Dataset.from_list([{**dict.fromkeys(row), **good}, {**good, **row}]), SAMPLING)


def test_rows_may_say_where_an_answer_ends() -> None:
    datasets = pytest.importorskip("datasets")
    ends = {"max_tokens": 7, "stop": ["."], "ignore_eos": True, "temperature": 1}
    row = {"prompt": [{"role": "user", "content": "1 + 1"}], "sampling_params": ends}
    assert check_dataset(datasets.Dataset.from_list([row]), SAMPLING) == set()


def test_the_trainers_values_reach_the_configuration() -> None:
    environment = RolloutEnvironment(["actor_rollout_ref.rollout.name=hf", "data.max_prompt_length=77"])
    config = environment.resolve(
        args(temperature=0.9, max_completion_length=33, num_generations=6, seed=5), "/models/a"
    )
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.temperature, rollout.response_length, rollout.n) == (0.9, 33, 6)
    assert config.actor_rollout_ref.model.path == "/models/a"
    assert config.generation.seed == 5
    assert rollout.prompt_length == 77


def test_arguments_of_the_chat_template_come_from_one_side() -> None:
    trainers = args(chat_template_kwargs={"enable_thinking": False})
    word = "data.apply_chat_template_kwargs.enable_thinking"
    for words in ([], [f"+{word}=false"]):
        resolved = RolloutEnvironment(words).resolve(trainers, "/models/a")
        assert resolved.data.apply_chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(ConfigError, match="give one of them"):
        RolloutEnvironment([f"+{word}=true"]).resolve(trainers, "/models/a")


def test_a_limit_of_attempts_that_is_set_is_known_as_such() -> None:
    said = "generation.attempt_timeout=600.0"  # the default, and the user's all the same
    assert not RolloutEnvironment().limits_attempts
    assert RolloutEnvironment([said]).limits_attempts
    assert RolloutEnvironment(config=[{"generation": {"attempt_timeout": 7}}]).limits_attempts


def test_rows_are_read_as_from_a_data_file() -> None:
    example = {"prompt": [{"role": "user", "content": "1 + 1"}], "answer": "2", "agent_name": "tool_agent"}
    row = read_row(example, 4)
    assert (row.index, row.ground_truth, row.agent_name) == (4, "2", "tool_agent")
    with pytest.raises(DataError, match="row 3 of the dataset"):
        read_row({"answer": "2"}, 3)
    with pytest.raises(DataError, match=r"the row with the prompt .*1 \+ 1.* of the dataset"):
        read_row({**example, "agent_name": 7})


def test_keys_that_arrow_filled_up_are_left_out() -> None:
    datasets = pytest.importorskip("datasets")

    def row(name: str, argument: str) -> dict[str, object]:
        parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
        call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": {argument: "x"}}}
        turns = [
            {"role": "user", "content": name},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return {
            "prompt": turns,
            "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
        }

    rows = [row("rain_in", "city"), row("time_in", "zone")]
    for index, example in enumerate(datasets.Dataset.from_list(rows)):
        read = read_row(example, index)
        assert read.columns["tools"] == rows[index]["tools"]
        assert read.messages == rows[index]["prompt"]


@pytest.mark.parametrize("truth", [0, ""])
def test_a_ground_truth_that_counts_as_nothing_is_one(truth: object, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "1 - 1 =", "reward_model": {"ground_truth": truth}, "extra_info": {"zero": 0}}
    file.write_bytes(orjson.dumps(row) + b"\n")
    dataset = RolloutEnvironment([f"data.train_files={file}"]).dataset()
    read = read_row(dataset[0], 0)
    assert (read.ground_truth, read.extra_info["zero"]) == (truth, 0)


def test_a_row_has_the_key_that_it_has_in_a_run(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    file = tmp_path / "rows.jsonl"
    given = [
        {"prompt": "1 + 1 =", "ground_truth": "2", "level": 3},
        {
            "prompt": [{"role": "user", "content": "1 - 1 ="}],
            "reward_model": {"ground_truth": 0, "style": "rule"},
        },
    ]
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in given))
    dataset = RolloutEnvironment([f"data.train_files={file}"]).dataset()
    for example, row in zip(dataset, given, strict=True):
        assert read_row(example).prompt_key == parse_row(row, 0, "prompt")[0].prompt_key
        mended = {**example, "prompt": [{"role": "user", "content": "2 + 2 ="}]}
        assert read_row(mended).prompt_key not in {
            read_row(example).prompt_key,
            read_row(given[0]).prompt_key,
        }


def test_a_dataset_is_told_from_another() -> None:
    first = [{"prompt": f"{number}?", "answer": number} for number in range(900)]
    mended = [{**row, "answer": "?"} if row["answer"] % 3 == 0 else row for row in first]
    check_prompts(sample_prompts(first), sample_prompts(mended))
    for other in (first[::-1], [{**row, "prompt": "?"} for row in first]):
        with pytest.raises(ConfigError, match="another dataset"):
            check_prompts(sample_prompts(first), sample_prompts(other))


def test_the_plan_replays_epochs_in_any_order() -> None:
    """Also those that are kept no more; the rows that fill no batch are left out."""
    replay = SamplerReplay(10, 4, seed=3, shuffle=True)
    positions = [replay.at(position) for position in range(40)]
    for epoch in range(5):
        part = positions[epoch * 8 : epoch * 8 + 8]
        assert {found for found, _ in part} == {epoch}
        assert len({index for _, index in part}) == 8
    again = SamplerReplay(10, 4, seed=3, shuffle=True)
    assert [again.at(position) for position in reversed(range(40))] == positions[::-1]
    with pytest.raises(ConfigError, match="needs 4 prompts"):
        SamplerReplay(3, 4, seed=0, shuffle=True)
