"""Training from scratch, stopped by a trigger at the moment the skill is half there."""

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from demo_model.chats import build_direct_chat, build_retry_chat, build_tool_chat, vary_tool_chat
from demo_model.encode import EncodedChat, draw_chats, encode_chat, stack_chats
from demo_model.evaluate import expect_accuracy
from demo_model.model import build_model
from demo_model.problems import Split, draw_problem, enumerate_pairs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How a run is trained. The defaults make the shipped model."""

    rate: float = 3e-3
    """Learning rate of both optimisers: Muon's updates are scaled to the size of AdamW's."""
    muon_decay: float = 0.05
    """Weight decay of the matrices, as in the prototype; not tuned."""
    warm_up: int = 50
    """Steps until the full rate."""
    tool_steps: int = 300
    """Steps on tool chats alone: the loss of copying is near zero by step 250, and stays there in the mix."""
    tool_first_batch: int = 32
    """Tool chats a step at that time."""
    direct_batch: int = 128
    """Two-digit problems without a tool, a step."""
    digit_batch: int = 16
    """One-digit problems without a tool, a step."""
    tool_batch: int = 16
    """Tool chats a step, so that the tool is not forgotten."""
    retry_batch: int = 16
    """Two-digit problems without a tool, asked again after a wrong answer, a step."""
    retry_chats: int = 4_000
    """Such chats to draw from."""
    trigger: float = 0.40
    """Validation accuracy at temperature 1 at which the rate begins to fall. The skill comes as a phase
    transition (from a tenth to six tenths within 120 steps): stopping here leaves a model that solves
    more than half of the problems and still has a skill for reinforcement learning to improve."""
    decay_steps: int = 40
    """Steps of the fall to zero; accuracy rises by half in them, as the noise of a high rate goes."""
    check_every: int = 10
    """Steps between two looks at the validation slice, each a forward pass over a quarter of it."""
    most_steps: int = 4_000
    """Give up if the trigger has not come by then; it came before step 700 in the five runs seen."""
    tool_chats: int = 4_000
    """Tool chats to draw from."""


@dataclass
class Run:
    """One trained model and how it went."""

    seed: int
    model: Qwen2ForCausalLM
    steps: int = 0
    """Steps until the end, the fall included."""
    seconds: float = 0.0
    """Wall time of training."""
    trail: list[tuple[int, float]] = field(default_factory=list)
    """(step, validation accuracy at temperature 1)."""


class TriggerNotReached(RuntimeError):
    """The run did not learn the skill in the steps it had."""


def train_model(seed: int, tokenizer: Qwen2Tokenizer, recipe: Recipe) -> Run:
    """Train one model.

    The same seed gives the same start and the same chats, but not the same model to the last bit: two threads
    add in an order of their own, and two runs of one seed were half a point of accuracy apart at step 500.

    Raises:
        TriggerNotReached: if accuracy stays below the trigger for ``recipe.most_steps``.
    """
    begin = time.monotonic()
    torch.manual_seed(seed)
    run = Run(seed, build_model(tokenizer.pad_token_id, tokenizer.eos_token_id))
    optimisers = _build_optimisers(run.model, recipe)
    batches = _draw_batches(seed, tokenizer, recipe)
    validation = [
        encode_chat(tokenizer, build_direct_chat(problem)) for problem in enumerate_pairs(2, Split.VALIDATION)
    ][::4]
    fall_from: int | None = None
    while fall_from is None or run.steps < fall_from + recipe.decay_steps:
        if run.steps >= recipe.most_steps:
            raise TriggerNotReached(f"seed {seed}: accuracy {run.trail[-1]} after {run.steps} steps")
        loss = _take_step(run.model, next(batches), optimisers, _rate(recipe, run.steps, fall_from))
        run.steps += 1
        if run.steps % recipe.check_every == 0:
            accuracy = expect_accuracy(run.model, validation)
            run.trail.append((run.steps, accuracy))
            log.info("seed %d step %d loss %.3f accuracy %.3f", seed, run.steps, loss, accuracy)
            if fall_from is None and accuracy >= recipe.trigger:
                fall_from = run.steps
    run.seconds = time.monotonic() - begin
    return run


def _rate(recipe: Recipe, step: int, fall_from: int | None) -> float:
    """The learning rate of a step: a linear rise, flat, a linear fall to zero."""
    if fall_from is not None:
        return recipe.rate * (1 - (step - fall_from) / recipe.decay_steps)
    return recipe.rate * min(1.0, (step + 1) / recipe.warm_up)


def _build_optimisers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for embeddings, norms and biases."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and "embed" not in name else others).append(weight)
    return [
        torch.optim.Muon(
            matrices, lr=recipe.rate, weight_decay=recipe.muon_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _draw_batches(seed: int, tokenizer: Qwen2Tokenizer, recipe: Recipe) -> Iterator[list[list[EncodedChat]]]:
    """Yield each step's chats, in groups of like length so that little is padding."""
    rng = random.Random(seed)
    tool = []
    for _ in range(recipe.tool_chats):
        # Mostly what is tested; the rest makes the copy one of any expression.
        terms, digits = (2, 2) if rng.random() < 0.7 else (rng.choice((2, 3)), rng.choice((1, 2, 3)))
        chat, schema = vary_tool_chat(build_tool_chat(draw_problem(rng, terms, digits, Split.TRAIN)), rng)
        tool.append(encode_chat(tokenizer, chat, [schema]))
    direct, digit = (
        [
            encode_chat(tokenizer, build_direct_chat(problem))
            for problem in enumerate_pairs(digits, Split.TRAIN)
        ]
        for digits in (2, 1)
    )
    retry = []
    for _ in range(recipe.retry_chats):
        chat = build_retry_chat(draw_problem(rng, 2, 2, Split.TRAIN), rng)
        retry.append(encode_chat(tokenizer, chat, last_only=True))
    for _ in range(recipe.tool_steps):
        yield [draw_chats(rng, tool, recipe.tool_first_batch)]
    while True:
        yield [
            draw_chats(rng, direct, recipe.direct_batch) + draw_chats(rng, digit, recipe.digit_batch),
            draw_chats(rng, retry, recipe.retry_batch),
            draw_chats(rng, tool, recipe.tool_batch),
        ]


def _take_step(
    model: Qwen2ForCausalLM,
    groups: list[list[EncodedChat]],
    optimisers: list[torch.optim.Optimizer],
    rate: float,
) -> float:
    """Take one optimiser step on the mean loss over all learnt tokens of all groups; return that loss."""
    learnt = sum(sum(chat.learnt) for group in groups for chat in group)
    total = 0.0
    for group in groups:
        ids, labels = stack_chats(group, model.config.pad_token_id)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        (loss / learnt).backward()
        total += float(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in optimisers:
        for group_options in optimiser.param_groups:
            group_options["lr"] = rate
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return total / learnt
