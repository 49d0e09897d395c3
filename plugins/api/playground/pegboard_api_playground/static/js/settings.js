// The panel with the settings of a conversation.

import { byId, element, fit } from "./dom.js";
import { FIELDS, fieldsFor, readNumber } from "./limits.js";
import { readSchema, readTools } from "./requests.js";

const TEXTS = { system: null, stop: null, tools: readTools, schema: readSchema };

/** onChange(name): called after a setting of the shown conversation has changed. */
export class SettingsPanel {
  #settings = null;
  #fields = FIELDS;
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
    byId("sampling").append(...FIELDS.map(({ name, label, hint, step }) => numberRow(name, label, hint, step, () => this.#readNumber(name))));
    for (const [name, check] of Object.entries(TEXTS)) {
      byId(name).addEventListener("input", () => this.#readText(name, check));
    }
    byId("logprobs").addEventListener("change", (event) => this.#set("logprobs", event.target.checked));
    byId("tool_choice").addEventListener("change", (event) => this.#set("tool_choice", event.target.value));
    byId("reset").addEventListener("click", () => this.#reset());
  }

  /** Show the settings of a conversation. model: as /v1/models lists it, for the limits. */
  show(settings, model) {
    this.#settings = settings;
    this.#fields = fieldsFor(model);
    for (const field of this.#fields) {
      const input = byId(field.name);
      input.min = field.min;
      if (field.max !== undefined) input.max = field.max;
      input.value = settings[field.name] ?? "";
      if (field.name === "max_tokens") input.placeholder = field.max ? `up to ${field.max}` : "auto";
      showError(field.name, "");
    }
    for (const [name, check] of Object.entries(TEXTS)) {
      byId(name).value = settings[name];
      this.#checkText(name, check);
    }
    byId("logprobs").checked = settings.logprobs;
    byId("tool_choice").value = settings.tool_choice;
  }

  /** Texts can be measured only once they are seen. */
  fit() {
    for (const name of Object.keys(TEXTS)) fit(byId(name));
  }

  #set(name, value) {
    this.#settings[name] = value;
    this.#onChange(name);
  }

  #readNumber(name) {
    const input = byId(name);
    const field = this.#fields.find((each) => each.name === name);
    try {
      if (input.validity.badInput) throw new Error(`${field.label} must be a number`);
      this.#set(name, readNumber(input.value, field));
      showError(name, "");
    } catch (error) {
      showError(name, error.message);
    }
  }

  #readText(name, check) {
    fit(byId(name));
    this.#checkText(name, check);
    this.#set(name, byId(name).value);
  }

  #checkText(name, check) {
    try {
      check?.(byId(name).value);
      showError(name, "");
    } catch (error) {
      showError(name, error.message);
    }
  }

  #reset() {
    for (const { name } of FIELDS) this.#settings[name] = null;
    this.#settings.stop = "";
    this.show(this.#settings, { max_model_len: this.#fields.find(({ name }) => name === "max_tokens").max });
    this.#onChange("stop");
  }
}

function numberRow(name, label, hint, step, onInput) {
  return element(
    "div",
    { class: "row" },
    element("label", { for: name, title: hint, text: label }),
    element("input", { id: name, type: "number", step, inputmode: "decimal", placeholder: "auto", autocomplete: "off", "aria-describedby": `${name}-hint ${name}-error`, on: { input: onInput } }),
    element("span", { id: `${name}-hint`, class: "hidden-visually", text: hint }),
    element("p", { id: `${name}-error`, class: "field-error", hidden: true }),
  );
}

/** Show what is wrong with a field, or nothing. */
function showError(name, message) {
  const note = byId(`${name}-error`);
  if (!note) return;
  note.textContent = message;
  note.hidden = message === "";
  byId(name).setAttribute("aria-invalid", String(message !== ""));
}
