// The messages on the page.

import { button, copyButton, element, fit, iconButton, isSubmit, number } from "./dom.js";
import { markdown } from "./markdown.js";
import { numbersOf } from "./message.js";
import { hideTooltip, tokenList } from "./tokens.js";
import { callList } from "./tools.js";

const FINISHES = {
  stopped: "stopped",
  length: "cut off at the limit of tokens",
  abort: "ended by the server",
  content_filter: "filtered",
};

/** Shows a conversation. actions: edit(index, text), regenerate(index), giveResults(results). */
export class MessageList {
  #log;
  #actions;
  #conversation = null;
  #last = null;
  #drawing = null;
  #cost = 0;
  #wasAtEnd = true;

  constructor(log, actions) {
    this.#log = log;
    this.#actions = actions;
    log.addEventListener("scroll", () => (this.#wasAtEnd = this.#isAtEnd()));
    new ResizeObserver(() => this.#wasAtEnd && this.#toEnd()).observe(log);
  }

  /** Show all messages. */
  show(conversation, isRunning) {
    const isSame = this.#conversation?.id === conversation.id;
    const wasAtEnd = !isSame || this.#isAtEnd();
    this.#cancel();
    hideTooltip();
    this.#conversation = conversation;
    const { messages } = conversation;
    const views = messages.map((message, index) => {
      const isLast = index === messages.length - 1;
      return message.role === "tool" ? null : this.#view(message, index, isRunning && isLast);
    });
    this.#last = views.at(-1) ?? null;
    this.#log.setAttribute("aria-busy", String(isRunning));
    this.#log.replaceChildren(...views.filter((view) => view !== null).map((view) => view.node));
    if (wasAtEnd) this.#toEnd();
  }

  /** Show that the last message has grown: at the next frame, and less often if it is long. */
  grow() {
    if (this.#drawing !== null) return;
    this.#drawing = setTimeout(() => {
      this.#drawing = null;
      if (!this.#last?.update) return;
      const wasAtEnd = this.#isAtEnd();
      const start = performance.now();
      this.#last.update();
      this.#cost = performance.now() - start;
      if (wasAtEnd) this.#toEnd();
    }, Math.max(30, 4 * this.#cost));
  }

  #cancel() {
    clearTimeout(this.#drawing);
    this.#drawing = null;
    this.#cost = 0;
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.#log;
    return scrollHeight - scrollTop - clientHeight < 48;
  }

  #toEnd() {
    this.#log.scrollTop = this.#log.scrollHeight;
  }

  #view(message, index, isRunning) {
    return message.role === "user"
      ? userView(message, index, this.#actions)
      : answerView(message, index, this.#conversation, isRunning, this.#actions);
  }
}

function userView(message, index, actions) {
  const node = element("article", { class: "message user", "aria-label": "You" });
  const show = () => {
    node.replaceChildren(
      element("div", { class: "bubble", text: message.content }),
      element(
        "div",
        { class: "actions" },
        iconButton("edit", "Edit and ask again", edit),
        copyButton(() => message.content),
      ),
    );
  };
  const edit = () => {
    const field = element("textarea", { "aria-label": "Message", value: message.content });
    const send = () => field.value.trim() && actions.edit(index, field.value);
    const cancel = () => {
      show();
      node.querySelector("button").focus();
    };
    field.addEventListener("input", () => fit(field));
    field.addEventListener("keydown", (event) => {
      if (isSubmit(event)) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      }
    });
    const choices = element("div", { class: "choices" }, button("Cancel", cancel), button("Send", send, { class: "button primary" }));
    node.replaceChildren(element("div", { class: "editor" }, field, choices));
    fit(field);
    field.focus();
  };
  show();
  return { node };
}

function answerView(message, index, conversation, isRunning, actions) {
  const reasoning = reasoningView();
  const body = element("div", { class: "content" });
  const calls = element("div");
  const footer = element("footer", { class: "footer" });
  const node = element("article", { class: "message answer", "aria-label": "Answer", "aria-busy": String(isRunning) }, reasoning.node, body, calls, footer);
  const following = conversation.messages.slice(index + 1);
  const onResults = isRunning ? null : actions.giveResults;
  const update = () => {
    reasoning.update(message, isRunning);
    const isTinted = message.tokens.length > 0 && conversation.settings.logprobs;
    const isEmpty = !message.content && !message.reasoning && !message.tool_calls.length;
    if (isTinted) body.replaceChildren(tokenList(message.tokens));
    else if (isRunning && isEmpty) body.replaceChildren(element("p", { class: "waiting", "aria-label": "Waiting for the first token" }, element("span"), element("span"), element("span")));
    else body.replaceChildren(markdown(message.content));
    if (message.tool_calls.length) calls.replaceChildren(callList(message, following, onResults));
    footer.replaceChildren(numbersView(message));
  };
  update();
  if (message.error !== null) body.append(element("p", { class: "error", role: "alert", text: message.error }));
  if (!isRunning) footer.append(answerActions(message, index, actions));
  return { node, update };
}

const answerActions = (message, index, actions) =>
  element(
    "div",
    { class: "actions" },
    message.content && copyButton(() => message.content),
    iconButton("again", message.error === null ? "Regenerate" : "Try again", () => actions.regenerate(index)),
  );

/** Reasoning, folded unless the user opens it. The element stays the same while the text grows. */
function reasoningView() {
  const summary = element("summary");
  const text = element("div", { class: "content" });
  const node = element("details", { class: "reasoning", hidden: true }, summary, text);
  let length = 0;
  const update = (message, isRunning) => {
    node.hidden = !message.reasoning;
    summary.textContent = isRunning && !message.content && !message.tool_calls.length ? "Reasoning…" : "Reasoning";
    if (message.reasoning.length === length) return;
    length = message.reasoning.length;
    text.replaceChildren(markdown(message.reasoning));
  };
  return { node, update };
}

function numbersView(message) {
  const { prompt, count, rate, wait } = numbersOf(message);
  const parts = [
    count !== null && `${number(count)} ${count === 1 ? "token" : "tokens"}`,
    rate !== null && `${rate.toFixed(1)} tokens/s`,
    wait !== null && `first after ${wait < 1000 ? `${Math.round(wait)} ms` : `${(wait / 1000).toFixed(1)} s`}`,
    prompt !== null && `prompt ${number(prompt)}`,
    FINISHES[message.finish],
  ];
  const texts = parts.filter((part) => part);
  return element("ul", { class: "numbers", "aria-label": "Numbers of this answer" }, texts.map((text) => element("li", { text })));
}
