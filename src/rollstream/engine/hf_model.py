"""The model of the `hf` engine: loaded from a folder or lent by its owner, with weights that may change."""

import asyncio
import contextlib
import copy
import secrets
import threading
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollstream.engine.replica import Weights
from rollstream.errors import EngineError
from rollstream.trajectory import SamplingParams

_LOADING = threading.Lock()
"""transformers changes state of the whole process while it loads: two loads at once give broken models, and a
load goes on in its thread when its engine's start is cancelled."""


ATTENTION = ("sdpa", "eager")
"""Implementations of attention that take a mask of ours."""


class LiveModel:
    """A causal model, the version of its weights, and who may touch them: the engine's steps, or a change.

    A lent model shares its weights and buffers with this one, nothing is copied, but not its modules or its
    configuration: the lender may train it, which switches modules to another mode, while the engine steps.

    Args:
        module: a transformers model for causal language modelling.
        lent: whether `module` stays with its owner.
    """

    def __init__(self, module: Any, *, lent: bool = False) -> None:
        if hasattr(module, "get_base_model"):  # its adapter's layers are in the model itself
            module = module.get_base_model()
        self.module = (_share_weights(module) if lent else module).eval()
        self.version = 0
        """Of the weights; changes while no step runs."""
        self.lock = asyncio.Lock()
        """Held by steps of the engine, or a change."""
        self.wanted = 0
        """Changes that hold the lock or wait for it."""
        config = self.module.config
        if config._attn_implementation not in ATTENTION:
            self.module.set_attn_implementation(ATTENTION[0])
        generation = getattr(self.module, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = getattr(config, "eos_token_id", None)
        self.eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.max_model_len: int | None = getattr(config, "max_position_embeddings", None)
        self.vocab_size: int = self.module.get_input_embeddings().weight.shape[0]
        self._peft: Any = None
        """The module with its adapters; None before the first one."""
        self._adapters: dict[Weights, str] = {}
        """Names, of which the last one is active."""

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """No step runs inside it, and none begins once it is asked for."""
        self.wanted += 1
        try:
            async with self.lock:
                yield
        finally:
            self.wanted -= 1

    def add_adapter(self, weights: Weights, held: Collection[Weights]) -> None:
        """Puts a LoRA adapter on the module, which is active from then on; others go, but for those `held`.

        Under the lock.

        Raises:
            EngineError: it cannot be read, or does not fit the model. Nothing has been changed then.
        """
        from peft import PeftConfig, PeftModel

        name, peft = f"v{weights.version}_{secrets.token_hex(4)}", self._peft
        try:
            if peft is None:  # puts layers around those of the module, in place
                peft = PeftModel(self.module, PeftConfig.from_pretrained(weights.source), name)
            try:
                report = peft.load_adapter(weights.source, name)
                if wrong := [*report.missing_keys, *report.unexpected_keys]:
                    raise ValueError(f"it does not fit the model: {_some(wrong)}")
                if any(f".{name}." in at and not _is_finite(one) for at, one in peft.named_parameters()):
                    raise ValueError("it has values that are not numbers")
            except BaseException:
                if self._peft is None:
                    peft.unload()
                elif name in peft.peft_config:
                    peft.delete_adapter(name)
                raise
        except Exception as error:
            cause = " ".join(str(error).split())
            raise EngineError(
                f"engine 'hf' cannot load the adapter {weights.source}: {type(error).__name__}: {cause}"
            ) from error
        peft.set_adapter(name)
        peft.eval()
        self._peft, before = peft, self._adapters.pop(weights, None)
        gone = [self._adapters.pop(other) for other in self._adapters.keys() - {*held}]
        for other in (*gone, *([] if before is None else [before])):
            peft.delete_adapter(other)
        self._adapters[weights] = name

    def answering(self, rows: Sequence[Weights | None]) -> tuple[Any, dict[str, Any]]:
        """What to call for rows under adapters of their own (None: the active one), and with which arguments."""
        if self._peft is None:
            return self.module, {}
        active = [*self._adapters.values()][-1]
        names = [active if row is None else self._adapters[row] if row.source else "__base__" for row in rows]
        return (self.module, {}) if {*names} == {active} else (self._peft, {"adapter_names": names})

    def end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Ids that end a generation."""
        stop = frozenset(sampling.stop_token_ids)
        return stop if sampling.ignore_eos else stop | self.eos_token_ids

    def match(self, state: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """Pairs of a tensor of the model and what will be copied into it.

        Raises:
            EngineError: a weight of the model is missing, unknown, or of another shape. A weight that is tied
                to another need not be given.
        """
        own = self.module.state_dict()
        unknown = sorted(state.keys() - own.keys())
        given = {own[name].data_ptr() for name in state.keys() & own.keys()}
        missing = sorted(name for name in own.keys() - state.keys() if own[name].data_ptr() not in given)
        shapes = sorted(
            f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
            for name in state.keys() & own.keys()
            if state[name].shape != own[name].shape
        )
        broken = [name for name, tensor in state.items() if not _is_finite(tensor)]
        kinds = (("unknown", unknown), ("missing", missing), ("of another shape", shapes))
        for what, names in (*kinds, ("with values that are not numbers", broken)):
            if names:
                raise EngineError(f"new weights do not fit the model: {what}: {_some(names)}")
        return [(own[name], tensor) for name, tensor in state.items()]


def attention_kinds(config: Any) -> list[str]:
    """The kind of attention of each layer, as transformers names them."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    slides = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers


def copy_weights(pairs: list[tuple[Any, Any]]) -> None:
    """Copies in place; under the model's lock."""
    import torch

    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def load_module(model: str, *, dtype: str, device: str, attn_implementation: str) -> Any:
    """Loads a model from a folder, or a hub name from the hub's cache or the hub.

    Args:
        model: the folder or name.
        dtype: a torch dtype's name; `auto` is float32 on a CPU and the model's own elsewhere.
        device: where it goes, as torch names it; `auto` is `cuda` where there is one, else `cpu`.
        attn_implementation: as transformers names it; empty takes its choice.

    Raises:
        EngineError: it cannot be loaded, with the cause, or lacks weights, which transformers would make up.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind: Any = dtype
    if dtype == "auto" and torch.device(device).type == "cpu":
        kind = torch.float32
    chosen = {"attn_implementation": attn_implementation} if attn_implementation else {}
    with _LOADING:
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # it would be drawn over the run's own
        try:
            module, report = AutoModelForCausalLM.from_pretrained(
                model, dtype=kind, output_loading_info=True, **chosen
            )
            module = module.to(device).eval()
        except Exception as error:
            cause = " ".join(str(error).split())
            raise EngineError(f"engine 'hf' cannot load {model}: {type(error).__name__}: {cause}") from error
        finally:
            if shown:
                logging.enable_progress_bar()
    if report["missing_keys"]:
        raise EngineError(f"engine 'hf' cannot load {model}: it lacks {_some(report['missing_keys'])}")
    return module


def read_weights(source: str, like: Any) -> Mapping[str, Any]:
    """The weights of a model folder, or hub name, by name, for `LiveModel.match`.

    Safetensors are read as they are where their names are those of the model. Others go through transformers,
    which knows what architectures call their weights on disk; that sets torch's default dtype for a moment,
    for all threads.

    Raises:
        EngineError: they cannot be read, with the cause.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    try:
        for path in sorted(Path(source).expanduser().glob("*.safetensors")):
            state |= load_file(path)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"cannot read the weights in {source}: {error}") from error
    if state and state.keys() <= like.state_dict().keys():
        return state
    dtype = str(like.dtype).removeprefix("torch.")
    weights: Mapping[str, Any] = load_module(
        source, dtype=dtype, device="cpu", attn_implementation=""
    ).state_dict()
    return weights


def tokenizer_file(model: str) -> Path | None:
    """The model's `tokenizer.json`; None when it has none."""
    from transformers.utils import cached_file

    try:
        found = cached_file(model, "tokenizer.json")
    except OSError:
        return None
    return None if found is None else Path(found)


def _share_weights(module: Any) -> Any:
    """A copy of the modules around the same parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, shared)


def _is_finite(tensor: Any) -> bool:
    import torch

    return bool(torch.isfinite(tensor).all())


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
