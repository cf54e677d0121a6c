"""Numbers for rollouts that no plan knows: of evaluations, and of a plain `rollout_func`."""

from collections.abc import Iterable
from dataclasses import replace

from rollstream.trajectory import PromptRow


class RowNumbers:
    """Gives each row an index by its content, and each of its rollouts a repeat: no pair comes twice.

    A rollout's request id and seed come from both: two prompts with one pair would be sampled alike, and an
    engine would have two requests of one name.

    Args:
        first: the first index; those below are somebody else's, as the training's.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._indices: dict[str, int] = {}
        self._repeats: dict[str, int] = {}

    def number(self, rows: Iterable[PromptRow]) -> list[tuple[PromptRow, int]]:
        """The rows with their indices, and the repeat of each."""
        numbered = []
        for row in rows:
            key = row.prompt_key
            index = self._indices.setdefault(key, self._first + len(self._indices))
            repeat = self._repeats.get(key, 0)
            self._repeats[key] = repeat + 1
            numbered.append((replace(row, index=index), repeat))
        return numbered
