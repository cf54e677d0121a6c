"""A trainer in the same program: batches generated ahead of the step, with bounded staleness."""

from rollstream.rollout.annotate import Teacher
from rollstream.rollout.teachers import Teachers
from rollstream.training.ahead import BatchesAhead
from rollstream.training.async_batches import AsyncBatchGenerator, BatchRequest, BatchResult
from rollstream.training.collate import collate, emission_views, to_dataproto
from rollstream.training.corrections import (
    importance_ratios,
    is_stats,
    masked_is_weights,
    truncated_is_weights,
)
from rollstream.training.curriculum import Curriculum
from rollstream.training.group import CallableGenerator, Group, GroupBatch, GroupGenerator
from rollstream.training.ledger import Ledger
from rollstream.training.lookahead import AsyncDataLoaderWrapper
from rollstream.training.mixture import Mixture, Source
from rollstream.training.plan import FunctionPlan, Plan, PlannedGroup, ShuffledPlan
from rollstream.training.ray_groups import RayGroups
from rollstream.training.replay import ReplayGroups
from rollstream.training.rollout_groups import RolloutGroups
from rollstream.training.selection import GroupFilter, GroupRank, NoSignal, Priority, TokenBudget
from rollstream.training.staleness import StalenessRule
from rollstream.training.step_rewards import discounted_returns, step_advantages
from rollstream.training.store import TrainingStore
from rollstream.training.timing import StepTimes

__all__ = [
    "AsyncBatchGenerator",
    "AsyncDataLoaderWrapper",
    "BatchRequest",
    "BatchResult",
    "BatchesAhead",
    "CallableGenerator",
    "Curriculum",
    "FunctionPlan",
    "Group",
    "GroupBatch",
    "GroupFilter",
    "GroupGenerator",
    "GroupRank",
    "Ledger",
    "Mixture",
    "NoSignal",
    "Plan",
    "PlannedGroup",
    "Priority",
    "RayGroups",
    "ReplayGroups",
    "RolloutGroups",
    "ShuffledPlan",
    "Source",
    "StalenessRule",
    "StepTimes",
    "Teacher",
    "Teachers",
    "TokenBudget",
    "TrainingStore",
    "collate",
    "discounted_returns",
    "emission_views",
    "importance_ratios",
    "is_stats",
    "masked_is_weights",
    "step_advantages",
    "to_dataproto",
    "truncated_is_weights",
]
