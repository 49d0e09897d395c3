// An answer as tokens, tinted by their probability. The pointer or the arrow keys show the
// alternatives of a token.

import { byId, element } from "./dom.js";

const STEPS = [0.05, 0.25, 0.6, 0.9];

/** The step of a probability: 0 = unlikely … 4 = nearly sure. */
export const stepOf = (logprob) => STEPS.filter((limit) => Math.exp(logprob) >= limit).length;

export const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value > 0 && value < 0.1 ? "< 0.1%" : `${value.toFixed(1)}%`;
};

/** A text with its white space made visible. */
export const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→") || "∅";

/** Return the tokens of an answer. */
export function tokenList(tokens) {
  const nodes = tokens.map((token) => {
    const hasBreak = token.text.includes("\n");
    return element("span", { class: `token step-${stepOf(token.logprob)}`, text: hasBreak ? `↵${token.text}` : token.text });
  });
  let current = -1;
  const show = (index) => {
    if (current >= 0) nodes[current].classList.remove("current");
    current = index;
    if (index < 0) hideTooltip();
    else {
      nodes[index].classList.add("current");
      showTooltip(nodes[index], tokens[index]);
    }
  };
  return element(
    "div",
    {
      class: "tokens",
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens; the arrow keys show their alternatives",
      on: {
        mouseover: (event) => show(nodes.indexOf(event.target)),
        mouseleave: () => show(-1),
        blur: () => show(-1),
        keydown: (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
          if (step === undefined || !nodes.length) return;
          event.preventDefault();
          show(Math.min(Math.max(current + step, 0), nodes.length - 1));
        },
      },
    },
    ...nodes,
  );
}

export function hideTooltip() {
  byId("tooltip").hidden = true;
}

function showTooltip(node, token) {
  const tooltip = byId("tooltip");
  const isListed = token.others.some((other) => other.text === token.text);
  const rows = isListed ? token.others : [{ text: token.text, logprob: token.logprob }, ...token.others];
  tooltip.replaceChildren(
    element(
      "table",
      {},
      element("caption", { class: "hidden-visually", text: `Alternatives of ${visible(token.text)}` }),
      element(
        "tbody",
        {},
        rows.map((row) =>
          element(
            "tr",
            { class: row.text === token.text ? "chosen" : null },
            element("td", {}, element("code", { text: visible(row.text) })),
            element("td", { class: "number", text: percent(row.logprob) }),
          ),
        ),
      ),
    ),
  );
  tooltip.hidden = false;
  place(tooltip, node.getClientRects()[0] ?? node.getBoundingClientRect());
}

/** Put the tooltip below a token, or above it where there is no room. */
function place(tooltip, box) {
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const left = Math.max(8, Math.min(box.left, window.innerWidth - width - 8));
  const isBelow = box.bottom + height + 12 < window.innerHeight;
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${isBelow ? box.bottom + 6 : Math.max(8, box.top - height - 6)}px`;
}
