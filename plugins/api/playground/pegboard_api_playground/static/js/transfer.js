// Export and import of conversations.

import { newId, readConversation } from "./store.js";

const FORMAT = "pegboard-playground";

export function asJson(conversations) {
  return `${JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 2)}\n`;
}

export function asMarkdown({ title, settings, messages }) {
  const parts = [`# ${title}`];
  if (settings.system.trim()) parts.push("## System", settings.system);
  for (const message of messages) {
    if (message.role === "user") parts.push("## User", message.content);
    else if (message.role === "tool") parts.push("## Tool result", fenced(message.content));
    else {
      parts.push(`## Assistant${message.model ? ` (${message.model})` : ""}`);
      if (message.reasoning) parts.push(quoted(message.reasoning));
      if (message.content) parts.push(message.content);
      for (const call of message.tool_calls) {
        parts.push(`Calls \`${call.function.name}\`:`, fenced(call.function.arguments, "json"));
      }
    }
  }
  return `${parts.join("\n\n")}\n`;
}

const quoted = (text) => text.split("\n").map((line) => `> ${line}`).join("\n");

/** A block of code. Its fence is longer than any within the text. */
function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** Read a file that asJson has made. The conversations get new ids, so that none replaces another.
 * Throws if the text is something else. */
export function fromJson(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON");
  }
  if (value?.format !== FORMAT || !Array.isArray(value.conversations)) {
    throw new Error("The file is not an export of the playground");
  }
  return value.conversations.map((each) => ({ ...readConversation(each), id: newId() }));
}

export function fileName(title, ending) {
  const name = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${name || "conversation"}.${ending}`;
}

/** Let the browser save a text as a file. */
export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
