"""The configuration as typed, validated values. Defaults live in `generation.yaml`, and only there.

Classes are named after the keys they hold. A class of the house takes the few values it needs, never all.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """`actor_rollout_ref.model`."""

    path: str | None
    tokenizer_path: str | None
    custom_chat_template: str | None
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """`actor_rollout_ref.rollout.agent`."""

    num_workers: int | None
    default_agent_loop: str
    agent_loop_config_path: str | None


@dataclass(frozen=True, slots=True)
class MultiTurnSettings:
    """`actor_rollout_ref.rollout.multi_turn`. Times in seconds."""

    max_assistant_turns: int | None
    max_user_turns: int | None
    tool_config_path: str | None
    function_tool_path: str | None
    format: str
    show_tools: bool
    max_parallel_calls: int
    max_tool_response_length: int
    tool_response_truncate_side: Literal["left", "right", "middle"]
    tool_timeout: float
    interaction_config_path: str | None
    interaction_timeout: float


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """`actor_rollout_ref.rollout.launch`: servers that rollstream starts itself. Times in seconds."""

    where: Literal["auto", "local", "ray"]
    server: Literal["auto", "sglang", "vllm", "rollstream"]
    replicas: int | None
    python: str | None
    args: dict[str, Any]
    env: dict[str, Any]
    startup_timeout: float
    unhealthy_timeout: float
    max_restarts: int
    restart_delay: float
    restart_delay_max: float


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """`actor_rollout_ref.rollout`: the engine and how it samples. Lengths in tokens."""

    name: str
    n: int
    temperature: float
    top_p: float
    top_k: int
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    extra_sampling: dict[str, Any]
    calculate_log_probs: bool
    prompt_length: int
    response_length: int
    max_model_len: int | None
    server_urls: list[str]
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    gpu_memory_utilization: float | None
    dtype: str
    load_format: str
    launch: LaunchSettings
    engine_kwargs: dict[str, Any]
    on_weight_update: Literal["continue", "restart", "abort"]
    agent: AgentSettings
    multi_turn: MultiTurnSettings


@dataclass(frozen=True, slots=True)
class ActorRolloutRefSettings:
    """`actor_rollout_ref`."""

    model: ModelSettings
    rollout: RolloutSettings


@dataclass(frozen=True, slots=True)
class CustomClassSettings:
    """A class in a Python file of the user's."""

    path: str | None
    name: str | None


@dataclass(frozen=True, slots=True)
class DataSettings:
    """`data`. Lengths in tokens."""

    train_files: str | list[str] | None
    prompt_key: str
    max_prompt_length: int
    truncation: Literal["error", "left", "right", "middle"]
    filter_overlong_prompts: bool
    train_max_samples: int
    shuffle: bool
    seed: int
    apply_chat_template_kwargs: dict[str, Any]
    tool_config_path: str | None
    fetch_images: bool
    custom_cls: CustomClassSettings

    @property
    def files(self) -> list[str]:
        """`train_files` as a list."""
        if self.train_files is None:
            return []
        return [self.train_files] if isinstance(self.train_files, str) else list(self.train_files)


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """`custom_reward_function`. Times in seconds."""

    path: str | None
    name: str
    reward_kwargs: dict[str, Any]
    timeout: float
    max_concurrency: int


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """`trainer`."""

    nnodes: int
    n_gpus_per_node: int | None
    project_name: str
    experiment_name: str
    default_local_dir: str
    logger: list[Literal["console", "wandb", "trackio", "tensorboard", "jsonl"]]


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """`generation`. Times in seconds."""

    resume: Literal["auto", "never", "extend"]
    shard: str | None
    """`i/k`; see `shard_of`."""
    seed: int | None
    executor: Literal["local", "ray", "verl"]
    processes: int
    verl_overrides: list[str]
    max_in_flight: int
    adaptive_in_flight: bool
    max_attempts: int
    attempt_timeout: float
    retry_delay: float
    retry_delay_max: float
    engine_timeout: float
    max_failed_share: float
    retry_failed: bool
    save_batch_size: int
    pull_timeout: float
    final_merge: bool
    export: list[Literal["jsonl", "dataproto"]]
    export_unscored: Literal["error", "keep", "drop"]
    """See `DataProtoOptions.unscored`."""
    upload_artifact: bool | str
    """A text names the artifact."""
    metrics_port: int | None
    grace_period: float
    show_progress: bool
    log_level: Literal["debug", "info", "warning", "error"]

    @property
    def shard_of(self) -> tuple[int, int] | None:
        """Number of this driver's shard and how many there are; None: the whole run.

        Raises `ValueError` when `shard` is no `i/k` with `0 <= i < k`.
        """
        if self.shard is None:
            return None
        found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", self.shard)
        if found is None or not int(found[1]) < int(found[2]):
            raise ValueError(self.shard)
        return int(found[1]), int(found[2])


@dataclass(frozen=True, slots=True)
class RaySettings:
    """`ray_kwargs`."""

    ray_init: dict[str, Any]
    worker: dict[str, Any]
    replica: dict[str, Any]
    timeline_json_file: str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration of a generation run."""

    actor_rollout_ref: ActorRolloutRefSettings
    data: DataSettings
    train_tasks: list[dict[str, Any]] | None
    custom_reward_function: RewardSettings
    trainer: TrainerSettings
    generation: GenerationSettings
    ray_kwargs: RaySettings
