// The calls of tools in an answer. The user types their results.

import { button, element, fit } from "./dom.js";
import { coloured } from "./markdown.js";
import { openCalls } from "./message.js";

/** Return the calls of an answer with their results. messages: those after the answer.
 * onResults([[id, text], …]), or nothing while the answer is being generated. */
export function callList(answer, messages, onResults) {
  const open = openCalls(answer, messages);
  const fields = new Map();
  const boxes = answer.tool_calls.map((call) => callBox(call, messages, onResults && open.includes(call) ? fields : null));
  const send = () => onResults([...fields].map(([id, field]) => [id, field.value]));
  const isAsking = onResults && open.length > 0;
  return element(
    "div",
    { class: "calls" },
    boxes,
    isAsking && button(open.length > 1 ? "Send results" : "Send result", send, { class: "button primary" }),
  );
}

/** fields: gets the field for the result, if there is none yet; null = the call waits for nothing. */
function callBox(call, messages, fields) {
  const { name } = call.function;
  const result = messages.find((message) => message.role === "tool" && message.tool_call_id === call.id);
  const box = element(
    "section",
    { class: "call", "aria-label": `Call of ${name}` },
    element("h3", {}, "Calls ", element("code", { text: name })),
    element("pre", { tabindex: 0 }, coloured(spaced(call.function.arguments), "json")),
  );
  if (result) {
    box.append(element("h4", { text: "Result" }), element("pre", { tabindex: 0, text: result.content }));
  } else if (fields) {
    const field = element("textarea", {
      rows: 2,
      "aria-label": `Result of ${name}`,
      placeholder: "The tool's result, such as JSON",
      on: { input: () => fit(field) },
    });
    fields.set(call.id, field);
    box.append(field);
  }
  return box;
}

/** JSON with line breaks, or the text as it is if it is no JSON (yet). */
function spaced(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
