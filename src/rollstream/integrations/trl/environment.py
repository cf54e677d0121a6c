"""The user's settings of the rollouts: an environment's keys, the trainer's own values, and prompt rows.

Agent loop, tools, rewards and engine are those of `rollstream generate`, by the same keys. What the trainer
decides (sampling, lengths, seed, repeats) comes from its own arguments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
from omegaconf import DictConfig

from rollstream.config.load import compose, is_set, refuse_keys, to_settings
from rollstream.data.mixed import read_sources
from rollstream.data.prompts import load_prompts
from rollstream.data.row import parse_row
from rollstream.data.values import BadRow, to_jsonable
from rollstream.engine.registry import is_launched
from rollstream.errors import ConfigError, DataError
from rollstream.integrations.configured_groups import Layers, refuse_without_effect, resolve_config
from rollstream.sampling import sampling_of_row
from rollstream.trajectory import PromptRow, SamplingParams

if TYPE_CHECKING:
    from rollstream.integrations.trl.config import GRPOEnvConfig

_ROLLOUT = "actor_rollout_ref.rollout"

_TRAINERS_KEYS = {
    f"{_ROLLOUT}.temperature": "temperature",
    f"{_ROLLOUT}.n": "num_generations",
    f"{_ROLLOUT}.response_length": "max_completion_length",
    f"{_ROLLOUT}.calculate_log_probs": "sampler_correction",
    f"{_ROLLOUT}.weight_transfer": "weight_transfer",
    "generation.seed": "seed",
}
"""Keys that the trainer's arguments decide, and by which one."""

_DATA_KEYS = (
    *(
        "data.train_files",
        "data.sources",
        "data.prompt_key",
        "data.ground_truth_key",
        "data.train_max_samples",
    ),
    *("data.shuffle", "data.seed", "data.custom_cls.path", "data.custom_cls.name", "train_tasks"),
)
"""Keys that say which prompt rows there are."""

_PACKED = "rollstream_row"
"""The column of `RolloutEnvironment.dataset` that has all of a row but its prompt, as JSON text."""
_KEYS = "rollstream_keys"
"""In it: the prompt key of the file's row, another form of the same content, by the key of this one."""

IMAGE_COLUMNS = ("images", "image")
"""In which TRL looks for images, too; a dataset may have them with nothing in them."""

_SEEDED = ("hf", "openvino")
"""Engines that repeat themselves: with others the seed would be an error at start."""


class RolloutEnvironment:
    """Agent loop, rewards and engine, by the keys of `rollstream generate`.

        RolloutEnvironment(
            ["actor_rollout_ref.rollout.name=openvino", "custom_reward_function.path=reward.py"],
        )

    Args:
        overrides: `key=value` words, as on the command line.
        config: layers under them: mappings, or YAML files.

    Raises:
        ConfigError: a key is unknown, decided by the trainer's arguments, or without effect in a training.
    """

    def __init__(self, overrides: Sequence[str] = (), *, config: Layers = ()) -> None:
        self._overrides = list(overrides)
        self._layers = list(config)
        self._given = given = compose(self._overrides, layers=self._layers)
        self.sources = read_sources(to_settings(given).data.sources)
        """The entries of `data.sources`."""
        for key, argument in _TRAINERS_KEYS.items():
            refuse_keys(given, [key], f"is the trainer's to decide: set {argument} in its arguments")
        refuse_without_effect(given, self._overrides, self._layers)
        self.engine_name: str = given.actor_rollout_ref.rollout.name
        """The generating engine's name."""
        other = compose().generation.attempt_timeout + 1
        self.limits_attempts = is_set(given, self._overrides, self._layers, "attempt_timeout", other)
        """Whether `generation.attempt_timeout` is set, if to its default."""

    def resolve(self, args: "GRPOEnvConfig", model_path: str | None, adapter_rank: int = 0) -> DictConfig:
        """The whole configuration. Builds the tasks' files, if there are any.

        Args:
            args: of the trainer.
            model_path: the folder or name that its model was loaded from; a key of one's own goes before it.
            adapter_rank: of the adapter that it trains; 0: it trains the whole model.

        Raises:
            ConfigError: trainer and environment give the chat template different arguments, servers that are
                launched would not know where weights may come from, or the engine cannot be sent any.
        """
        values: dict[str, Any] = {
            "temperature": args.temperature,
            "n": args.num_generations,
            "response_length": args.max_completion_length,
            "name": self.engine_name,
            # What comes of deltas is a folder to a server.
            "weight_transfer": "folder" if args.weight_transfer == "deltas" else args.weight_transfer,
        }
        if args.weight_transfer != "folder" and (adapter_rank or self.engine_name not in ("sglang", "vllm")):
            whose = "a PEFT model" if adapter_rank else f"engine {self.engine_name!r}"
            asked = f"weight_transfer={args.weight_transfer!r}"
            raise ConfigError(f"{asked} is for servers of vLLM and SGLang; leave it out for {whose}")
        tree: dict[str, Any] = {"actor_rollout_ref": {"rollout": values}}
        if self._given.actor_rollout_ref.rollout.launch.server == "rollstream":
            if args.weights_dir is None:
                raise ConfigError("servers of `rollstream serve` load weights from below weights_dir: set it")
            values["launch"] = {"args": {"weights": [args.weights_dir]}}
        if self.engine_name in _SEEDED:
            tree["generation"] = {"seed": args.seed}
        model: dict[str, Any] = {"lora_rank": adapter_rank}
        tree["actor_rollout_ref"]["model"] = model
        if self._given.actor_rollout_ref.model.path is None:
            model["path"] = model_path
        if args.weight_sync == "pinned" and is_launched(
            self.engine_name, self._given.actor_rollout_ref.rollout.server_urls
        ):
            values["launch"] = {"args": {"max_loras": args.steps_ahead + 1}}
        if theirs := dict(args.chat_template_kwargs or {}):
            own = self._given.data.apply_chat_template_kwargs
            if own and own != theirs:
                raise ConfigError(
                    f"data.apply_chat_template_kwargs={own} in the environment, and chat_template_kwargs="
                    f"{theirs} in the trainer's arguments: give one of them"
                )
            tree["data"] = {"apply_chat_template_kwargs": theirs}
        return resolve_config(self._overrides, [*self._layers, tree])

    def refuse_data(self) -> None:
        """Refuses keys that say which prompt rows there are, where a dataset is given.

        Raises:
            ConfigError: there are some.
        """
        refuse_keys(self._given, _DATA_KEYS, "no effect where a dataset is given: leave one of them out")

    def dataset(self) -> Any:
        """The prompt rows of `data.train_files` and `train_tasks` as a `datasets.Dataset` for a trainer.

        Columns: `prompt` (messages), and one by which `read_row` gets the whole row back.

        Raises:
            ConfigError: no data is named, or rows have images.
            DataError: a file cannot be read.
        """
        from datasets import Dataset

        rows = load_prompts(to_settings(resolve_config(self._overrides, self._layers)).data)
        if rows.has_images():
            raise ConfigError(NO_IMAGES)
        return Dataset.from_list([_pack(row) for row in map(rows.row, rows.order)])


NO_IMAGES = (
    "the prompt rows have images, and a training with TRL passes none on: the loss would be of a prompt that "
    "the model never saw"
)


def _pack(row: PromptRow) -> dict[str, Any]:
    """An example of which `read_row` makes the row again."""
    names = ("data_source", "ground_truth", "extra_info", "agent_name", "tools_kwargs")
    columns = {name: getattr(row, name) for name in names} | row.columns
    example = {"prompt": row.messages, _PACKED: orjson.dumps(columns).decode()}
    keys = {read_row(example).prompt_key: row.prompt_key}
    return {**example, _PACKED: orjson.dumps({**columns, _KEYS: keys}).decode()}


def read_row(example: Mapping[str, Any], index: int | None = None) -> PromptRow:
    """A dataset's example as a prompt row: columns of a data file, or of `RolloutEnvironment.dataset`.

    Args:
        example: of the dataset.
        index: of the example; None: it is not known, and messages show the prompt.

    Raises:
        DataError: it is no prompt row, or has images.
    """
    columns = dict(example)
    packed, keys = columns.pop(_PACKED, None), {}
    if packed is not None:
        known = {key: value for key, value in orjson.loads(packed).items() if value is not None}
        keys = known.pop(_KEYS, {})
        columns = {**known, **columns}
    which = f"the row with the prompt {example.get('prompt')!r:.200}" if index is None else f"row {index}"
    try:
        # Arrow has filled mappings up with the keys of other rows, as null; a schema would be shown with them.
        nested = {key: value for key, value in columns.items() if isinstance(value, dict | list)}
        for key in nested.keys() - set(IMAGE_COLUMNS):
            columns[key] = to_jsonable(nested[key], drop_none=True)
        row = parse_row(columns, index or 0, "prompt")[0]
    except BadRow as error:
        raise DataError(f"{which} of the dataset: {error}") from error
    if row.images:
        raise DataError(f"{which} of the dataset: {NO_IMAGES}")
    return replace(row, prompt_key=keys.get(row.prompt_key, row.prompt_key))


def refuse_sampling(sampling: SamplingParams, temperature: float) -> None:
    """Refuses to sample from another distribution than the one whose log-probs the loss computes.

    The end of an answer (`max_tokens`, `stop`, `ignore_eos`) and its seed change no distribution.

    Raises:
        ConfigError: another temperature than the trainer's, or anything that changes the model's own probabilities.
    """
    known = {"temperature": temperature, "top_p": 1.0, "top_k": -1}
    values = {**{name: getattr(sampling, name) for name in known}, **sampling.extra}
    other = [f"{name}={value!r:.100}" for name, value in values.items() if value != known.get(name)]
    if other:
        raise ConfigError(
            f"{', '.join(other)} is asked for, and the loss knows the model's own distribution at temperature="
            f"{temperature:g}: a training samples from no other (a row's sampling_params, a program with "
            "gateway.client_sampling, an agent loop)"
        )


def datasets_of(evaluated: Any) -> list[Any]:
    """The datasets in TRL's `eval_dataset` that can be looked into before: not those that are streamed."""
    from datasets import Dataset

    given = evaluated.values() if isinstance(evaluated, Mapping) else [evaluated]
    return [one for one in given if isinstance(one, Dataset)]


def check_dataset(dataset: Any, sampling: SamplingParams) -> set[str]:
    """Refuses what cannot be trained on, before anything is generated: reads every row.

    Args:
        dataset: a `datasets.Dataset` with the columns of a prompt row.
        sampling: the trainer's.

    Returns:
        The agent loops that rows name.

    Raises:
        ConfigError: it is not a `datasets.Dataset`, has no prompts, or has images.
        DataError: a row is no prompt row, or asks for sampling that the loss does not know of; names the row.
    """
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        raise ConfigError(
            "train_dataset must be a datasets.Dataset: prompts are generated ahead by their index, and a "
            f"{type(dataset).__name__} has none"
        )
    if "prompt" not in dataset.column_names:
        raise ConfigError(f"the dataset has no column 'prompt'; it has: {', '.join(dataset.column_names)}")
    media = [name for name in (*IMAGE_COLUMNS, "videos", "audios") if name in dataset.column_names]
    if any(_is_there(value) for column in media for value in dataset[column]):
        raise ConfigError(NO_IMAGES)
    names = set()
    for index, example in enumerate(dataset):
        row = read_row(example, index)
        names.add(row.agent_name)
        if (own := row.columns.get("sampling_params")) is not None:
            try:
                refuse_sampling(sampling_of_row(sampling, own), sampling.temperature)
            except (ConfigError, DataError) as error:
                raise DataError(f"row {index} of the dataset: {error}") from error
    return {name for name in names if name}


def _is_there(value: Any) -> bool:
    """Whether a column of images (each one, or a list of them, of any kind) has some in a row."""
    return any(map(_is_there, value)) if isinstance(value, list) else value is not None
