"""Which prompts are generated: those of TRL's sampler, known ahead by replaying it, or a curriculum's."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from statistics import pstdev
from typing import TYPE_CHECKING, Any

from rollstream.errors import ConfigError
from rollstream.training import Curriculum, Group, GroupFilter, NoSignal, Plan, Priority, TokenBudget
from rollstream.training.curriculum import easy_to_hard, medium_first
from rollstream.training.plan import FunctionPlan
from rollstream.user_code import import_name

if TYPE_CHECKING:
    from rollstream.integrations.trl.config import GRPOEnvConfig

_EPOCHS_KEPT = 3
"""Permutations in memory: work in flight reaches over one end of an epoch, over two of a tiny one."""

_DIGESTED = 5_000
"""Examples that say which dataset it is: some tenths of a second."""


def dataset_digest(dataset: Sequence[Any]) -> str:
    """Says which examples a dataset has, in which order: of a large one, of some thousands of them."""
    digest = hashlib.blake2b(digest_size=8)
    rows = len(dataset)
    for number in range(min(rows, _DIGESTED)):
        at = number * rows // min(rows, _DIGESTED)
        digest.update(repr((at, sorted(dict(dataset[at]).items()))).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class SamplerReplay:
    """What `trl.trainer.utils.RepeatSampler` yields, position by position, without repeats.

    An epoch is one permutation of the rows by a generator that goes on from epoch to epoch; the rows that
    fill no whole batch are left out, as the sampler does. Source: TRL 1.16.

    Args:
        rows: of the dataset.
        groups: prompts of one generated batch.
        seed: of the trainer's sampler.
        shuffle: False takes the rows in order.
        content: of the dataset, see `dataset_digest`: of another one, a saved state is refused.

    Raises:
        ConfigError: there are fewer rows than a batch needs.
    """

    def __init__(self, rows: int, groups: int, *, seed: int, shuffle: bool, content: str = "") -> None:
        self._rows = rows
        self._used = rows // groups * groups
        if not self._used:
            raise ConfigError(f"the dataset has {rows} rows, and a generated batch needs {groups} prompts")
        self._groups = groups
        self._content = content
        self._seed = seed
        self._shuffle = shuffle
        self._permutations: OrderedDict[int, list[int]] = OrderedDict()
        self._rewind()

    def at(self, position: int) -> tuple[int, int]:
        """Epoch and index of the row at a position."""
        epoch, place = divmod(position, self._used)
        return epoch, (self._permutation(epoch)[place] if self._shuffle else place)

    def plan(self, length: int | None = None) -> FunctionPlan:
        """The same as a plan of `length` positions; None: endless."""
        identity = {
            "sampler": "trl.RepeatSampler",
            "rows": self._rows,
            "used": self._used,
            "prompts_per_batch": self._groups,
            "dataset": self._content,
            "seed": self._seed if self._shuffle else None,
        }
        return FunctionPlan(self.at, identity=identity, length=length)

    def _permutation(self, epoch: int) -> list[int]:
        import torch

        if epoch not in self._permutations:
            if epoch < self._drawn:
                self._rewind()
            while self._drawn <= epoch:
                drawn: list[int] = torch.randperm(self._rows, generator=self._generator).tolist()
                self._permutations[self._drawn] = drawn
                self._drawn += 1
                while len(self._permutations) > _EPOCHS_KEPT:
                    self._permutations.popitem(last=False)
        return self._permutations[epoch]

    def _rewind(self) -> None:
        import torch

        self._generator = torch.Generator()
        self._generator.manual_seed(self._seed)
        self._drawn = 0
        self._permutations.clear()


class _DatasetCurriculum(Curriculum):
    """A curriculum over a dataset: a saved state of another one is refused."""

    content = ""

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "dataset": self.content}


def make_plan(args: "GRPOEnvConfig", dataset: Any, *, batches: int, shuffle: bool) -> Plan:
    """The plan of a training of so many batches.

    Raises:
        ConfigError: the curriculum has no such name.
    """
    rows, groups = len(dataset), args.groups_per_batch
    # Groups that are thrown away are replaced, and batches may be larger: nobody knows how many there will be.
    length = None if args.group_filter or args.batch_tokens else batches * groups
    if args.curriculum is None:
        content = dataset_digest(dataset)
        return SamplerReplay(rows, groups, seed=args.seed, shuffle=shuffle, content=content).plan(length)
    weigh = find_curriculum(args.curriculum, max(1, batches * groups))
    plan = _DatasetCurriculum(rows, seed=args.seed, weigh=weigh, length=length)
    plan.content = dataset_digest(dataset)
    return plan


def find_curriculum(name: str, groups: int) -> Any:
    """What weighs the rows of a training of so many groups.

    Raises:
        ConfigError: there is no such name.
    """
    return _named("curriculum", name, {"medium_first": medium_first, "easy_to_hard": easy_to_hard(groups)})


def make_policies(args: "GRPOEnvConfig") -> dict[str, Any]:
    """What `BatchesAhead` is told of filters, priority and dynamic batches.

    Raises:
        ConfigError: there is no such name.
    """
    filters: list[GroupFilter] = []
    if args.group_filter is not None:
        filters.append(_named("group_filter", args.group_filter, {"no_signal": NoSignal})())
    rank = None
    if args.group_priority is not None:
        priority = _named("group_priority", args.group_priority, {"spread": _spread})
        rank = Priority(args.group_priority, priority)
    budget = None
    if args.batch_tokens is not None:
        smallest = args.groups_per_batch
        budget = TokenBudget(args.batch_tokens, smallest, args.batch_groups_max or 4 * smallest)
    return {"filters": filters, "rank": rank, "batch_size": budget}


def _named(key: str, name: str, known: dict[str, Any]) -> Any:
    if name in known:
        return known[name]
    if "." not in name and ":" not in name:
        raise ConfigError(
            f"{key}={name!r}: {', '.join(known)}, or package.module.name (path.py:name) of your own"
        )
    return import_name(name, key=key)


def _spread(group: Group) -> float:
    rewards = [reward for reward in group.rewards if reward is not None]
    return pstdev(rewards) if rewards else 0.0
