// From a conversation to the body of a request.

import { FIELDS } from "./limits.js";

export const NUM_ALTERNATIVES = 5;

/** The body of POST /v1/chat/completions. Throws if the tools or the schema are wrong. */
export function requestBody(conversation) {
  const { settings } = conversation;
  const body = {
    model: settings.model,
    messages: sentMessages(conversation),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const { name } of FIELDS) if (settings[name] !== null) body[name] = settings[name];
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  if (stop.length) body.stop = stop;
  const tools = readTools(settings.tools);
  if (tools.length) Object.assign(body, { tools, tool_choice: settings.tool_choice });
  const schema = readSchema(settings.schema);
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  return body;
}

function sentMessages({ settings, messages }) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return [...system, ...messages.filter(isSaid).map(sentMessage)];
}

/** An answer that failed before its first token says nothing. */
const isSaid = (message) =>
  message.role !== "assistant" || message.content !== "" || message.tool_calls.length > 0;

function sentMessage(message) {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.tool_call_id, content: message.content };
  }
  if (message.role === "user" || !message.tool_calls.length) {
    return { role: message.role, content: message.content };
  }
  // A model that called a tool goes on with its reasoning when it gets the result.
  const reasoning = message.reasoning ? { reasoning: message.reasoning } : {};
  return { role: "assistant", content: message.content || null, tool_calls: message.tool_calls, ...reasoning };
}

/** Read the field for tools: a list of OpenAI's tools, or of the functions inside them. */
export function readTools(text) {
  if (text.trim() === "") return [];
  const tools = readJson(text, "Tools");
  if (!Array.isArray(tools)) throw new Error("Tools must be a list: [{…}, …]");
  return tools.map((tool) => {
    const whole = tool?.function ? tool : { type: "function", function: tool };
    if (!whole.function?.name) throw new Error("Each tool needs a name");
    return whole;
  });
}

/** Read the field for the schema of the answer. */
export function readSchema(text) {
  if (text.trim() === "") return null;
  const schema = readJson(text, "The schema");
  if (typeof schema !== "object" || schema === null || Array.isArray(schema)) {
    throw new Error("The schema must be an object: {…}");
  }
  return schema;
}

function readJson(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: this is not JSON (${error.message})`);
  }
}
