"""Two optimizers as one: the steps of each, one schedule, one state."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from demo_model.muon import MuonWithAdamW  # noqa: E402  # needs torch


def small() -> Any:
    torch.manual_seed(0)
    layers = {"embed": torch.nn.Embedding(7, 4), "up": torch.nn.Linear(4, 6), "down": torch.nn.Linear(6, 4)}
    return torch.nn.ModuleDict(layers)


def make(model: Any) -> MuonWithAdamW:
    return MuonWithAdamW(model.named_parameters(), muon_rate=0.01, rate=0.1, betas=(0.9, 0.95))


def take(model: Any, optimizer: Any, *, steps: int, schedule: Any = None) -> list[Any]:
    for number in range(steps):
        ids = torch.arange(number, number + 3) % 7
        optimizer.zero_grad()
        hidden = model["down"](model["up"](model["embed"](ids)).relu())
        (hidden - number).square().sum().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


class Both:
    """What it stands for."""

    def __init__(self, model: Any) -> None:
        matrices = [model["up"].weight, model["down"].weight]
        rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        self.parts = [
            torch.optim.Muon(matrices, lr=0.01, weight_decay=0.0),
            torch.optim.AdamW(rest, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


def test_matrices_are_muons_and_the_rest_is_adamws() -> None:
    model, other = small(), small()
    got, wanted = take(model, make(model), steps=3), take(other, Both(other), steps=3)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(got, small().parameters(), strict=True))


def test_a_schedule_and_a_checkpoint_are_of_both() -> None:
    model = small()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    take(model, optimizer, steps=2, schedule=schedule)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.01 / 3, 0.1 / 3])

    resumed = copy.deepcopy(model)
    again = make(resumed)
    state = copy.deepcopy(optimizer.state_dict())
    further = torch.optim.lr_scheduler.LambdaLR(again, lambda step: 1 / (1 + step))
    again.load_state_dict(state)
    further.load_state_dict(schedule.state_dict())
    wanted = take(model, optimizer, steps=2, schedule=schedule)
    got = take(resumed, again, steps=2, schedule=further)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert [group["lr"] for group in again.param_groups] == pytest.approx([0.01 / 5, 0.1 / 5])
