"""How to sample: verl's parameters of a request as rollstream's, and the other way round."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollstream.errors import EngineError
from rollstream.sampling import SERVER_SAMPLING
from rollstream.trajectory import SamplingParams

_NEUTRAL: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "n": 1,
    "detokenize": False,
    "skip_special_tokens": False,
}
"""Values that ask for nothing; some of these verl's loops always send."""


def to_verl(sampling: SamplingParams, *, max_tokens: bool) -> dict[str, Any]:
    """The parameters of a request, as verl's loops hand them to its servers.

    Args:
        sampling: how to sample.
        max_tokens: whether its limit is sent; else the servers' own holds: what is left of the response.
    """
    optional = {
        "max_tokens": sampling.max_tokens if max_tokens else None,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": 1.0,
        "logprobs": sampling.logprobs,
        **{name: value for name, value in optional.items() if value},
        **sampling.extra,
    }


def _asking(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request that ask for something, by rollstream's names."""
    values = {name: value for name, value in given.items() if name not in _NEUTRAL or value != _NEUTRAL[name]}
    if "max_new_tokens" in values:
        values["max_tokens"] = values.pop("max_new_tokens")
    return values


def row_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """A row's column `sampling_params`: what parameters of a request say beyond the run's own."""
    return {name: value for name, value in _asking(given).items() if name not in ("logprobs", "seed")}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of `rollout` in verl's configuration, in tokens."""

    prompt_length: int
    response_length: int
    max_model_len: int | None
    """Prompt and response together; None: as long as both can be."""

    @classmethod
    def read(cls, rollout: Any) -> "Lengths":
        return cls(rollout.prompt_length, rollout.response_length, rollout.max_model_len)

    def room(self, prompt_tokens: int) -> int:
        """Tokens that may follow a prompt; below 1 for one that is too long."""
        return (self.max_model_len or self.prompt_length + self.response_length) - prompt_tokens

    def most(self, asked: int | None, prompt_tokens: int) -> int:
        """Tokens that one of verl's servers generates at most. Source: its `vLLMHttpServer.generate`.

        Args:
            asked: `max_tokens` of the request; None: what is left of prompt and response together, one
                response at most.
            prompt_tokens: of the request.
        """
        if asked is None:
            asked = min(self.response_length, self.prompt_length + self.response_length - prompt_tokens)
        return max(1, int(min(asked, self.room(prompt_tokens))))


def from_verl(given: Mapping[str, Any], *, prompt_tokens: int, lengths: Lengths) -> SamplingParams:
    """Reads the parameters of a request.

    Raises:
        EngineError: a parameter that would change the answer and is not known, or no room.
    """
    if (room := lengths.room(prompt_tokens)) < 1:
        raise EngineError(f"a prompt of {prompt_tokens} tokens leaves no room within {room + prompt_tokens}")
    values = {name: value for name, value in _asking(given).items() if value is not None}
    values["max_tokens"] = lengths.most(values.get("max_tokens"), prompt_tokens)
    extra = {name: values.pop(name) for name in SERVER_SAMPLING if name in values}
    known = {field.name for field in fields(SamplingParams)} - {"extra"}
    if unknown := ", ".join(f"{name}={values[name]!r}" for name in sorted(values.keys() - known)):
        raise EngineError(f"sampling parameters that rollstream's engines do not know: {unknown}")
    for name in {"stop", "stop_token_ids"} & values.keys():
        values[name] = (values[name],) if isinstance(values[name], str) else tuple(values[name])
    return SamplingParams(**{"logprobs": False, **values}, extra=extra)
