"""The prompts that TRL's sampler will give, known ahead: its seeded permutations, replayed."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from rollstream.errors import ConfigError
from rollstream.training.plan import FunctionPlan

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
