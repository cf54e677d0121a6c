"""Log-probs of completions with each prompt computed once, whatever the number of its completions.

GRPO's batches hold every prompt n times. A decoder's keys and values of a prompt do not depend on what comes
after it, so they are computed once, and the completions of the prompt attend to them: the gradient flows
through them to the weights as it does through n copies, summed. Rows are grouped by length, so that a short
prompt is not padded to a long one.

Rows whose advantages are all 0 have no gradient: they are computed for the logs alone, without a graph and
without a backward.

Logits are never all there at once: TRL's fused head computes log-probs in tiles, and those of a prompt's last
token are one row of the vocabulary for each prompt.
"""

from typing import Any

from rollstream.errors import TrainingError


class PromptsNotShared(TrainingError):
    """What the model makes of a prompt is not for its completions to go on from."""


_SPREAD = 1.5
"""Prompts of a bucket differ in length by at most this factor: padding then costs less than another pass."""


def completion_logprobs(
    model: Any,
    input_ids: Any,
    attention_mask: Any,
    logits_to_keep: int,
    *,
    temperature: float,
    silent: Any = None,
) -> tuple[Any, Any]:
    """Log-probs and entropies of the completions' tokens.

    Args:
        model: a causal decoder whose forward takes and returns a cache, with TRL's fused head
            (`trl.trainer.utils.add_fused_lm_head`, outputs `log_probs` and `entropy`) of this temperature.
        input_ids: `[B, P + C]` int64: prompts padded on the left, completions on the right.
        attention_mask: of the same shape, 1 where there is a token.
        logits_to_keep: C.
        temperature: by which logits are divided.
        silent: `[B]` bool: rows from which no gradient comes, whatever the loss; None: there are none.

    Returns:
        Both `[B, C]`, 0 where there is no token; the log-probs with a graph (silent rows: without), the
        entropies without. With a head that was made without entropies, these mean nothing.

    Raises:
        PromptsNotShared: the model returns no cache, or one that is not of keys and values alone; or what it
            keeps of a prompt depends on the length of the completion.
    """
    import torch

    _check_positions(model, int(attention_mask.sum(1).max()))
    if silent is None or not torch.is_grad_enabled() or not bool(silent.any()):
        return _of_rows(model, input_ids, attention_mask, logits_to_keep, temperature)
    if bool(silent.all()):
        silent = silent.clone()
        silent[0] = False  # a loss without a graph has no backward
    logps = input_ids.new_zeros(len(input_ids), logits_to_keep, dtype=torch.float32)
    entropies = torch.zeros_like(logps)
    for rows, learns in ((~silent, True), (silent, False)):
        with torch.set_grad_enabled(learns):
            part, entropy = _of_rows(
                model, input_ids[rows], attention_mask[rows], logits_to_keep, temperature
            )
        logps = logps.index_put((rows,), part)
        entropies[rows] = entropy
    return logps, entropies


def _of_rows(
    model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, temperature: float
) -> tuple[Any, Any]:
    """The same, of rows that all have a graph or none."""
    import torch

    width = input_ids.shape[1] - logits_to_keep
    prompts, prompt_mask = input_ids[:, :width], attention_mask[:, :width]
    completions, completion_mask = input_ids[:, width:], attention_mask[:, width:]
    # A prompt is its tokens and how many there are: padding may equal a token.
    keyed = torch.cat([prompt_mask.sum(1, keepdim=True), prompts * prompt_mask], dim=1)
    unique, which = torch.unique(keyed, dim=0, return_inverse=True)
    lengths = unique[:, 0].tolist()
    logps = completions.new_zeros(completions.shape, dtype=torch.float32)
    entropies = torch.zeros_like(logps)
    pieces: list[tuple[Any, Any]] = []
    for chosen in buckets(lengths):
        wanted = torch.tensor(chosen, device=which.device)
        rows = torch.isin(which, wanted).nonzero()[:, 0]
        place = torch.full((len(lengths),), -1, device=which.device)
        place[wanted] = torch.arange(len(chosen), device=which.device)
        long = max(lengths[i] for i in chosen)
        most = max(1, int(completion_mask[rows].sum(1).max()))
        of_prompts = unique[wanted, 1:][:, width - long :]
        mask = torch.arange(long, device=which.device) >= long - unique[wanted, :1]
        part, entropy = _bucket(
            model,
            of_prompts,
            mask.long(),
            place[which[rows]],
            completions[rows, :most],
            completion_mask[rows, :most],
            temperature,
        )
        pieces.append((rows, part))
        entropies[rows, :most] = entropy
    for rows, part in pieces:
        padded = torch.nn.functional.pad(part, (0, logits_to_keep - part.shape[1]))
        logps = logps.index_add(0, rows, padded)
    return logps, entropies


def buckets(lengths: list[int]) -> list[list[int]]:
    """Groups indices so that within a group the longest is at most `_SPREAD` times the shortest."""
    groups: list[list[int]] = []
    least = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not groups or lengths[i] > _SPREAD * max(1, least):
            groups.append([])
            least = lengths[i]
        groups[-1].append(i)
    return groups


def _bucket(
    model: Any,
    prompts: Any,
    prompt_mask: Any,
    which: Any,
    completions: Any,
    completion_mask: Any,
    temperature: float,
) -> tuple[Any, Any]:
    """The same for `prompts [U, P]` and the completions `[R, C]` of prompt `which [R]`."""
    import torch

    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
    whole = bool(prompt_mask.all())
    asked = model(
        input_ids=prompts,
        attention_mask=None if whole else prompt_mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
    )
    cache = getattr(asked, "past_key_values", None)
    if cache is None:
        raise PromptsNotShared(f"{type(model).__name__} returns no cache")
    _check_cache(model, cache)
    first = (asked.logits[:, -1].float() / temperature).log_softmax(-1)
    counted = completion_mask.float()
    logps = first[which, completions[:, 0]][:, None]
    with torch.no_grad():
        entropies = -(first.exp() * first).sum(-1).index_select(0, which)[:, None]
    if completions.shape[1] > 1:
        cache.batch_select_indices(which)
        begin = prompt_mask.sum(1).index_select(0, which)[:, None]
        steps = torch.arange(completions.shape[1] - 1, device=prompts.device)
        # What is padded on the right comes after all that counts, and attention is causal.
        mask = None
        if not whole:
            mask = torch.cat(
                [prompt_mask.index_select(0, which), torch.ones_like(completions[:, :-1])], dim=1
            )
        labels = completions[:, 1:].masked_fill(completion_mask[:, 1:] == 0, -100)
        answered = model(
            input_ids=completions[:, :-1],
            attention_mask=mask,
            position_ids=begin + steps,
            past_key_values=cache,
            shift_labels=labels,
            fused_lm_head=True,
        )
        logps = torch.cat([logps, answered.log_probs.float()], dim=1)
        more = answered.entropy  # None: a reference model's head is made without
        more = torch.zeros_like(answered.log_probs) if more is None else more
        entropies = torch.cat([entropies, more.detach().float()], dim=1)
    return logps * counted, entropies * counted


def _check_cache(model: Any, cache: Any) -> None:
    """Refuses what is not of keys and values alone.

    Hybrid models keep states of convolutions or linear attention, some in a layer that also is one of keys
    and values, or beside the layers: what deals these to the completions leaves those as they are. So what is
    known is taken, and no subclass of it.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    kept = [cache] if type(cache) is not DynamicCache else cache.layers
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    other = {type(one).__name__ for one in kept if type(one) not in known}
    if other:
        raise PromptsNotShared(f"{type(model).__name__} keeps a {', '.join(sorted(other))} of a prompt")


def _check_positions(model: Any, longest: int) -> None:
    """Refuses rows in which a prompt's keys are turned by other angles than they would be on their own.

    Some rotary embeddings change all their frequencies once a sequence, the completion included, is longer
    than those that the model was first trained on.
    """
    config = getattr(model, "config", None)
    told = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have the parameters of each.
    for each in (told, *told.values()) if isinstance(told, dict) else ():
        kind = str(each.get("rope_type")) if isinstance(each, dict) else ""
        if "dynamic" in kind:
            original = getattr(config, "max_position_embeddings", None)
        elif kind == "longrope":
            original = each.get("original_max_position_embeddings")
        else:
            continue
        if original is None or longest > original:
            raise PromptsNotShared(
                f"a row has {longest} tokens, and beyond {original} the {kind} positions of "
                f"{type(model).__name__} depend on the length of the whole row"
            )
