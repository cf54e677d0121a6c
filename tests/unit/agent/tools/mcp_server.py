"""An MCP server for tests: `mcp_server.py stdio`, or `mcp_server.py http PORT`."""

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ImageContent, TextContent

server = MCPServer("test")
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def pid() -> str:
    """The process that answers."""
    return str(os.getpid())


@server.tool()
def fail() -> str:
    """Fails."""
    raise ToolError("on purpose")


@server.tool()
def leave() -> str:
    """Ends the server in the middle of the call."""
    print("leaving", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
async def sleep() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return "never"


@server.tool(structured_output=False)
def draw() -> list[TextContent | ImageContent]:
    """A text and an image."""
    return [TextContent(text="a pixel"), ImageContent(data=PIXEL, mime_type="image/png")]


@server.tool()
def secret() -> str:
    """A variable of the environment."""
    return os.environ.get("TEST_SECRET", "none")


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
