"""Configuration: unknown keys get the nearest name, values their types, and YAML files are input again."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rollstream.config.load import compose, to_settings, to_stored_yaml, to_yaml
from rollstream.errors import ConfigError
from rollstream.generation.main import main


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


NEAREST = {
    "actor_rollout_ref.rollout.temprature": "actor_rollout_ref.rollout.temperature",
    "data.max_promt_length": "data.max_prompt_length",
    "response_length": "actor_rollout_ref.rollout.response_length",
    "generation.temperature": "actor_rollout_ref.rollout.temperature",
    "generatoin.seed": "generation",
    "generation.bogus": None,
    "data.nope": None,
}


@pytest.mark.parametrize(("key", "near"), NEAREST.items())
def test_an_unknown_key_is_named_with_the_nearest_known_one(key: str, near: str | None) -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        compose([f"+{key}=1"])
    assert (f"did you mean {near!r}" if near else "'. All keys") in str(caught.value)


WRONG = """
generation.save_batch_size=0
actor_rollout_ref.rollout.n=two
actor_rollout_ref.rollout.top_p=0
actor_rollout_ref.rollout.top_k=0
generation.resume=maybe
data.truncation=middel
generation.export=[jsn]
generation.export=[parquet]
trainer.default_local_dir=''
data.train_files=
data.train_files=['']
generation.pull_timeout=inf
actor_rollout_ref.rollout.temperature=nan
actor_rollout_ref.rollout.max_model_len=100
generation.seed=-1
data.train_files
data/b.jsonl
actor_rollout_ref.rollout.n=1,2
data.train_files=a,b
data.train_files=[dír/a]
generation.grace_period=x[
data.apply_chat_template_kwargs.tokenize=true
generation.upload_artifact=5
generation.upload_artifact=yes
generation.shard=4/4
generation.shard=four
data=5
data=legacy_data
hydra/launcher=slurm
+model@actor.model=hf_model
data.train_files=${nowhere}
trainer.logger=wand
generation.executor=slurm
"""

VERLS = """
hydra.searchpath=[file://x]
hydra.run.dir=x
hydra.mode=MULTIRUN
reward_model.reward_manager=batch
reward.reward_manager.name=gdpo
reward.reward_manager.module.path=managers.py
reward.sandbox_fusion.url=http://127.0.0.1:1
data.datagen.path=make_rows.py
actor_rollout_ref.rollout.quantization=fp8
actor_rollout_ref.rollout.trace.backend=weave
reward.reward_model.enable=true
reward_model.overlong_buffer.enable=true
data.mm_processor_kwargs={a: 1}
actor_rollout_ref.model.lora_adapter_path=a
actor_rollout_ref.model.override_config.dropout=0
data.image_key=pictures
data.video_key=clips
data.reward_fn_key=source
"""
"""What would change the data, and is not done here."""


@pytest.mark.parametrize("word", (WRONG + VERLS).split("\n")[1:-1])
def test_what_is_wrong_is_named_by_its_key(word: str, caplog: pytest.LogCaptureFixture) -> None:
    if not word:
        return
    with pytest.raises(ConfigError) as caught:
        to_settings(compose([word]))
    key = word.lstrip("+").partition("=")[0]
    assert key.rpartition(".")[2] in str(caught.value) or "${" in word
    assert "nothing here depends on" not in caplog.text


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {max_promt_length: 3, seed: x}\ngeneration: {resume: maybe}\n")
    with pytest.raises(ConfigError) as caught:
        compose(["generation.bogus=1", "actor_rollout_ref.rollout.n=0", "trainer.nnodes="], layers=[path])
    first, *lines = str(caught.value).splitlines()
    assert first == "the configuration has 6 problems:"
    assert [line.split()[0] for line in lines] == [
        *(f"{path}:", "unknown", "actor_rollout_ref.rollout.n", "data.seed", "trainer.nnodes"),
        "generation.resume",
    ]


VERL_STYLE = """
hydra:
  searchpath: [file://GROUPS]
  job: {chdir: false}
defaults:
  - generation
  - legacy@data: legacy_data
  - _self_
actor_rollout_ref:
  hybrid_engine: true
  rollout: {mode: async, n: 4, do_sample: true, multi_turn: {enable: true}}
data:
  train_files: train.parquet
  return_raw_chat: true
  image_key: images
  filter_overlong_prompts_workers: 4
reward_model: {enable: false, use_reward_loop: false, enable_resource_pool: false}
tasks: null
trainer: {total_epochs: 3, experiment_name: mine}
"""


def test_a_configuration_as_verl_users_write_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "groups" / "legacy").mkdir(parents=True)
    group = "prompt_key: question\nshuffle: true\nseed: null\nuse_shm: false\nsome_key: 1\n"
    group += "audio_key: ${oc.select:data.some_key,audios}\n"
    (tmp_path / "groups" / "legacy" / "legacy_data.yaml").write_text(group)
    path = tmp_path / "run.yaml"
    path.write_text(VERL_STYLE.replace("GROUPS", str(tmp_path / "groups")))
    settings = to_settings(compose(["data.shuffle=false"], layers=[path]))
    assert (settings.data.prompt_key, settings.data.shuffle, settings.data.seed) == ("question", False, 0)
    assert (settings.data.files, settings.actor_rollout_ref.rollout.n) == (["train.parquet"], 4)
    assert settings.trainer.default_local_dir == "outputs/rollstream/mine"
    for key in (
        "data.return_raw_chat",
        "data.some_key",
        "reward_model",
        "tasks",
        "hybrid_engine",
        "hydra, ",
    ):
        assert key in caplog.text
    (tmp_path / "groups" / "legacy" / "legacy_data.yaml").write_text(f"{group}video_key: clips\n")
    changes = [
        ("job: {chdir: false}", "run: {dir: there}"),
        ("enable: false,", "enable: true,"),
        ("key: images", "key: pictures"),
        ("tasks: null", "tasks: [a]"),
    ]
    text = path.read_text()
    for old, new in changes:
        text = text.replace(old, new)
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(layers=[path])
    assert "reward_model.enable=True: call a reward model from a custom_reward" in str(caught.value)
    assert "data.image_key=pictures: a row's images are in its column" in str(caught.value)
    assert "tasks=['a']: it is train_tasks here" in str(caught.value)
    assert "hydra.run.dir=there: the run directory is trainer.default_local_dir" in str(caught.value)
    assert "data.video_key=clips: videos are not known" in str(caught.value)


def test_config_groups_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("defaults:\n  - generation\n  - _self_\ndata: {seed: 4}\n")
    assert to_settings(compose(layers=[path])).data.seed == 4
    path.write_text("hydra: [a]\ndata: {seed: 4}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml cannot be composed"):
        compose(layers=[path])
    path.write_text("defaults:\n  - data: legacy_data\n")
    with pytest.raises(ConfigError, match=r"run\.yaml cannot be composed: .*data/legacy_data.*pkg://verl"):
        compose(layers=[path])


def test_several_files_lie_over_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("data: {seed: 1, train_files: [a, b]}\ngeneration: {seed: 1}\n")
    two.write_text("data: {seed: 2}\n")
    assert main(["--config", str(one), "--config", str(two), "--show-config", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["data"]["seed"], shown["data"]["train_files"], shown["generation"]["seed"]) == (
        2,
        ["a", "b"],
        1,
    )


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    words = ["actor_rollout_ref.rollout.agent.num_workers=8", "trainer.n_gpus_per_node=8"]
    compose(words)
    assert "no effect" in caplog.text
    assert "agent.num_workers, trainer.n_gpus_per_node" in caplog.text
    caplog.clear()
    compose(["ray_kwargs.ray_init={num_cpus: null}"])  # as in verl's files
    assert not caplog.text
    compose(["ray_kwargs.ray_init={num_cpus: 2}"])
    assert "ray_kwargs.ray_init" in caplog.text
    caplog.clear()
    compose([*words, "generation.executor=ray", "actor_rollout_ref.rollout.name=vllm"])
    assert not caplog.text


def test_a_tree_with_unknown_keys_is_refused() -> None:
    tree = compose()
    OmegaConf.update(tree, "generation.save_batch_sze", 3, force_add=True)
    with pytest.raises(ConfigError, match=r"generation\.save_batch_sze'; did you mean .*save_batch_size"):
        to_settings(tree)


def test_a_stored_configuration_can_be_used_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there" / "data").mkdir(parents=True)
    (tmp_path / "there" / "data" / "v.parquet").touch()
    monkeypatch.chdir(tmp_path / "there")
    words = ["data.train_files=[data/v.parquet]", "trainer.default_local_dir=o/r1"]
    stored = to_stored_yaml(compose([*words, "actor_rollout_ref.model.path=org/name"]))
    (tmp_path / "config.yaml").write_text(stored)
    monkeypatch.chdir("/")
    settings = to_settings(compose(layers=[tmp_path / "config.yaml"]))
    assert settings.data.files == [str(tmp_path / "there" / "data" / "v.parquet")]
    assert settings.trainer.default_local_dir == str(tmp_path / "there" / "o" / "r1")
    assert settings.actor_rollout_ref.model.path == "org/name"


def test_the_configuration_of_a_moved_run_means_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("copy").mkdir()
    Path("copy/run.json").touch()
    Path("copy/config.yaml").write_text(to_stored_yaml(compose(["trainer.default_local_dir=original"])))
    layers = [Path("copy/config.yaml")]
    assert to_settings(compose(layers=layers)).trainer.default_local_dir == str(tmp_path / "copy")
    named = compose(["trainer.default_local_dir=other"], layers=layers)
    assert to_settings(named).trainer.default_local_dir == "other"
    Path("copy/config.yaml").write_text("trainer:\n")
    assert compose(layers=layers).trainer.default_local_dir == str(tmp_path / "copy")
    Path("copy/config.yaml").write_text("trainer: 3")
    with pytest.raises(ConfigError, match="trainer must hold keys"):
        compose(layers=layers)


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
    tree = OmegaConf.create(
        {"generation": {"seed": 9}, "data": {"seed": "${generation.seed}", "prompt_key": "???"}}
    )
    for layer in ({"generation": {"seed": 9}}, tree):
        assert to_settings(compose(layers=[layer])).generation.seed == 9
    assert to_settings(compose(["generation.seed=8"], layers=[tree])).data.seed == 8
    assert OmegaConf.is_config(compose())


@pytest.mark.parametrize(
    ("word", "names"),
    [("wandb", ["wandb"]), ("null", []), ("[]", []), ("[console,jsonl]", ["console", "jsonl"])],
)
def test_loggers_may_be_one_name_or_none(word: str, names: list[str]) -> None:
    assert to_settings(compose([f"trainer.logger={word}"])).trainer.logger == names


def test_verls_keys_on_the_command_line_are_left_out_as_in_a_file(caplog: pytest.LogCaptureFixture) -> None:
    left_out = [
        *("data.return_raw_chat=true", "data.filter_overlong_prompts_workers=8", "data.use_shm=true"),
        *("data.cache_dir=x", "data.image_key=images", "data.video_key=videos"),
        *("data.reward_fn_key=data_source", "reward_model.enable=false"),
        *("actor_rollout_ref.model.lora_alpha=32", "actor_rollout_ref.model.override_config={}"),
        *("reward_model.use_reward_loop=false", "reward_model.enable_resource_pool=false"),
    ]
    settings = to_settings(compose(["data.shuffle=true", "data.seed=7", *left_out]))
    assert (settings.data.shuffle, settings.data.seed) == (True, 7)
    assert len(caplog.messages) == 1
    names = {word.partition("=")[0] for word in left_out if not word.startswith("reward_model")}
    assert all(name in caplog.text for name in {*names, "reward_model"})
    assert to_settings(compose(["data.seed=null"])).data.seed == 0


def test_a_setting_that_has_two_names_in_verl(tmp_path: Path) -> None:
    words = ["data.max_response_length=48", "data.trust_remote_code=true", "data.tokenizer=~/tok en"]
    settings = to_settings(compose(words))
    assert settings.actor_rollout_ref.rollout.response_length == 48
    assert settings.actor_rollout_ref.model.trust_remote_code
    assert settings.actor_rollout_ref.model.tokenizer_path == "~/tok en"
    both = ["actor_rollout_ref.rollout.response_length=9", "data.max_response_length=48"]
    assert to_settings(compose(both)).actor_rollout_ref.rollout.response_length == 48
    assert to_settings(compose(both[::-1])).actor_rollout_ref.rollout.response_length == 9
    file = tmp_path / "config.yaml"
    file.write_text(to_stored_yaml(compose(["data.max_prompt_length=1000", *both])))
    settings = to_settings(compose(["data.max_prompt_length=1200"], layers=[file]))
    assert (settings.data.max_prompt_length, settings.actor_rollout_ref.rollout.prompt_length) == (1200, 1200)
    file.write_text(
        "data:\n  max_response_length: 48\n"
        "  function_tool_path: '${actor_rollout_ref.rollout.multi_turn.function_tool_path}'\n"
        "actor_rollout_ref: {rollout: {response_length: '${oc.select:data.max_response_length,512}'}}\n"
        "reward: {custom_reward_function: {path: mine.py, name: null, reward_kwargs: {a: 1}}}\n"
    )
    settings = to_settings(compose(layers=[file]))
    assert settings.actor_rollout_ref.rollout.response_length == 48
    word = "reward.custom_reward_function.reward_kwargs.b=2"
    assert to_settings(compose([word])).custom_reward_function.reward_kwargs == {"b": 2}
    reward = settings.custom_reward_function
    assert (reward.path, reward.name, reward.reward_kwargs) == ("mine.py", "compute_score", {"a": 1})
    file.write_text("data: {max_response_length: 48}\nactor_rollout_ref: {rollout: {response_length: 9}}\n")
    with pytest.raises(
        ConfigError, match=r"max_response_length and actor_rollout_ref\.rollout\.response_length"
    ):
        compose(layers=[file])


def test_a_trainers_placeholder_does_not_decide_where_weights_come_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "actor_rollout_ref.rollout.load_format"
    file = tmp_path / "run.yaml"
    file.write_text("actor_rollout_ref: {rollout: {load_format: dummy, max_num_seqs: 64}}\n")
    for words, kept in ([], "auto"), ([f"{key}=safetensors", f"{key}=dummy_dtensor"], "safetensors"):
        caplog.clear()
        settings = to_settings(compose(words, layers=[file]))
        assert settings.actor_rollout_ref.rollout.load_format == kept
        assert len(caplog.messages) == 1
        assert f"{key}=dummy" in caplog.text and "actor_rollout_ref.rollout.launch.args" in caplog.text


def test_reward_managers_that_call_one_function_for_each_answer_are_what_happens_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = ["reward_model.reward_manager=dapo", "reward.reward_manager.name=naive", "data.datagen.name=null"]
    compose([*words, "reward.sandbox_fusion.max_concurrent=9", "actor_rollout_ref.rollout.seed=42"])
    assert len(caplog.messages) == 1


def test_now_is_resolved_without_hydra_composing() -> None:
    config = compose(["trainer.experiment_name='run-${now:%Y}'"])
    name = to_settings(config).trainer.experiment_name
    assert re.fullmatch(r"run-\d{4}", name)


@pytest.mark.parametrize(
    ("folder", "installed", "tools", "engine"),
    [
        ("exported", ["openvino_genai", "torch", "transformers", "vllm"], ["nvidia-smi"], "openvino"),
        ("exported", ["torch", "transformers"], [], "hf"),
        ("plain", ["openvino_genai", "torch", "transformers"], [], "hf"),
        ("plain", ["openvino_genai", "torch", "transformers", "vllm"], [], "hf"),
        ("plain", ["torch", "transformers", "vllm"], ["rocm-smi"], "vllm"),
        ("org/name", ["torch", "transformers", "vllm", "sglang"], ["nvidia-smi"], "sglang"),
        ("org/name", ["openvino_genai"], [], "openvino"),  # which says what to install
    ],
)
def test_an_engine_that_can_load_the_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    installed: list[str],
    tools: list[str],
    engine: str,
) -> None:
    for name in ("exported", "plain"):
        (tmp_path / name).mkdir()
    (tmp_path / "exported" / "openvino_model.xml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
    words = [f"actor_rollout_ref.model.path={folder}"]
    assert compose(words).actor_rollout_ref.rollout.name == engine
    named = compose([*words, "actor_rollout_ref.rollout.name=openai"])
    assert named.actor_rollout_ref.rollout.name == "openai"
