// The page: its parts, and what the user can do with them.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { askKey, askTitle, confirmRemoval, isDialogOpen, showHelp } from "./dialogs.js";
import { announce, byId, element, number } from "./dom.js";
import { Sentences, titleOf } from "./message.js";
import { MessageList } from "./messages.js";
import { closePanels, selectTab, startPanels, startTabs } from "./panels.js";
import { PluginsTab } from "./plugins.js";
import { SettingsPanel } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { newConversation, Store, UNTITLED } from "./store.js";
import { startTheme } from "./theme.js";
import { asJson, asMarkdown, download, fileName, fromJson } from "./transfer.js";

// Two servers may share an origin, below different paths.
const PREFIX = `pegboard:${location.pathname}:`;

const store = new Store(localStorage, PREFIX);
const api = new Api(askKey, sessionStorage);
const chat = new Chat(api, () => performance.now(), onMessages, onGrowth);
const messages = new MessageList(byId("log"), {
  edit: (index, text) => run(() => chat.edit(current, index, text)),
  regenerate: (index) => run(() => chat.regenerate(current, index)),
  giveResults: (results) => run(() => chat.giveResults(current, results)),
});
const composer = new Composer({ send, stop: () => chat.stop(current.id), editLast });
const sidebar = new Sidebar({ open, rename, remove });
const settings = new SettingsPanel(onSettings);
const plugins = new PluginsTab(api);

let models = [];
/** The conversation that is shown. Conversations without messages are not kept. */
let current = store.list()[0] ?? newConversation();
/** Conversations with an answer that is being generated, by id. They are newer than the storage. */
const busy = new Map();
let speech = new Sentences();

// --- conversations

function show() {
  const isRunning = chat.isRunning(current.id);
  const isEmpty = current.messages.length === 0;
  byId("welcome").hidden = !isEmpty;
  byId("log").hidden = isEmpty;
  messages.show(current, isRunning);
  composer.show(isRunning);
  byId("title").textContent = current.title;
  byId("export-json").disabled = byId("export-markdown").disabled = isEmpty;
  showModels();
  settings.show(current.settings, modelOf(current));
  showUsage();
  sidebar.show(store.list(), current.id);
}

function open(id) {
  current = busy.get(id) ?? store.get(id) ?? current;
  closePanels();
  selectTab("chat");
  show();
  composer.focus();
}

function create() {
  current = newConversation(current.settings);
  closePanels();
  selectTab("chat");
  show();
  composer.focus();
}

async function rename(id) {
  const conversation = id === current.id ? current : (busy.get(id) ?? store.get(id));
  const title = await askTitle(conversation.title);
  if (title === null) return;
  conversation.title = title;
  keep(conversation);
  show();
}

async function remove(id) {
  if (!(await confirmRemoval(store.get(id).title))) return;
  chat.stop(id);
  busy.delete(id);
  store.remove(id);
  if (current.id === id) current = store.list()[0] ?? newConversation(current.settings);
  show();
}

function keep(conversation) {
  if (conversation.messages.length && !store.save(conversation)) {
    notify("The browser's storage is full: export conversations and delete them.");
  }
}

// --- answers

function send(text) {
  if (current.title === UNTITLED) current.title = titleOf(text);
  run(() => chat.send(current, text));
}

async function run(ask) {
  const conversation = current;
  if (chat.isRunning(conversation.id)) return;
  busy.set(conversation.id, conversation);
  speech = new Sentences();
  await ask();
  busy.delete(conversation.id);
  if (conversation.id !== current.id) return;
  const { content, error, finish } = conversation.messages.at(-1);
  if (content) announce(speech.next(content, true));
  announce(error ?? (finish === "stopped" ? "The answer was stopped" : "The answer is complete"));
}

/** Conversations that were deleted meanwhile are not busy any more. */
function onMessages(conversation) {
  if (!busy.has(conversation.id)) return;
  conversation.updated = Date.now();
  keep(conversation);
  if (conversation.id === current.id) show();
  else sidebar.show(store.list(), current.id);
}

function onGrowth(conversation) {
  if (conversation.id !== current.id) return;
  messages.grow();
  const sentences = speech.next(conversation.messages.at(-1).content, false);
  if (sentences) announce(sentences);
  showUsage();
}

function editLast() {
  [...byId("log").querySelectorAll(".user .actions button")].at(-2)?.click();
}

// --- models and settings

const modelOf = (conversation) => models.find((model) => model.id === conversation.settings.model);

async function loadModels() {
  try {
    models = await api.models();
    notify("");
  } catch (error) {
    notify(error.message, loadModels);
  }
  byId("forget-key").hidden = !api.hasKey;
  show();
}

function showModels() {
  if (!modelOf(current) && models.length) current.settings.model = models[0].id;
  const option = ({ id }) => element("option", { value: id, text: id });
  const adapters = models.filter((model) => model.parent);
  byId("model").replaceChildren(
    ...models.filter((model) => !model.parent).map(option),
    ...(adapters.length ? [element("optgroup", { label: "Adapters" }, adapters.map(option))] : []),
  );
  byId("model").value = current.settings.model;
  byId("model").disabled = models.length === 0;
}

/** How much of the model's length the conversation fills. */
function showUsage() {
  const limit = modelOf(current)?.max_model_len;
  const usage = current.messages.findLast((message) => message.usage)?.usage;
  const count = usage ? usage.prompt + usage.answer : 0;
  byId("usage").textContent = limit ? `${number(count)} of ${number(limit)} tokens` : "";
}

function onSettings(name) {
  keep(current);
  if (name === "logprobs") messages.show(current, chat.isRunning(current.id));
}

/** Show a message above the field for the prompt. retry: what a button does about it. */
function notify(text, retry = null) {
  const notice = byId("notice");
  notice.hidden = text === "";
  notice.querySelector("span").textContent = text;
  const control = notice.querySelector("button");
  control.hidden = retry === null;
  control.onclick = retry;
}

// --- files

function exportAll() {
  download("playground.json", asJson(store.list()), "application/json");
}

async function importFile(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const conversations = fromJson(await file.text());
    conversations.forEach(keep);
    notify("");
    if (conversations.length) open(conversations[0].id);
  } catch (error) {
    notify(`${file.name}: ${error.message}`);
  }
}

// --- the page

function onKey(event) {
  const isTyping = event.target.matches("input, textarea, select");
  if (isDialogOpen()) return;
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") create();
  else if (event.key === "Escape" && chat.isRunning(current.id)) chat.stop(current.id);
  else if (event.key === "Escape") closePanels();
  else if (event.key === "?" && !isTyping) showHelp();
  else if (event.key === "/" && !isTyping) composer.focus();
  else return;
  event.preventDefault();
}

/** Another tab of the browser has changed the storage. */
function onOtherTab(event) {
  if (event.key === PREFIX + current.id && !busy.has(current.id)) {
    current = store.get(current.id) ?? current;
    show();
  } else sidebar.show(store.list(), current.id);
}

/** The page is left while answers are being generated. The server ends them. */
function keepUnfinished() {
  for (const conversation of busy.values()) {
    conversation.messages.at(-1).finish = "stopped";
    store.save(conversation);
  }
}

function start() {
  const clicks = {
    "new-conversation": create,
    help: showHelp,
    import: () => byId("file").click(),
    "export-all": exportAll,
    "export-json": () => download(fileName(current.title, "json"), asJson([current]), "application/json"),
    "export-markdown": () => download(fileName(current.title, "md"), asMarkdown(current), "text/markdown"),
    "forget-key": () => {
      api.forgetKey();
      byId("forget-key").hidden = true;
    },
  };
  for (const [id, listener] of Object.entries(clicks)) byId(id).addEventListener("click", listener);
  byId("file").addEventListener("change", importFile);
  byId("model").addEventListener("change", (event) => {
    current.settings.model = event.target.value;
    keep(current);
    settings.show(current.settings, modelOf(current));
    showUsage();
  });
  document.addEventListener("keydown", onKey);
  window.addEventListener("storage", onOtherTab);
  window.addEventListener("pagehide", keepUnfinished);
  startTheme(localStorage);
  startPanels(() => settings.fit());
  startTabs((name) => name === "plugins" && plugins.open());
  show();
  composer.focus();
  loadModels();
}

start();
