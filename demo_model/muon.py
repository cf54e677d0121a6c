"""Muon for a decoder's matrices and AdamW for the rest of it, as one optimizer."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Muon


class MuonWithAdamW(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not followed
    """What a trainer, which takes one optimizer, needs to use `torch.optim.Muon`, which takes matrices only.

    Embeddings, and an output head that is tied to them, are AdamW's, as in Muon's own recipe
    (https://kellerjordan.github.io/posts/muon/): their rows are vectors of tokens, and no linear map.

    Args:
        named: a model's parameters, as `named_parameters()` has them.
        muon_rate: learning rate of the matrices.
        rate: of the rest.
        betas: AdamW's.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        muon_rate: float,
        rate: float,
        betas: tuple[float, float],
    ) -> None:
        matrices: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in named:
            is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_matrix else rest).append(parameter)
        self._parts: tuple[torch.optim.Optimizer, torch.optim.Optimizer] = (
            Muon(matrices, lr=muon_rate, weight_decay=0.0),
            AdamW(rest, lr=rate, betas=betas, weight_decay=0.0),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `TypeError` for what is added later: it would belong to neither."""
        if not any(param_group is group for part in self._parts for group in part.param_groups):
            raise TypeError("parameters are dealt out when this is made")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Of both."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of both; the groups are new objects then, which a schedule changes here."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]
