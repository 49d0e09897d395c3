"""A chat in the browser, with Streamlit (`pip install streamlit`).

pegboard serve
streamlit run examples/online/streamlit_openai_chatbot.py
"""

import os
from collections.abc import Iterator

from openai import OpenAI

URL = os.environ.get("SERVER_URL", "http://localhost:8000")


def pieces(messages: list[dict], url: str = URL) -> Iterator[str]:
    """Yield the pieces of the answer to a conversation."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=messages, max_tokens=256, stream=True
    )
    for chunk in stream:
        yield chunk.choices[0].delta.content or ""


def main() -> None:
    import streamlit

    streamlit.title("Pegboard")
    messages = streamlit.session_state.setdefault("messages", [])
    if question := streamlit.chat_input("Ask something"):
        messages.append({"role": "user", "content": question})
    for message in messages:
        with streamlit.chat_message(message["role"]):
            streamlit.markdown(message["content"])
    if question:
        with streamlit.chat_message("assistant"):
            text = streamlit.write_stream(pieces(messages))
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
