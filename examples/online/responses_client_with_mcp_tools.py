"""A tool that the server itself calls, on an MCP server: the client sees the call, its result and
the answer.

python examples/tool_server.py
pegboard serve --tool-server localhost:9000
python examples/online/responses_client_with_mcp_tools.py
"""

import argparse

from openai import OpenAI

TOOL = {"type": "mcp", "server_label": "calculator", "require_approval": "never"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    client = OpenAI(base_url=f"{parser.parse_args().url}/v1", api_key="none")
    model = client.models.list().data[0].id
    answer = client.responses.create(
        model=model,
        input="What is 20 + 22? Use the tool.",
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=120,
    )
    for item in answer.output:
        if item.type == "mcp_call":
            print(f"{item.server_label}.{item.name} {item.arguments} -> {item.output}")
    print("answer:", answer.output_text)


if __name__ == "__main__":
    main()
