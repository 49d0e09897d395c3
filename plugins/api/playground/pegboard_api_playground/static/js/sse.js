// Reads server-sent events.

/** Collects pieces of text and returns the data of each event that is complete. */
export class EventParser {
  #rest = "";
  #data = [];

  push(text) {
    const events = [];
    const lines = (this.#rest + text).split(/\r\n|\n/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(5).replace(/^ /, ""));
      }
    }
    return events;
  }
}

/** Yield the data of all events of a response body, until [DONE]. */
export async function* eventsOf(body) {
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      for (const data of parser.push(value)) {
        if (data === "[DONE]") return;
        yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
