// The field in which the user writes.

import { byId, fit, isSubmit } from "./dom.js";

/** actions: send(text), stop(), editLast(). */
export class Composer {
  #field = byId("prompt");
  #button = byId("send");
  #isRunning = false;

  constructor(actions) {
    const submit = () => {
      if (this.#isRunning) {
        actions.stop();
      } else if (this.#field.value.trim()) {
        const text = this.#field.value;
        this.#field.value = "";
        this.#grow();
        actions.send(text);
      }
      this.#field.focus();
    };
    this.#button.addEventListener("click", submit);
    this.#field.addEventListener("input", () => this.#grow());
    this.#field.addEventListener("keydown", (event) => {
      if (isSubmit(event)) {
        event.preventDefault();
        if (!this.#isRunning) submit();
      } else if (event.key === "ArrowUp" && !this.#field.value) {
        event.preventDefault();
        actions.editLast();
      }
    });
    this.#grow();
  }

  focus() {
    this.#field.focus();
  }

  /** Show whether an answer is being generated: then the button stops it. */
  show(isRunning) {
    this.#isRunning = isRunning;
    const label = isRunning ? "Stop" : "Send";
    this.#button.setAttribute("aria-label", label);
    this.#button.title = isRunning ? "Stop (Escape)" : "Send (Enter)";
    this.#button.classList.toggle("stops", isRunning);
    this.#button.querySelector("use").setAttribute("href", isRunning ? "#icon-stop" : "#icon-send");
    this.#enable();
  }

  #grow() {
    fit(this.#field);
    this.#enable();
  }

  #enable() {
    this.#button.disabled = !this.#isRunning && !this.#field.value.trim();
  }
}
