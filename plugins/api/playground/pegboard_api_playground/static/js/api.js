// Requests to the server that the page came from. All addresses are relative to the page, so that
// they are right below any path prefix.

import { eventsOf } from "./sse.js";

const ROOT = "..";
const KEY = "pegboard:key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** askKey: returns a promise of the API key, or of null if the user has none. storage: keeps the
 * key until the tab is closed. */
export class Api {
  #askKey;
  #storage;
  #question = null;

  constructor(askKey, storage) {
    this.#askKey = askKey;
    this.#storage = storage;
  }

  get hasKey() {
    return this.#storage.getItem(KEY) !== null;
  }

  forgetKey() {
    this.#storage.removeItem(KEY);
  }

  async models() {
    return (await (await this.#request("/v1/models")).json()).data;
  }

  async plugins() {
    return (await this.#request("/v1/pegboard/plugins")).json();
  }

  /** Yield the chunks of a chat completion. */
  async *chat(body, signal) {
    const response = await this.#request("/v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal,
    });
    for await (const data of eventsOf(response.body)) {
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code ?? 500, messageOf(chunk, "The answer broke off"));
      yield chunk;
    }
  }

  async #request(path, options = {}) {
    for (let wasRefused = false; ; wasRefused = true) {
      const key = this.#storage.getItem(KEY);
      const response = await this.#fetch(path, options, key);
      if (response.ok) return response;
      const body = await response.json().catch(() => ({}));
      const error = new ApiError(response.status, messageOf(body, `The server answered ${response.status}`));
      if (response.status !== 401 || !(await this.#keyAfter(key, wasRefused))) throw error;
    }
  }

  async #fetch(path, options, key) {
    const headers = options.body === undefined ? {} : { "Content-Type": "application/json" };
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    try {
      return await fetch(ROOT + path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server cannot be reached. Is it running?");
    }
  }

  /** Ask the user for a key once, however many requests were refused. Returns whether there is
   * another key than the one that was refused. */
  async #keyAfter(refused, again) {
    if (this.#storage.getItem(KEY) === refused) {
      this.#question ??= this.#askKey(refused !== null || again).finally(() => (this.#question = null));
      const key = await this.#question;
      if (key === null) return false;
      this.#storage.setItem(KEY, key);
    }
    return true;
  }
}

function messageOf(body, otherwise) {
  const error = body.error ?? body;
  return typeof error === "string" ? error : (error.message ?? otherwise);
}
