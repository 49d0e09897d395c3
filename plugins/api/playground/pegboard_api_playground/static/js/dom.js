// Small functions that make elements. Text is always set as text, never parsed as HTML.

export const byId = (id) => document.getElementById(id);

/** Make an element. properties: attributes; `on` holds listeners, `text` the text, and values that
 * are false, null or undefined are left out. children: nodes, strings, or nothing. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    } else if (name === "text") node.textContent = value;
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

/** An icon that index.html defines as a symbol. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon and a name for the tooltip and for screen readers. */
export function iconButton(name, label, listener, properties = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click: listener }, ...properties },
    icon(name),
  );
}

/** A button with a text. */
export function button(text, listener, properties = {}) {
  return element("button", { type: "button", class: "button", text, on: { click: listener }, ...properties });
}

/** Copy a text. Pages that are not served over HTTPS have no clipboard, hence the second way. */
export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = element("textarea", { class: "hidden-visually", value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** A button that copies a text, and says so for a moment. */
export function copyButton(textOf, label = "Copy") {
  const node = iconButton("copy", label, async () => {
    await copyText(textOf());
    node.replaceChildren(icon("check"));
    announce("Copied");
    setTimeout(() => node.replaceChildren(icon("copy")), 1200);
  });
  return node;
}

/** Let screen readers say a text after what they say now. */
export function announce(text) {
  const log = byId("announcer");
  log.append(element("p", { text }));
  while (log.children.length > 20) log.firstChild.remove();
}

/** Make a text field as high as its text. */
export function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

/** Whether a key press ends a text: Enter without Shift, and not within an input method. */
export const isSubmit = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

export const number = (value) => value.toLocaleString("en-US");
