"""The loop for hosted models: messages in, messages out, and no token ids."""

from typing import Any

from rollstream.agent.conversation import ChatConversation
from rollstream.agent.tool_agent import State, ToolAgent
from rollstream.chat.template import result_messages
from rollstream.trajectory import Message


class ChatAgent(ToolAgent):
    """Does what `ToolAgent` does, with an engine that speaks messages; without tools, it asks once.

    A trajectory has its messages, no ids, and as `usage` in its `extra` the lengths that the endpoint counts.
    Calls are those that the endpoint gives. Where the run has no tools, schemas of `data.tool_config_path` and of
    the row are shown, and an answer that calls them is the last one.
    """

    needs_tools = False
    speaks_messages = True
    cannot_continue = "its engine takes no token ids"
    resumable = True
    conversation: ChatConversation

    @classmethod
    def prompt_tools(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return tools or None

    async def start(self) -> State:
        self.tools = self.shown_tools()
        self.note_tools([], self.tools)
        if (reader := self.resources.images) is not None and (sources := self.row.get("images")):
            self.images = [image.sent for image in await reader.read(sources)]
        self.conversation = ChatConversation(
            self,
            self.prompt_messages(),
            tools=self.tools,
            executes=bool(self.resources.tools.schemas) or self.interaction is not None,
        )
        return self.first_state()

    def shown_tools(self) -> list[dict[str, Any]]:
        resources = self.resources
        own = self.session.schemas if resources.tools.schemas else list(resources.shown_tools)
        return self.with_row_tools(own, self.row) or []

    def tool_messages(self, calls: list[dict[str, Any]], contents: list[Any]) -> list[Message]:
        return result_messages(calls, contents)

    def given_text(self, text: str) -> str:
        return text  # which tokens are special, the endpoint alone knows
