"""A tool that evaluates sums, differences and products."""

import ast
import operator
from typing import Any

from rollstream.agent.tools.base import Tool, ToolResponse

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Calculator(Tool):
    """Gives the value of `expression`; anything but arithmetic is an error that the model is told."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        """Evaluates."""
        tree = ast.parse(str(parameters["expression"]), mode="eval")
        return ToolResponse(text=str(evaluate(tree.body)))


def evaluate(node: ast.expr) -> int:
    """The value of an expression of whole numbers."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](evaluate(left), evaluate(right)))
    raise ValueError("only whole numbers, +, - and * are known")
