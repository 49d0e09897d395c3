"""A tool server, with functions that `pegboard serve --tool-server localhost:9000` runs for the
Responses API. It needs the package mcp.

The optional argument is the port.
"""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")


@server.tool(description="Adds two numbers")
def add(x: float, y: float) -> float:
    return x + y


if __name__ == "__main__":
    server.run("sse", port=int(sys.argv[1]) if len(sys.argv) > 1 else 9000)
