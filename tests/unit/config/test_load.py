"""Configuration: unknown keys get the nearest name, values their types, and YAML files are input again."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rollstream.config.load import compose, to_settings, to_yaml
from rollstream.errors import ConfigError


def test_defaults_are_valid_and_typed() -> None:
    settings = to_settings(compose())
    assert settings.actor_rollout_ref.rollout.n == 1
    assert settings.actor_rollout_ref.rollout.prompt_length == settings.data.max_prompt_length
    assert settings.trainer.default_local_dir == "outputs/rollstream/generation"


def test_overrides_in_hydras_grammar() -> None:
    words = [
        "actor_rollout_ref.rollout.n=8",
        "data.train_files=[a.parquet,'b c.jsonl']",
        "actor_rollout_ref.rollout.engine_kwargs={device: CPU, deep: {a: 1}}",
        "+data.apply_chat_template_kwargs.enable_thinking=false",
        "data.apply_chat_template_kwargs.x=y",
        "generation.seed=5",
    ]
    settings = to_settings(compose(words))
    assert settings.actor_rollout_ref.rollout.n == 8
    assert settings.data.files == ["a.parquet", "b c.jsonl"]
    assert settings.actor_rollout_ref.rollout.engine_kwargs == {"device": "CPU", "deep": {"a": 1}}
    assert settings.data.apply_chat_template_kwargs == {"enable_thinking": False, "x": "y"}
    assert settings.generation.seed == 5


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("actor_rollout_ref.rollout.temprature=1", "did you mean 'actor_rollout_ref.rollout.temperature'"),
        ("data.max_promt_length=3", "did you mean 'data.max_prompt_length'"),
        ("response_length=3", "did you mean 'actor_rollout_ref.rollout.response_length'"),
        ("generation.save_batch_size=0", r"save_batch_size must be at least 1 \(it is 0\)"),
        ("actor_rollout_ref.rollout.n=0", r"rollout\.n must be at least 1"),
        ("actor_rollout_ref.rollout.n=two", r"actor_rollout_ref\.rollout\.n: Expected `int`, got `str`"),
        ("actor_rollout_ref.rollout.top_p=0", r"top_p must be above 0"),
        ("actor_rollout_ref.rollout.top_k=0", r"top_k must be -1 \(off\) or at least 1"),
        ("generation.resume=maybe", r"resume: must be one of auto, never, extend \(it is 'maybe'\)$"),
        ("data.truncation=middel", "error, left, right, middle .*did you mean 'middle'"),
        ("generation.export=[jsn]", r"export\[0\]: must be one of jsonl, .*did you mean 'jsonl'"),
        ("generation.export_unscored=keeep", r"export_unscored: must be one of error, keep, drop"),
        ("generation.bogus=1", r"unknown key 'generation\.bogus'\. All keys"),
        ("generatoin.seed=1", "did you mean 'generation.seed'"),
        ("trainer.default_local_dir=''", r"trainer\.default_local_dir must not be empty$"),
        ("data.train_files=", "data.train_files must not be empty"),
        ("data.train_files=['']", "data.train_files holds an empty text"),
        ('actor_rollout_ref.rollout.stop=[""]', r"rollout\.stop holds an empty text"),
        ("generation.pull_timeout=inf", r"generation\.pull_timeout must be a number .*inf"),
        ("generation.attempt_timeout=1e300", r"generation\.attempt_timeout must be a number"),
        ("actor_rollout_ref.rollout.temperature=nan", r"rollout\.temperature must be a number .*nan"),
        ("actor_rollout_ref.rollout.max_model_len=100", "lengths cannot fit"),
        ("actor_rollout_ref.rollout.prompt_length=7", "one limit by two names"),
        ("generation.max_failed_share=1.5", "at most 1"),
        ("generation.seed=-1", "generation.seed"),
        ("data.train_files", "cannot read 'data.train_files' as key=value"),
        ("actor_rollout_ref.rollout.n=1,2", "sweep"),
        ("data.train_files=a,b", r"""if the comma is part of it: 'data\.train_files="a,b"'"""),
        ("data.train_files=[dír/a]", r"""like this: 'data\.train_files=\["a b", "c"\]'"""),
        ("generation.grace_period=x[", r"""like this: 'generation\.grace_period="x\["'"""),
        ("generation.bogus=x[", "unknown key"),
        ("generation.metrics_port=99999", "metrics_port must be at most 65535"),
        ("data.apply_chat_template_kwargs.tokenize=true", "tokenize is set by rollstream at every rendering"),
        ("generation.upload_artifact=5", "with a letter among them"),
        ("trainer.logger=wand", "did you mean 'wandb'"),
    ],
)
def test_wrong_words_are_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_settings(compose([word]))


@pytest.mark.parametrize(
    "text", ["dír/p.jsonl", "~/x.jsonl", "outputs/sig a [1]", "a=b(1)", "1e3", "007", "true", "c:\\d", "it's"]
)
def test_texts_beyond_hydras_grammar_are_taken_as_they_are(text: str) -> None:
    settings = to_settings(compose([f"data.train_files={text}", f"+trainer.default_local_dir={text}"]))
    assert settings.data.files == [text]
    assert settings.trainer.default_local_dir == text


def test_an_export_of_what_is_not_merged_is_refused() -> None:
    words = ["generation.final_merge=false", "generation.export=[jsonl]"]
    with pytest.raises(ConfigError, match=r"generation\.export=\[jsonl\] .*generation\.final_merge=false"):
        to_settings(compose(words))
    assert to_settings(compose(words[:1])).generation.export == []


def test_quotes_still_mean_quotes() -> None:
    settings = to_settings(compose(["data.train_files='a [1]'", 'trainer.default_local_dir="a,b"']))
    assert (settings.data.files, settings.trainer.default_local_dir) == (["a [1]"], "a,b")
    assert to_settings(compose(["data.train_files=[dir/a.jsonl,'b c']"])).data.files == ["dir/a.jsonl", "b c"]


def test_files_lie_over_defaults_and_under_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data:\n  max_prompt_length: 77\ngeneration:\n  seed: 3\n")
    settings = to_settings(compose(["generation.seed=4"], layers=[path]))
    assert (settings.data.max_prompt_length, settings.generation.seed) == (77, 4)
    assert settings.actor_rollout_ref.rollout.prompt_length == 77


def test_the_resolved_yaml_is_input_again(tmp_path: Path) -> None:
    config = compose(["data.max_prompt_length=99", "actor_rollout_ref.rollout.stop=['a\"b']"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert to_settings(compose(layers=[path])) == to_settings(config)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        compose(layers=[tmp_path / "none.yaml"])
    for text in ("a: [", "- 1\n- 2\n", "data:\n  max_promt_length: 3\n"):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"bad\.yaml"):
            compose(layers=[path])


def test_a_mapping_is_a_layer_too() -> None:
    settings = to_settings(compose(layers=[{"generation": {"seed": 9}}]))
    assert settings.generation.seed == 9
    assert OmegaConf.is_config(compose())


@pytest.mark.parametrize(
    ("word", "names"),
    [("wandb", ["wandb"]), ("null", []), ("[]", []), ("[console,jsonl]", ["console", "jsonl"])],
)
def test_loggers_may_be_one_name_or_none(word: str, names: list[str]) -> None:
    assert to_settings(compose([f"trainer.logger={word}"])).trainer.logger == names
