"""The calculator of the training demo."""

import re

from demo_model.chats import CALCULATOR
from rollstream.agent.tools.functions import function_tool


@function_tool(schema=CALCULATOR)
def calculator(expression: str) -> str:
    """Gives the value of a sum or difference.

    Raises:
        ValueError: the expression is none.
    """
    if not re.fullmatch(r"-?\d+( [+-] \d+)+", expression):
        raise ValueError("not a sum of whole numbers")
    return str(sum(int(number) for number in re.findall(r"-?\d+", expression.replace(" - ", " -"))))
