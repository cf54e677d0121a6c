"""Templates that make a prompt of a row's columns."""

import string
from collections.abc import Mapping
from typing import Any

from rollstream.data.values import BadRow
from rollstream.errors import ConfigError


class PromptTemplate:
    r"""Text with `{column}` where a column's value goes, as in `str.format`.

    `{column[key]}` reaches into a mapping or list, `{column:.2f}` formats. Literal braces are doubled:
    `\boxed{{}}`. Braces in the data are just text.

    Args:
        text: The template.
        setting: The configuration key, for messages.

    Raises:
        ConfigError: Braces that are no field.
    """

    def __init__(self, text: str, setting: str) -> None:
        self._formatter = string.Formatter()
        try:
            self._parts = list(self._formatter.parse(text))
        except ValueError as error:
            raise ConfigError(f"{setting}: {error}; write literal braces twice: {{{{ and }}}}") from error
        for _, field, spec, _ in self._parts:
            if field is not None and (not field or field.isdigit()):
                raise ConfigError(
                    f"{setting}: {{{field}}} names no column; write literal braces twice: {{{{{field}}}}}"
                )
            if spec and "{" in spec:
                raise ConfigError(f"{setting}: {{{field}:{spec}}} has braces within a format")

    def render(self, columns: Mapping[str, Any]) -> str:
        """Fills the template in.

        Raises:
            BadRow: A column that is missing or null, or cannot be formatted so.
        """
        return "".join(
            literal if field is None else literal + self._render_field(field, spec or "", conversion, columns)
            for literal, field, spec, conversion in self._parts
        )

    def _render_field(self, field: str, spec: str, conversion: str | None, columns: Mapping[str, Any]) -> str:
        root, bracket, rest = field.partition("[")
        if field in columns:
            value = columns[field]
        elif root not in columns:
            raise BadRow(
                f"the template's column {root!r} is missing; there are: {', '.join(columns) or '(none)'}"
            )
        else:
            value = columns[root]
            for key in (bracket + rest).rstrip("]").removeprefix("[").split("][") if bracket else ():
                try:
                    value = value[int(key) if isinstance(value, list | tuple) else key]
                except (LookupError, TypeError, ValueError) as error:
                    raise BadRow(f"the template's {{{field}}} finds nothing at [{key}]") from error
        if value is None:
            raise BadRow(f"the template's {{{field}}} is null in this row")
        try:
            return format(self._formatter.convert_field(value, conversion), spec)
        except (TypeError, ValueError) as error:
            raise BadRow(f"the template's {{{field}:{spec}}} cannot be formatted ({error})") from error
