// Tests of the page's modules that need no browser. `test_playground.py` runs them with node.

import assert from "node:assert/strict";
import { test } from "node:test";

const load = (name) => import(new URL(`../pegboard_api_playground/static/js/${name}.js`, import.meta.url));
const { EventParser } = await load("sse");
const { DEFAULTS, fieldsFor, readNumber } = await load("limits");
const { readTools, requestBody } = await load("requests");
const { addChunk, newAnswer, numbersOf, openCalls, Sentences, titleOf, toolMessage } = await load("message");
const { newConversation, readConversation, Store } = await load("store");
const { asJson, asMarkdown, fileName, fromJson } = await load("transfer");
const { Chat } = await load("chat");
const { Api, ApiError } = await load("api");

class FakeStorage extends Map {
  get length() {
    return this.size;
  }
  key(index) {
    return [...this.keys()][index];
  }
  getItem(name) {
    return this.get(name) ?? null;
  }
  setItem(name, text) {
    if (this.isFull) throw new Error("QuotaExceededError");
    this.set(name, text);
  }
  removeItem(name) {
    this.delete(name);
  }
}

const delta = (fields, more = {}) => ({ choices: [{ index: 0, delta: fields, finish_reason: null, ...more }] });

test("events may be cut anywhere", () => {
  const text = 'data: {"a":1}\r\n\r\n: a comment\ndata: x\ndata: y\n\n';
  for (let cut = 0; cut <= text.length; cut += 1) {
    const parser = new EventParser();
    const events = [...parser.push(text.slice(0, cut)), ...parser.push(text.slice(cut))];
    if (text[cut - 1] !== "\r") assert.deepEqual(events, ['{"a":1}', "x\ny"], `cut at ${cut}`);
  }
});

test("numbers have limits, and the model limits the answer", () => {
  const [temperature] = fieldsFor(undefined);
  const length = fieldsFor({ max_model_len: 64 }).find(({ name }) => name === "max_tokens");
  assert.equal(readNumber(" ", temperature), null);
  assert.equal(readNumber("0.5", temperature), 0.5);
  assert.throws(() => readNumber("3", temperature), /at most 2/);
  assert.throws(() => readNumber("x", temperature), /a number/);
  assert.throws(() => readNumber("1.5", length), /whole/);
  assert.throws(() => readNumber("65", length), /at most 64/);
});

test("a request has only what was set", () => {
  const conversation = newConversation({ model: "m", temperature: 0, stop: "a\n\nb", system: "Be short." });
  conversation.messages.push({ role: "user", content: "hi" });
  const body = requestBody(conversation);
  assert.deepEqual(body.messages, [
    { role: "system", content: "Be short." },
    { role: "user", content: "hi" },
  ]);
  assert.deepEqual([body.temperature, body.stop, body.model], [0, ["a", "b"], "m"]);
  for (const name of ["top_p", "seed", "tools", "response_format", "logprobs"]) assert.ok(!(name in body), name);
  Object.assign(conversation.settings, { logprobs: true, schema: '{"type": "object"}', tools: '[{"name": "f"}]' });
  const full = requestBody(conversation);
  assert.deepEqual(full.response_format.json_schema.schema, { type: "object" });
  assert.deepEqual(full.tools, [{ type: "function", function: { name: "f" } }]);
  assert.equal(full.top_logprobs, 5);
  assert.throws(() => readTools("{"), /not JSON/);
  assert.throws(() => readTools("{}"), /a list/);
});

test("chunks make a message", () => {
  const answer = newAnswer("m", 0);
  addChunk(answer, delta({ role: "assistant", content: "" }), 5);
  assert.equal(answer.times.first, null);
  addChunk(answer, delta({ reasoning: "hm", reasoning_content: "hm" }), 10);
  addChunk(answer, delta({ content: "So" }, { logprobs: { content: [{ token: "So", logprob: -1, top_logprobs: [] }] } }), 20);
  addChunk(answer, delta({ tool_calls: [{ index: 0, id: "c", function: { name: "f", arguments: '{"x"' } }] }), 30);
  addChunk(answer, delta({ tool_calls: [{ index: 0, function: { arguments: ": 1}" } }] }, { finish_reason: "tool_calls" }), 110);
  addChunk(answer, { choices: [], usage: { prompt_tokens: 3, completion_tokens: 6 } }, 120);
  assert.deepEqual([answer.reasoning, answer.content, answer.finish], ["hm", "So", "tool_calls"]);
  assert.deepEqual(answer.tool_calls[0].function, { name: "f", arguments: '{"x": 1}' });
  assert.deepEqual(numbersOf(answer), { prompt: 3, count: 6, rate: 50, wait: 10 });
  assert.equal(openCalls(answer, []).length, 1);
  assert.equal(openCalls(answer, [toolMessage("c", "2")]).length, 0);
});

test("screen readers get whole sentences, each once", () => {
  const speech = new Sentences();
  const text = "One. Two is 2.5! And";
  const parts = [5, 12, text.length].map((end) => speech.next(text.slice(0, end), false));
  assert.deepEqual([...parts, speech.next(text, true)], ["One.", "", "Two is 2.5!", "And"]);
});

test("the storage keeps conversations, newest first, and ignores what is none", () => {
  const storage = new FakeStorage([["p:x", "{"], ["p:y", '{"a": 1}'], ["other", "1"]]);
  const store = new Store(storage, "p:");
  const old = { ...newConversation(), updated: 1, messages: [{ ...newAnswer("m", 0), content: "a", tokens: [1] }] };
  const young = { ...newConversation({ temperature: 0.5 }), updated: 2 };
  assert.ok(store.save(old) && store.save(young));
  assert.deepEqual(store.list().map(({ id }) => id), [young.id, old.id]);
  assert.equal(store.get(young.id).settings.temperature, 0.5);
  assert.deepEqual(store.get(old.id).messages[0].tokens, []);
  store.remove(old.id);
  assert.equal(store.get(old.id), null);
  storage.isFull = true;
  assert.equal(store.save(young), false);
});

test("what is read is checked", () => {
  assert.throws(() => readConversation([]));
  assert.throws(() => readConversation({ messages: [{ role: "system" }] }), /no role/);
  const odd = readConversation({ id: "../x", messages: [{ role: "user", content: 3 }], settings: { temperature: "hot", evil: 1 } });
  assert.match(odd.id, /^[0-9a-f]{16}$/);
  assert.deepEqual(odd.settings, DEFAULTS);
  assert.equal(odd.messages[0].content, "");
});

test("export and import are inverse, but for ids", () => {
  const conversation = newConversation({ model: "m" });
  const call = { id: "c", type: "function", function: { name: "f", arguments: "{}" } };
  conversation.messages.push(
    { role: "user", content: "hi" },
    { ...newAnswer("m", 0), content: "**so**", reasoning: "a\nb", tool_calls: [call] },
    toolMessage("c", "```\n1\n```"),
  );
  const [copy] = fromJson(asJson([conversation]));
  assert.notEqual(copy.id, conversation.id);
  assert.deepEqual({ ...copy, id: "" }, { ...conversation, id: "" });
  assert.throws(() => fromJson("["), /not JSON/);
  assert.throws(() => fromJson("[]"), /not an export/);
  const text = asMarkdown(conversation);
  for (const part of ["## User\n\nhi", "> a\n> b", "**so**", "Calls `f`:", "````\n```\n1\n```\n````"]) assert.ok(text.includes(part), part);
  assert.equal(fileName("What is 2+2?", "md"), "what-is-2-2.md");
  assert.equal(titleOf("  a\nb"), "a");
  assert.equal(titleOf("x".repeat(60)).length, 48);
});

function makeChat(answers) {
  const bodies = [];
  const api = {
    async *chat(body, signal) {
      bodies.push(body);
      for (const chunk of answers.shift()) {
        if (chunk instanceof Error) throw chunk;
        yield chunk;
        signal.throwIfAborted();
      }
    },
  };
  return { bodies, chat: new Chat(api, () => 0, () => {}, () => {}) };
}

test("a chat sends, edits, regenerates and answers calls", async () => {
  const end = delta({}, { finish_reason: "stop" });
  const call = delta({ tool_calls: [{ index: 0, id: "c", function: { name: "f", arguments: "{}" } }] }, { finish_reason: "tool_calls" });
  const { chat, bodies } = makeChat([[delta({ content: "A" }), end], [delta({ content: "B" }), end], [call], [delta({ content: "C" }), end]]);
  const conversation = newConversation({ model: "m" });
  await chat.send(conversation, "one");
  await chat.regenerate(conversation, 1);
  assert.deepEqual(conversation.messages.map(({ content }) => content), ["one", "B"]);
  await chat.edit(conversation, 0, "two");
  await chat.giveResults(conversation, [["c", "3"]]);
  assert.deepEqual(conversation.messages.map(({ role }) => role), ["user", "assistant", "tool", "assistant"]);
  assert.deepEqual(bodies.at(-1).messages.map(({ role }) => role), ["user", "assistant", "tool"]);
  assert.equal(bodies.at(-1).messages[1].tool_calls[0].id, "c");
  assert.equal(bodies.at(-1).messages[0].content, "two");
});

test("an answer may be stopped, fail or break off", async () => {
  const { chat } = makeChat([[new ApiError(400, "no")], [delta({ content: "A" })]]);
  const conversation = newConversation({ model: "m" });
  await chat.send(conversation, "one");
  assert.equal(conversation.messages[1].error, "no");
  await chat.regenerate(conversation, 1);
  assert.equal(conversation.messages[1].error, "The answer broke off");
  const { chat: other } = makeChat([[delta({ content: "A" }), delta({ content: "B" })]]);
  const running = other.regenerate(conversation, 1);
  assert.ok(other.isRunning(conversation.id));
  other.stop(conversation.id);
  await running;
  assert.deepEqual([conversation.messages[1].finish, conversation.messages[1].error], ["stopped", null]);
});

test("the key is asked for once, and sent", async () => {
  const sent = [];
  globalThis.fetch = async (address, { headers }) => {
    sent.push([address, headers.Authorization]);
    const isRight = headers.Authorization === "Bearer right";
    return Response.json(isRight ? { data: [1] } : { error: { message: "a key, please" } }, { status: isRight ? 200 : 401 });
  };
  const questions = [];
  const keys = ["wrong", "right"];
  const ask = async (wasWrong) => (questions.push(wasWrong), keys.shift() ?? null);
  const storage = new FakeStorage();
  const api = new Api(ask, storage);
  assert.deepEqual(await Promise.all([api.models(), api.models()]), [[1], [1]]);
  assert.deepEqual(questions, [false, true]);
  assert.ok(sent.every(([address]) => address === "../v1/models"));
  api.forgetKey();
  await assert.rejects(api.models(), /a key, please/);
});
