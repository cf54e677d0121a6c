"""The configuration as typed, validated values. Defaults live in `generation.yaml`, and only there.

A type says which values a key takes. Classes are named after the keys they hold. A class of the house takes
the few values it needs, never all.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

LARGEST = 1e9
"""No setting is meaningful beyond it (as seconds: thirty years), and waits overflow not far above."""

Text = Annotated[str, Meta(min_length=1)]
LocalPath = Annotated[str, Meta(min_length=1, extra={"path": True})]
"""A file or folder; `load.to_stored_yaml` makes it absolute where there is one of that name."""
Count = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Limit = Annotated[float, Meta(gt=0, le=LARGEST)]
"""Seconds that something may take."""
Delay = Annotated[float, Meta(ge=0, le=LARGEST)]
"""Seconds to wait."""
Share = Annotated[float, Meta(ge=0, le=1)]
AboveZeroShare = Annotated[float, Meta(gt=0, le=1)]
ArtifactName = Annotated[
    str,
    Meta(pattern=r"^(?!(?i:yes|no|on|off|true|false)$)(?=.*[A-Za-z])[A-Za-z0-9_.-]{1,128}$"),
]
"""What W&B takes (source: `wandb.sdk.artifacts._validators`), but for what are slips: bare numbers, `yes`."""
Amount = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0, le=1e18)]
"""What a worker claims of a resource of Ray's."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    path: LocalPath | None
    tokenizer_path: LocalPath | None
    custom_chat_template: LocalPath | None
    trust_remote_code: bool
    lora_rank: NotNegative


@dataclass(frozen=True, slots=True)
class AgentSettings:
    num_workers: Count | None
    default_agent_loop: Text
    agent_loop_config_path: LocalPath | None


@dataclass(frozen=True, slots=True)
class MultiTurnSettings:
    """`actor_rollout_ref.rollout.multi_turn`. Times in seconds."""

    max_assistant_turns: Count | None
    max_user_turns: Count | None
    tool_config_path: LocalPath | None
    function_tool_path: LocalPath | None
    format: Text
    show_tools: bool
    max_parallel_calls: Count
    max_tool_response_length: Count
    tool_response_truncate_side: Literal["left", "right", "middle"]
    tool_timeout: Limit
    interaction_config_path: LocalPath | None
    interaction_timeout: Limit


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """`actor_rollout_ref.rollout.launch`: servers that rollstream starts itself. Times in seconds."""

    where: Literal["auto", "local", "ray"]
    server: Literal["auto", "sglang", "vllm", "rollstream"]
    replicas: Count | None
    python: Text | None
    args: dict[str, Any]
    env: dict[str, Any]
    startup_timeout: Limit
    unhealthy_timeout: Limit
    max_restarts: NotNegative
    restart_delay: Delay
    restart_delay_max: Delay


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """`actor_rollout_ref.rollout`: the engine and how it samples. Lengths in tokens."""

    name: Text
    n: Annotated[int, Meta(ge=1, le=int(LARGEST))]
    temperature: Annotated[float, Meta(ge=0, le=LARGEST)]
    top_p: AboveZeroShare
    top_k: Annotated[int, Meta(ge=-1)]
    stop: list[Text]
    stop_token_ids: list[int]
    ignore_eos: bool
    extra_sampling: dict[str, Any]
    calculate_log_probs: bool
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None
    prompt_length: Count
    response_length: Count
    max_model_len: Count | None
    server_urls: list[Text]
    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    data_parallel_size: Count
    gpu_memory_utilization: AboveZeroShare | None
    dtype: Text
    load_format: Text
    weight_transfer: Literal["folder", "gloo", "nccl"]
    launch: LaunchSettings
    engine_kwargs: dict[str, Any]
    on_weight_update: Literal["continue", "restart", "abort"]
    agent: AgentSettings
    multi_turn: MultiTurnSettings


@dataclass(frozen=True, slots=True)
class ActorRolloutRefSettings:
    model: ModelSettings
    rollout: RolloutSettings


@dataclass(frozen=True, slots=True)
class CustomClassSettings:
    """A class in a Python file of the user's."""

    path: LocalPath | None
    name: Text | None


@dataclass(frozen=True, slots=True)
class DataSettings:
    """`data`. Lengths in tokens."""

    train_files: LocalPath | list[LocalPath] | None
    sources: list[dict[str, Any]] | None
    """See `data.mixed.SourceConfig`."""
    prompt_key: Text
    ground_truth_key: Text | None
    max_prompt_length: Count
    truncation: Literal["error", "left", "right", "middle"]
    filter_overlong_prompts: bool
    train_max_samples: Annotated[int, Meta(ge=-1)]
    shuffle: bool
    seed: int
    apply_chat_template_kwargs: dict[str, Any]
    tool_config_path: LocalPath | None
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

    path: LocalPath | None
    name: Text
    reward_kwargs: dict[str, Any]
    timeout: Limit
    max_concurrency: Count
    processes: NotNegative = 0
    of_sources: dict[str, Any] = field(default_factory=dict)
    """No key of the configuration: the rewards of `data.sources`; see `rollout.setup.reward_settings`."""
    data_sources: dict[str, str] = field(default_factory=dict)
    """No key either: by the name of a source the data source that it gives its rows."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    nnodes: Count
    n_gpus_per_node: NotNegative | None
    project_name: Text
    experiment_name: Text
    default_local_dir: LocalPath
    logger: list[Text]
    """`console`, and entry points of `rollstream.trackers`."""


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """`generation`. Times in seconds."""

    resume: Literal["auto", "never", "extend"]
    shard: Text | None
    """`i/k`; see `shard_of`."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None
    executor: Text
    """`local`, `ray`, or an entry point of `rollstream.executors`."""
    processes: Count
    verl_overrides: list[Text]
    max_in_flight: Count | None
    """None: see `rollout.setup.in_flight_limit`."""
    adaptive_in_flight: bool
    max_attempts: Count
    attempt_timeout: Limit
    retry_delay: Delay
    retry_delay_max: Delay
    engine_timeout: Limit
    max_failed_share: Share
    retry_failed: bool
    rescore: bool
    stop_after_failures: Annotated[int, Meta(ge=0)]
    save_batch_size: Count
    keep_turns: bool
    pull_timeout: Limit
    final_merge: bool
    keep_batches: bool
    export: list[Text]
    """Entry points of `rollstream.exports`."""
    export_unscored: Literal["error", "keep", "drop"]
    """See `DataProtoOptions.unscored`."""
    upload_artifact: bool | ArtifactName
    """A text names the artifact."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] | None
    grace_period: Delay
    show_progress: bool
    log_level: Literal["debug", "info", "warning", "error"]

    @property
    def shard_of(self) -> tuple[int, int] | None:
        """Number of this driver's shard and how many there are; None: the whole run."""
        if self.shard is None:
            return None
        number, _, count = self.shard.partition("/")
        return int(number), int(count)


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """`gateway.limits`: of one program with all that it starts. None is no limit."""

    memory: Count | None
    """MiB."""
    processes: Count | None
    disk: Count | None
    """MiB, in its folders."""
    cpu: Count | None
    """Seconds of one process."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """`gateway`: agent programs and functions as agent loops, and what their calls may ask for."""

    command: list[LocalPath]
    function: Text | None
    outcome: Literal["auto", "result", "exit_code"]
    timeout: Limit | None
    """Seconds; None: nearly `generation.attempt_timeout`."""
    keep_workdir: Literal["never", "failed", "always"]
    env: dict[str, Any]
    pass_env: list[Text]
    client_sampling: bool
    strict: bool
    train_side_calls: bool
    max_calls: Count
    max_bytes: Count
    sandbox: Text
    """An entry point of `rollstream.sandboxes`."""
    image: Text | None
    mounts: list[Text]
    network: Literal["auto", "gateway", "host"]
    limits: ProgramLimits


class WorkerOptions(TypedDict, total=False):
    """`ray_kwargs.worker`: what may be said of a worker's actor. Its life and name are rollstream's."""

    num_cpus: Amount
    num_gpus: Amount
    memory: Amount
    resources: dict[str, Amount]
    accelerator_type: str
    label_selector: dict[str, str]
    scheduling_strategy: Literal["DEFAULT", "SPREAD"]
    runtime_env: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RaySettings:
    ray_init: dict[str, Any]
    worker: WorkerOptions
    replica: dict[str, Any]
    timeline_json_file: Text | None


@dataclass(frozen=True, slots=True)
class Settings:
    """The whole configuration of a generation run."""

    actor_rollout_ref: ActorRolloutRefSettings
    data: DataSettings
    train_tasks: list[dict[str, Any]] | None
    custom_reward_function: RewardSettings
    trainer: TrainerSettings
    generation: GenerationSettings
    gateway: GatewaySettings
    ray_kwargs: RaySettings
