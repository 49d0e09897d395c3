// Conversations, kept in the browser's storage: one entry each, so that two tabs do not overwrite
// each other's.

import { DEFAULTS } from "./limits.js";

export const UNTITLED = "New conversation";

/** storage: localStorage, or anything with its methods. prefix: of all names in it. */
export class Store {
  #storage;
  #prefix;

  constructor(storage, prefix) {
    this.#storage = storage;
    this.#prefix = prefix;
  }

  /** All conversations that can be read, the newest first. */
  list() {
    const names = Array.from({ length: this.#storage.length }, (_, index) => this.#storage.key(index));
    return names
      .filter((name) => name.startsWith(this.#prefix))
      .map((name) => this.#read(name))
      .filter((conversation) => conversation !== null)
      .sort((left, right) => right.updated - left.updated);
  }

  get(id) {
    return this.#read(this.#prefix + id);
  }

  /** Keep a conversation. Returns false if the storage is full. The probabilities of its tokens
   * would fill it, so they are left out. */
  save(conversation) {
    const messages = conversation.messages.map((message) =>
      message.role === "assistant" ? { ...message, tokens: [] } : message,
    );
    try {
      this.#storage.setItem(this.#prefix + conversation.id, JSON.stringify({ ...conversation, messages }));
      return true;
    } catch {
      return false;
    }
  }

  remove(id) {
    this.#storage.removeItem(this.#prefix + id);
  }

  #read(name) {
    try {
      return readConversation(JSON.parse(this.#storage.getItem(name)));
    } catch {
      return null;
    }
  }
}

/** A conversation without messages. settings: those of another one, which it takes over. */
export function newConversation(settings = {}, now = Date.now()) {
  return {
    id: newId(),
    title: UNTITLED,
    created: now,
    updated: now,
    settings: { ...DEFAULTS, ...settings },
    messages: [],
  };
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Check what was read from the storage or from a file, and return it as a conversation. Throws if
 * it is none. Unknown fields are dropped. */
export function readConversation(value) {
  if (typeof value !== "object" || value === null || !Array.isArray(value.messages)) {
    throw new Error("this is not a conversation");
  }
  const settings = { ...DEFAULTS };
  for (const [name, standard] of Object.entries(DEFAULTS)) {
    const given = value.settings?.[name];
    const isFit = standard === null ? given === null || Number.isFinite(given) : typeof given === typeof standard;
    if (isFit) settings[name] = given;
  }
  return {
    id: /^[0-9a-f]{16}$/.test(value.id) ? value.id : newId(),
    title: text(value.title) || UNTITLED,
    created: Number(value.created) || Date.now(),
    updated: Number(value.updated) || Date.now(),
    settings,
    messages: value.messages.map(readMessage),
  };
}

function readMessage(value) {
  const content = text(value?.content);
  if (value?.role === "user") return { role: "user", content };
  if (value?.role === "tool") return { role: "tool", tool_call_id: text(value.tool_call_id), content };
  if (value?.role !== "assistant") throw new Error(`there is no role ${JSON.stringify(value?.role)}`);
  const { usage, times } = value;
  return {
    role: "assistant",
    model: text(value.model),
    content,
    reasoning: text(value.reasoning),
    tool_calls: Array.isArray(value.tool_calls) ? value.tool_calls.map(readCall) : [],
    finish: text(value.finish) || null,
    error: text(value.error) || null,
    usage: usage ? { prompt: Number(usage.prompt) || 0, answer: Number(usage.answer) || 0 } : null,
    times: { start: Number(times?.start) || 0, first: time(times?.first), last: time(times?.last) },
    tokens: [],
  };
}

const readCall = (call) => ({
  id: text(call?.id),
  type: "function",
  function: { name: text(call?.function?.name), arguments: text(call?.function?.arguments) },
});

const text = (value) => (typeof value === "string" ? value : "");
const time = (value) => (Number.isFinite(value) ? value : null);
