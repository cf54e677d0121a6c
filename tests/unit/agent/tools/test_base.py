import copy
import json
import pickle
from typing import Any

import pytest

from rollstream.agent.tools.base import OpenAIFunctionToolSchema, Tool

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "enum": None}, "any": {"anyOf": [{"type": "null"}]}},
            "required": ["query"],
        },
    },
}


def test_a_schema_is_a_dict_and_an_object() -> None:
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA)
    assert schema == SCHEMA
    assert schema.function.name == schema["function"]["name"] == "search"
    assert schema.function.parameters.properties["query"].type == "string"
    assert schema.function.strict is False
    assert schema.function.parameters.properties["query"].required == []
    dumped = schema.model_dump(exclude_unset=True, exclude_none=True)
    assert json.loads(json.dumps(dumped))["function"]["parameters"]["properties"]["query"] == {
        "type": "string"
    }
    assert type(dumped["function"]) is dict and dumped["function"] is not schema["function"]
    for other in (copy.deepcopy(schema), pickle.loads(pickle.dumps(schema))):
        assert other == schema and other.function.name == "search"
    assert OpenAIFunctionToolSchema.model_validate(schema).function.name == "search"


class Search(Tool):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return parameters


class WithSchema(Search):
    def get_openai_tool_schema(self) -> dict[str, Any]:
        return SCHEMA


async def test_a_tool_needs_a_schema_from_somewhere() -> None:
    assert Search({}, OpenAIFunctionToolSchema(SCHEMA)).name == "search"
    assert WithSchema({}).name == "search"
    assert WithSchema({}).tool_schema.function.name == "search"
    with pytest.raises(NotImplementedError):
        Search({})
    tool = WithSchema({})
    assert (await tool.create("a"))[0] == "a"  # type: ignore[index]
