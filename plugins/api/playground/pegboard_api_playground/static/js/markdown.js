// Markdown to elements. What a model writes is not trusted: DOMPurify keeps only what text needs,
// and nothing that loads, runs, submits or has a style.

import highlight from "../vendor/highlight.js";
import { Marked } from "../vendor/marked.js";
import createPurify from "../vendor/purify.js";
import { copyButton, element } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: (
    "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i img kbd li ol p pre s strong sub sup " +
    "table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["href", "title", "alt", "src", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const LANGUAGE = /^language-[\w+#.-]+$/;
const LONGEST_HIGHLIGHTED = 20_000;

const marked = new Marked({ gfm: true, breaks: true, async: false });
const purify = createPurify(window);

purify.addHook("uponSanitizeAttribute", (node, data) => {
  if (data.attrName === "class") data.keepAttr = node.nodeName === "CODE" && LANGUAGE.test(data.attrValue);
  // A page that only shows text loads nothing, whatever the text says.
  if (data.attrName === "src") data.keepAttr = data.attrValue.startsWith("data:image/");
});

/** Return the elements of a text in Markdown. */
export function markdown(text) {
  const fragment = purify.sanitize(marked.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const image of fragment.querySelectorAll("img:not([src])")) {
    image.replaceWith(`[image${image.alt ? `: ${image.alt}` : ""}]`);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) code.parentNode.replaceWith(codeBlock(code));
  return fragment;
}

function codeBlock(code) {
  const text = code.textContent;
  const language = code.className.replace("language-", "");
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", { text: language || "text" }), copyButton(() => text, "Copy the code")),
    element("pre", { tabindex: 0 }, coloured(text, language)),
  );
}

/** Return a `code` element with the colours of a language that is known. */
export function coloured(text, language) {
  const code = element("code", { text });
  if (highlight.getLanguage(language) && text.length <= LONGEST_HIGHLIGHTED) {
    code.className = `language-${language}`;
    highlight.highlightElement(code);
  }
  return code;
}
