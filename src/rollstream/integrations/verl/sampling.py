"""How to sample: verl's parameters of a request as rollstream's, and the other way round."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollstream.errors import EngineError
from rollstream.sampling import SERVER_SAMPLING
from rollstream.trajectory import SamplingParams

_NEUTRAL: Mapping[str, Any] = {
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0},
    **{"n": 1, "detokenize": False, "skip_special_tokens": False},
}
"""Values that ask for nothing; some of these verl's loops always send."""

_PLAIN = frozenset(one.name for one in fields(SamplingParams)) - {"extra"}


def to_verl(sampling: SamplingParams, *, max_tokens: bool) -> dict[str, Any]:
    """The parameters of a request, as verl's loops hand them to its servers.

    Args:
        sampling: how to sample.
        max_tokens: whether its limit is sent; else the servers' own holds: what is left of the response.
    """
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "repetition_penalty": 1.0,
        "logprobs": sampling.logprobs,
    }
    given = {
        "max_tokens": sampling.max_tokens if max_tokens else None,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    return params | {name: value for name, value in given.items() if value} | dict(sampling.extra)


def row_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """What parameters of a request say beyond the run's own: a row's column `sampling_params`."""
    values = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}
    return {
        name: value
        for name, value in values.items()
        if name not in ("logprobs", "seed") and (name not in _NEUTRAL or value != _NEUTRAL[name])
    }


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
    values = {
        name: value
        for name, value in given.items()
        if value is not None and (name not in _NEUTRAL or value != _NEUTRAL[name])
    }
    asked = values.pop("max_new_tokens", values.pop("max_tokens", None))
    if (room := lengths.room(prompt_tokens)) < 1:
        raise EngineError(f"a prompt of {prompt_tokens} tokens leaves no room within {room + prompt_tokens}")
    values["max_tokens"] = lengths.most(asked, prompt_tokens)
    values.setdefault("logprobs", False)
    extra = {name: values.pop(name) for name in SERVER_SAMPLING if name in values}
    if unknown := ", ".join(f"{name}={values[name]!r}" for name in sorted(values.keys() - _PLAIN)):
        raise EngineError(f"sampling parameters that rollstream's engines do not know: {unknown}")
    for name in ("stop", "stop_token_ids"):
        if name in values:
            values[name] = (values[name],) if isinstance(values[name], str) else tuple(values[name])
    return SamplingParams(**values, extra=extra)
