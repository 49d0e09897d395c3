// The list of conversations.

import { byId, element, iconButton } from "./dom.js";

/** actions: open(id), rename(id), remove(id). */
export class Sidebar {
  #list = byId("conversations");
  #actions;

  constructor(actions) {
    this.#actions = actions;
  }

  show(conversations, currentId) {
    this.#list.replaceChildren(...conversations.map((each) => this.#row(each, each.id === currentId)));
  }

  #row({ id, title }, isCurrent) {
    const open = element("button", {
      type: "button",
      class: "title",
      text: title,
      title,
      "aria-current": isCurrent ? "true" : null,
      on: { click: () => this.#actions.open(id), dblclick: () => this.#actions.rename(id) },
    });
    return element(
      "li",
      { class: isCurrent ? "current" : null },
      open,
      iconButton("edit", `Rename ${title}`, () => this.#actions.rename(id)),
      iconButton("trash", `Delete ${title}`, () => this.#actions.remove(id)),
    );
  }
}
