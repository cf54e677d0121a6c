import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from rollstream.data.prompts import load_prompts
from rollstream.data.task_cache import cache_key, get_dataset_paths, make_task
from rollstream.data.task_cache import resolve_tasks_into_config as resolve
from rollstream.data.tasks import PromptTemplate
from rollstream.data.values import BadRow
from rollstream.errors import ConfigError, DataError

from .files import data_settings, write_jsonl

COUNTING = """
from dataclasses import dataclass
from rollstream.data.tasks import Task, TaskConfig

@dataclass(frozen=True, slots=True, kw_only=True)
class CountingConfig(TaskConfig):
    numbers: int = 5

class Counting(Task):
    config_type = CountingConfig

    def load(self):
        return ({"n": n} for n in range(self.config.numbers))

    def make_row(self, example, position):
        return None if example["n"] == 2 else super().make_row(example, position)

    def make_prompt(self, example):
        return [{"role": "user", "content": f"After {example['n']}?"}]

    def make_ground_truth(self, example):
        return example["n"] + 1

class Failing(Counting):
    def make_ground_truth(self, example):
        return 1 / (3 - example["n"])

class Mixed(Counting):
    def make_ground_truth(self, example):
        return [None, 1, None, {"b": [{"c": 1}]}, b"text"][example["n"]]

class NotATask:
    pass
"""


@pytest.fixture
def counting(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "counting.py"
    path.write_text(COUNTING)
    return {"name": "counting", "custom_cls": {"path": str(path), "name": "Counting"}}


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A task over a local file, by datasets.load_dataset."""
    pytest.importorskip("datasets")
    rows = [
        {
            "question": f"What about {{{i}}}?",
            "answer": str(i),
            "level": i,
            "chat": [
                {"role": "system", "content": "old"},
                {"role": "user", "content": f"u{i}"},
                {"role": "assistant", "content": "a"},
            ],
        }
        for i in range(4)
    ]
    path = write_jsonl(tmp_path / "questions.jsonl", rows)
    return {
        "name": "questions",
        "loading_params": {
            "path": "json", "data_files": str(path), "split": "train", "cache_dir": str(tmp_path / "hf")
        },
        "prompt_template": "{question} Answer in \\boxed{{}}.",
        "ground_truth_field": "answer",
    }  # fmt: skip


def built_rows(entry: dict[str, Any], cache: Path) -> list[dict[str, Any]]:
    (path,) = get_dataset_paths([entry], cache)
    dataset = load_prompts(data_settings(path))
    return [
        {
            "messages": row.messages,
            "ground_truth": row.ground_truth,
            "data_source": row.data_source,
            "extra_info": row.extra_info,
        }
        for row in map(dataset.row, range(len(dataset)))
    ]


def test_template_over_a_loaded_dataset(questions: dict[str, Any], tmp_path: Path) -> None:
    entry = questions | {"system_prompt": "Be brief.", "extra_fields": ["level"], "max_samples": 3}
    rows = built_rows(entry, tmp_path / "cache")
    assert len(rows) == 3
    assert rows[1] == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What about {1}? Answer in \\boxed{}."},
        ],
        "ground_truth": "1",
        "data_source": "questions",
        "extra_info": {"index": 1, "level": 1},
    }


def test_chat_messages_over_a_loaded_dataset(questions: dict[str, Any], tmp_path: Path) -> None:
    del questions["prompt_template"]
    entry = questions | {
        "prompt_format": "chat_messages",
        "chat_messages_field": "chat",
        "system_prompt": "new",
        "data_source": "somewhere",
    }
    rows = built_rows(entry, tmp_path / "cache")
    assert rows[3]["messages"] == [{"role": "system", "content": "new"}, {"role": "user", "content": "u3"}]
    assert rows[3]["data_source"] == "somewhere"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"prompt_template": "{questoin}"}, DataError),
        ({"ground_truth_field": "answr"}, DataError),
        ({"extra_fields": ["zzz"]}, DataError),
        ({"prompt_template": None}, ConfigError),
        ({"loading_params": {"path": "json", "data_files": "/no/such.jsonl"}}, DataError),
        ({"loading_params": {}}, ConfigError),
    ],
)
def test_a_dataset_that_does_not_fit(
    questions: dict[str, Any], tmp_path: Path, change: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"train_tasks \(questions\)"):
        get_dataset_paths([questions | change], tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "a", "prompt_tmplate": "x"},
        {"loading_params": {}},
        {"name": "a", "prompt_format": "chat_message"},
        {"name": "a", "prompt_format": "chat_messages", "prompt_template": "x"},
        {"name": "a", "prompt_template": "{}"},
        {"name": "a", "max_samples": 0},
        {"name": "a", "extra_fields": "level"},
        {"name": "a", "custom_cls": {"path": "x.py", "nme": "X"}},
        {"name": "a", "custom_cls": {"path": "x.py", "name": "X"}},
        "chain_sum",
        {"name": "reasoning_gym"},
        {"name": "reasoning_gym", "dataset": "chain_sum", "loading_params": {}},
        {"name": "reasoning_gym", "dataset": "chain_sum", "size": 0},
    ],
)
def test_a_wrong_entry(entry: Any) -> None:
    with pytest.raises(ConfigError, match="train_tasks"):
        make_task(entry)


def test_a_class_of_ones_own(counting: dict[str, Any], tmp_path: Path) -> None:
    rows = built_rows(counting | {"numbers": 4}, tmp_path / "cache")
    assert [(row["ground_truth"], row["extra_info"]["index"]) for row in rows] == [(1, 0), (2, 1), (4, 3)]
    with pytest.raises(ConfigError, match="'numbers'"):
        make_task(counting | {"numbrs": 4})
    path = counting["custom_cls"]["path"]
    with pytest.raises(DataError, match=r"train_tasks \(counting\), example 3: ZeroDivisionError"):
        get_dataset_paths([counting | {"custom_cls": {"path": path, "name": "Failing"}}], tmp_path / "cache")
    with pytest.raises(ConfigError, match="NotATask is no subclass of rollstream"):
        make_task(counting | {"custom_cls": {"path": path, "name": "NotATask"}})
    with pytest.raises(DataError, match="has no rows"):
        get_dataset_paths([counting | {"numbers": 0}], tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1  # nothing is left of what failed


def test_the_cache_is_found_again_until_something_changes(counting: dict[str, Any], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (first,) = get_dataset_paths([counting], cache)
    stamp = Path(first).stat().st_mtime_ns
    assert get_dataset_paths([counting], cache) == [first]
    assert get_dataset_paths([dict(reversed(counting.items()))], str(cache)) == [first]
    assert Path(first).stat().st_mtime_ns == stamp
    changed = [counting | {"numbers": 6}, counting | {"system_prompt": "x"}, counting | {"name": "other"}]
    assert len({first, *get_dataset_paths(changed, cache)}) == 4

    moved = tmp_path / "moved.py"
    moved.write_text(COUNTING)
    assert get_dataset_paths(
        [counting | {"custom_cls": {"path": str(moved), "name": "Counting"}}], cache
    ) == [first]
    moved.write_text(COUNTING.replace("After", "Next to"))
    assert get_dataset_paths(
        [counting | {"custom_cls": {"path": str(moved), "name": "Counting"}}], cache
    ) != [first]


def test_a_local_file_that_changes_is_built_anew(questions: dict[str, Any]) -> None:
    before = cache_key(make_task(questions))
    assert cache_key(make_task(questions)) == before
    path = Path(questions["loading_params"]["data_files"])
    path.write_bytes(path.read_bytes() + b"\n")
    assert cache_key(make_task(questions)) != before


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting: dict[str, Any]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ROLLSTREAM_CACHE", raising=False)
    (path,) = get_dataset_paths([counting])
    assert Path(path).parent == tmp_path / "xdg" / "rollstream" / "tasks"
    monkeypatch.setenv("ROLLSTREAM_CACHE", str(tmp_path / "mine"))
    (path,) = get_dataset_paths([counting])
    assert Path(path).parent == tmp_path / "mine" / "tasks"
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="ROLLSTREAM_CACHE"):
        get_dataset_paths([counting], tmp_path / "file" / "cache")


def test_rows_may_change_their_shape(counting: dict[str, Any], tmp_path: Path) -> None:
    mixed = counting | {"custom_cls": {**counting["custom_cls"], "name": "Mixed"}}
    truths = [row["ground_truth"] for row in built_rows(mixed, tmp_path / "cache")]
    assert truths == [None, 1, {"b": [{"c": 1}]}, "dGV4dA=="]


def test_of_two_that_build_a_task_at_once_the_first_to_finish_counts(
    counting: dict[str, Any], tmp_path: Path
) -> None:
    source = Path(counting["custom_cls"]["path"])
    later = "\n    def load(self):\n        from pathlib import Path\n"
    later += "        (half,) = Path({!r}).iterdir()\n".format(str(tmp_path / "cache"))
    later += "        (half.parent / half.name[1:-37]).write_bytes(b'someone was first')\n"
    source.write_text(COUNTING.replace("\n    def load(self):\n", later, 1))
    (path,) = get_dataset_paths([counting], tmp_path / "cache")
    assert Path(path).read_bytes() == b"someone was first"
    assert [str(each) for each in (tmp_path / "cache").iterdir()] == [path]


def test_resolve_into_a_config(
    counting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLSTREAM_CACHE", str(tmp_path / "cache"))
    (built,) = get_dataset_paths([counting])
    plain: dict[str, Any] = {"train_tasks": [counting], "data": {"train_files": None, "seed": 1}}
    assert resolve(plain) is plain
    assert plain["data"] == {"train_files": [built], "seed": 1}
    plain["data"]["train_files"] = "mine.jsonl"
    assert resolve(resolve(plain))["data"]["train_files"] == ["mine.jsonl", built]

    config = OmegaConf.create({"train_tasks": [counting], "data": {"train_files": None}})
    OmegaConf.set_struct(config, True)
    assert resolve(config) is config
    assert OmegaConf.to_container(config.data.train_files) == [built]
    untouched = OmegaConf.create({"train_tasks": None, "data": {"train_files": "a"}})
    assert resolve(untouched).data.train_files == "a"
    with pytest.raises(ConfigError, match="want a list of tasks"):
        resolve({"train_tasks": counting, "data": {}})


@pytest.mark.parametrize(
    ("package", "entry"),
    [
        ("datasets", {"name": "a", "loading_params": {"path": "b"}, "prompt_template": "x"}),
        ("reasoning_gym", {"name": "reasoning_gym", "dataset": "chain_sum"}),
    ],
)
def test_a_missing_package_says_what_to_install(
    package: str, entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'rollstream\[tasks\]'"):
        get_dataset_paths([entry], tmp_path)


def test_reasoning_gym(tmp_path: Path) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    entry = {"name": "reasoning_gym", "dataset": "chain_sum", "size": 20, "seed": 3, "config": config}
    problems = reasoning_gym.create_dataset("chain_sum", size=20, seed=3, **config)
    (path,) = get_dataset_paths([entry], tmp_path)
    dataset = load_prompts(data_settings(path))
    assert len(dataset) == 20
    for i in range(20):
        row = dataset.row(i)
        assert row.messages == [{"role": "user", "content": problems[i]["question"]}]
        assert row.data_source == "reasoning_gym/chain_sum"
        assert row.ground_truth == problems[i]["answer"]
        stored = orjson.loads(row.extra_info["entry"])
        assert stored == orjson.loads(orjson.dumps(problems[i]))
        assert orjson.loads(row.extra_info["config"]) == config
    (other,) = get_dataset_paths(
        [entry | {"prompt_template": "{question} Only the number.", "size": 2}], tmp_path
    )
    assert load_prompts(data_settings(other)).row(1).messages[0]["content"].endswith("= Only the number.")


@pytest.mark.parametrize(
    ("template", "columns", "expected"),
    [
        ("{a} and {b}", {"a": "x", "b": 2}, "x and 2"),
        (r"{a} in \boxed{{}}", {"a": "x"}, r"x in \boxed{}"),
        ("{a:.2f} {b!r:>5}", {"a": 1.0, "b": "q"}, "1.00   'q'"),
        ("{a[text][1]}", {"a": {"text": ["x", "y"]}}, "y"),
        ("{Question Text}", {"Question Text": "x"}, "x"),
        ("{meta.level}", {"meta.level": "x"}, "x"),
        ("no fields", {}, "no fields"),
    ],
)
def test_render(template: str, columns: dict[str, Any], expected: str) -> None:
    assert PromptTemplate(template, "t").render(columns) == expected


@given(st.text())
def test_data_is_never_a_template(text: str) -> None:
    assert PromptTemplate("<{a}>", "t").render({"a": text}) == f"<{text}>"


@pytest.mark.parametrize("template", [r"\boxed{}", "{0}", "{", "}"])
def test_braces_that_are_no_field(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^t: .*brace"):
        PromptTemplate(template, "t")


@pytest.mark.parametrize("template", ["{c}", "{a.__class__}", "{n}", "{a[0]}", "{a:.2f}"])
def test_a_row_that_does_not_fit(template: str) -> None:
    with pytest.raises(BadRow):
        PromptTemplate(template, "t").render({"a": {"x": "y"}, "n": None})
