"""Further sampling parameters: one name for each, whatever an engine calls it.

They stand in `SamplingParams.extra`, from `actor_rollout_ref.rollout.extra_sampling`. An engine names those
that it takes in `Capabilities.extra_sampling`; asking for another one is an error at start.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from rollstream.errors import DataError
from rollstream.trajectory import SamplingParams

PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
STRUCTURED = ("grammar", "json_schema", "regex")
"""They constrain an answer's form; at most one of them."""
SERVER_SAMPLING = (*PENALTIES, *STRUCTURED, "logit_bias", "min_p", "min_tokens")
"""Both SGLang and vLLM take these."""
PLAIN = (*PENALTIES, "min_p")
"""Numbers that `openvino` takes, too."""


_NEUTRAL: dict[str, float] = {
    **{"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "min_tokens": 0},
    **{"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
}
"""Values that leave the model's own distribution as it is."""


def server_sampling(*, has_tokenizer: bool) -> tuple[str, ...]:
    """The parameters that a server takes: without its tokenizer it can follow no grammar."""
    return SERVER_SAMPLING if has_tokenizer else (*PLAIN, "logit_bias", "min_tokens")


def check_extra(extra: Mapping[str, Any]) -> str | None:
    """Checks the values of further sampling parameters: says what is wrong, or None.

    Names that are not known here are an engine's own: their values must be finite numbers.
    """
    for name, value in extra.items():
        check, wanted = _CHECKS.get(name, (_is_number, "a finite number"))
        if not check(value):
            return f"{name} must be {wanted}, not {value!r:.100}"
    if len(given := [name for name in STRUCTURED if name in extra]) > 1:
        return f"{' and '.join(given)} cannot be asked for at once"
    return None


def sampling_of_row(sampling: SamplingParams, given: Any) -> SamplingParams:
    """How to sample for a prompt row whose column `sampling_params` says otherwise than the run.

    Args:
        sampling: the run's.
        given: a mapping, or JSON text of one: fields of `SamplingParams`, but for `seed` and `logprobs`, which
            are the run's, and further parameters. A value of None is as if it was not there.

    Raises:
        DataError: it is none, a name that is not known, a value of another type, more tokens than the run has.
    """
    where = "the row's sampling_params"
    try:
        values = orjson.loads(given) if isinstance(given, str | bytes) else given
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(values, Mapping):
        raise DataError(f"{where} must be a mapping, not {given!r:.100}")
    values = {name: value for name, value in values.items() if value is not None}
    fields: dict[str, Any] = {}
    for name in [name for name in values if name in _ROW_FIELDS]:
        check, wanted = _ROW_FIELDS[name]
        value = fields[name] = values.pop(name)
        if not check(value):
            raise DataError(f"{where}.{name} must be {wanted}, not {value!r:.100}")
    if unknown := sorted(values.keys() - {*SERVER_SAMPLING}):
        known = ", ".join(sorted({*_ROW_FIELDS, *SERVER_SAMPLING}))
        raise DataError(f"{where} has {unknown[0]!r} (known: {known})")
    if (wrong := check_extra(values)) is not None:
        raise DataError(f"{where}.{wrong}")
    if fields.get("max_tokens", 0) > sampling.max_tokens:
        raise DataError(f"{where}.max_tokens is more than the run's response_length {sampling.max_tokens}")
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return replace(sampling, **fields, extra={**sampling.extra, **values})


def changes_of_distribution(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters by which tokens are not drawn from the model's own distribution.

    Args:
        values: sampling parameters by their names here; others do not count.
    """
    named = {name: values[name] for name in (*_NEUTRAL, *STRUCTURED, "logit_bias") if name in values}
    return {
        name: value
        for name, value in named.items()
        if value not in (None, "") and value != {} and value != _NEUTRAL.get(name)
    }


def sampling_changes(sampling: SamplingParams) -> dict[str, Any]:
    """The same of a request's parameters."""
    own = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    return changes_of_distribution({**own, **sampling.extra})


def schema_text(schema: str | Mapping[str, Any]) -> str:
    """A JSON schema as text."""
    return schema if isinstance(schema, str) else orjson.dumps(dict(schema)).decode()


def bias_by_id(bias: Mapping[Any, float]) -> dict[str, float]:
    """A logit bias by token id as it goes over a wire: JSON's keys are texts."""
    return {str(token): float(value) for token, value in bias.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and low <= value <= high


def _is_bias(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        str(token).isdigit() and _is_number(one) for token, one in value.items()
    )


def _is_schema(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    try:
        return isinstance(value, str) and isinstance(orjson.loads(value), dict)
    except orjson.JSONDecodeError:
        return False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "frequency_penalty": (_within(-2, 2), "from -2 to 2"),
    "grammar": (_is_text, "a grammar in EBNF, as text"),
    "json_schema": (_is_schema, "a JSON schema, as a mapping or as text"),
    "logit_bias": (_is_bias, "a mapping of token ids to numbers"),
    "min_p": (_within(0, 1), "from 0 to 1"),
    "min_tokens": (lambda value: isinstance(value, int) and value >= 0, "a whole number, 0 or more"),
    "presence_penalty": (_within(-2, 2), "from -2 to 2"),
    "regex": (_is_text, "a regular expression, as text"),
    "repetition_penalty": (lambda value: _is_number(value) and 0 < value <= 2, "above 0 and at most 2"),
}


def _is_whole(low: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(type(one) is kind for one in value)


_ROW_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "max_tokens": (_is_whole(1), "a whole number, 1 or more"),
    "stop": (_is_list_of(str), "a list of texts"),
    "stop_token_ids": (_is_list_of(int), "a list of token ids"),
    "temperature": (_within(0, math.inf), "0 or more"),
    "top_k": (lambda value: value == -1 or _is_whole(1)(value), "-1, or a whole number, 1 or more"),
    "top_p": (lambda value: _within(0, 1)(value) and value > 0, "above 0 and at most 1"),
}
