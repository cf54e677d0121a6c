"""A tool of a user's, as verl takes it, in a file of its own: verl refuses one that is registered twice."""

from verl.tools.function_tool import function_tool


@function_tool
def calculator(expression: str) -> str:
    """A calculator for sums and differences.

    Args:
        expression: The expression, such as 12 + 34.
    """
    left, sign, right = expression.split()
    return str(int(left) + int(right) if sign == "+" else int(left) - int(right))
