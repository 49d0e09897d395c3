// The messages of a conversation, as data.

export const userMessage = (content) => ({ role: "user", content });

export const toolMessage = (id, content) => ({ role: "tool", tool_call_id: id, content });

/** An answer that has just been asked for. Times are in milliseconds. tokens: with their
 * probabilities, if they were asked for. */
export const newAnswer = (model, start) => ({
  role: "assistant",
  model,
  content: "",
  reasoning: "",
  tool_calls: [],
  finish: null,
  error: null,
  usage: null,
  times: { start, first: null, last: null },
  tokens: [],
});

/** Add a chunk of the stream to an answer. */
export function addChunk(answer, chunk, now) {
  if (chunk.usage) answer.usage = { prompt: chunk.usage.prompt_tokens, answer: chunk.usage.completion_tokens };
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  answer.content += delta.content ?? "";
  answer.reasoning += reasoning;
  for (const call of delta.tool_calls ?? []) addCall(answer.tool_calls, call);
  const tokens = choice.logprobs?.content ?? [];
  for (const token of tokens) answer.tokens.push(readToken(token));
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  if (delta.content || reasoning || delta.tool_calls?.length || tokens.length) {
    answer.times.first ??= now;
    answer.times.last = now;
  }
}

function addCall(calls, delta) {
  const call = (calls[delta.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (delta.id) call.id = delta.id;
  call.function.name += delta.function?.name ?? "";
  call.function.arguments += delta.function?.arguments ?? "";
}

const readToken = ({ token, logprob, top_logprobs }) => ({
  text: token,
  logprob,
  others: (top_logprobs ?? []).map((other) => ({ text: other.token, logprob: other.logprob })),
});

/** The numbers of an answer. rate: tokens per second after the first one. wait: milliseconds to
 * the first token. Unknown numbers are null. */
export function numbersOf({ usage, times }) {
  const seconds = times.first === null ? 0 : (times.last - times.first) / 1000;
  const count = usage?.answer ?? null;
  return {
    prompt: usage?.prompt ?? null,
    count,
    rate: count > 1 && seconds > 0 ? (count - 1) / seconds : null,
    wait: times.first === null ? null : times.first - times.start,
  };
}

/** The calls of an answer that have no result yet. messages: those after the answer. */
export function openCalls(answer, messages) {
  const results = new Set(messages.filter(({ role }) => role === "tool").map((message) => message.tool_call_id));
  return answer.tool_calls.filter((call) => !results.has(call.id));
}

/** Takes a growing text apart for screen readers: next() returns the whole sentences that were not
 * returned yet, and with isComplete the rest. */
export class Sentences {
  #length = 0;

  next(text, isComplete) {
    const rest = text.slice(this.#length);
    const end = isComplete ? rest.length : (rest.match(/^[\s\S]*(?:[.!?:](?=\s)|\n)/)?.[0].length ?? 0);
    this.#length += end;
    return rest.slice(0, end).trim();
  }
}

/** The first line of what the user said, as the title of a conversation. */
export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 48 ? `${line.slice(0, 47).trimEnd()}…` : line;
}
