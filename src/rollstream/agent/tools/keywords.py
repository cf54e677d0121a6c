"""Which keyword arguments a tool's method is given."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def accepted(method: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the offered keyword arguments that a method takes.

    Tools differ in what they take: verl's newer ones `create_kwargs`, its older ones each item by name, some
    anything. All are offered everything.

    Args:
        method: A bound method or a function.
        offered: By name.
    """
    try:
        parameters = inspect.signature(method).parameters.values()
    except ValueError:  # written in C, without a signature to look at
        return dict(offered)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    named = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    return {name: value for name, value in offered.items() if name in named}
