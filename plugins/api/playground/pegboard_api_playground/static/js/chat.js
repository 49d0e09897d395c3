// Asks for answers, and adds them to conversations. Each conversation has at most one answer that
// is being generated.

import { addChunk, newAnswer, toolMessage, userMessage } from "./message.js";
import { requestBody } from "./requests.js";

/** api: asks the server. now: the time in milliseconds. onChange(conversation): its messages have
 * changed. onChunk(conversation): its last message has grown. */
export class Chat {
  #api;
  #now;
  #onChange;
  #onChunk;
  #runs = new Map();

  constructor(api, now, onChange, onChunk) {
    this.#api = api;
    this.#now = now;
    this.#onChange = onChange;
    this.#onChunk = onChunk;
  }

  isRunning(id) {
    return this.#runs.has(id);
  }

  stop(id) {
    this.#runs.get(id)?.abort();
  }

  send(conversation, text) {
    conversation.messages.push(userMessage(text));
    return this.#answer(conversation);
  }

  /** Replace a message of the user, and all that came after it. */
  edit(conversation, index, text) {
    conversation.messages.splice(index, Infinity, userMessage(text));
    return this.#answer(conversation);
  }

  /** Ask again for an answer. What came after it is dropped. */
  regenerate(conversation, index) {
    conversation.messages.splice(index, Infinity);
    return this.#answer(conversation);
  }

  /** Give the results of tools: [id of the call, text]. */
  giveResults(conversation, results) {
    conversation.messages.push(...results.map(([id, text]) => toolMessage(id, text)));
    return this.#answer(conversation);
  }

  async #answer(conversation) {
    const answer = newAnswer(conversation.settings.model, this.#now());
    const controller = new AbortController();
    let body = null;
    try {
      body = requestBody(conversation);
    } catch (error) {
      answer.error = error.message;
    }
    conversation.messages.push(answer);
    this.#runs.set(conversation.id, controller);
    this.#onChange(conversation);
    try {
      for await (const chunk of body === null ? [] : this.#api.chat(body, controller.signal)) {
        addChunk(answer, chunk, this.#now());
        this.#onChunk(conversation);
      }
      if (answer.finish === null && answer.error === null) answer.error = "The answer broke off";
    } catch (error) {
      if (controller.signal.aborted) answer.finish = "stopped";
      else answer.error = error.message;
    }
    this.#runs.delete(conversation.id);
    this.#onChange(conversation);
  }
}
