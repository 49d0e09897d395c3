// The tab "Plugins": every choice between plugins, with its reasons.

import { byId, element, number } from "./dom.js";

const STATES = { selected: "chosen", outranked: "outranked", unsuitable: "unsuitable", unavailable: "unavailable" };

/** Shows GET /v1/pegboard/plugins, which the api `admin` has. */
export class PluginsTab {
  #api;
  #filter = byId("plugin-filter");
  #list = byId("plugin-list");
  #summary = byId("plugin-summary");
  #found = null;

  constructor(api) {
    this.#api = api;
    this.#filter.addEventListener("input", () => this.#draw());
  }

  async open() {
    try {
      this.#found = await this.#api.plugins();
      this.#draw();
    } catch (error) {
      this.#found = null;
      this.#filter.hidden = true;
      this.#summary.textContent = "";
      this.#list.replaceChildren(error.status === 404 ? howToEnable() : element("p", { class: "error", text: error.message }));
    }
  }

  #draw() {
    if (this.#found === null) return;
    const { installed, decisions } = this.#found;
    const words = this.#filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = decisions.filter((decision) => {
      const text = JSON.stringify(decision).toLowerCase();
      return words.every((word) => text.includes(word));
    });
    this.#filter.hidden = false;
    this.#summary.textContent =
      `${number(installed.length)} plugins are installed. The server made ${number(decisions.length)} choices` +
      (words.length ? `; ${number(shown.length)} match.` : ".");
    this.#list.replaceChildren(...groups(shown));
  }
}

function howToEnable() {
  return element(
    "div",
    { class: "notice" },
    element("h2", { text: "The server does not show its plugins" }),
    element("p", {}, "The route ", element("code", { text: "/v1/pegboard/plugins" }), " belongs to the operators' routes, which are off. They can also pause the server and empty its cache. To turn them on, start the server with"),
    element("pre", { tabindex: 0 }, element("code", { text: "pegboard serve --playground --plugins-enable api:admin" })),
    element("p", {}, "The command ", element("code", { text: "pegboard plugins why" }), " shows the same choices in a terminal."),
  );
}

/** The choices of each process, under a heading. */
function groups(decisions) {
  const processes = [...new Set(decisions.map((decision) => decision.process))];
  return processes.map((process) =>
    element(
      "section",
      {},
      element("h2", { text: process === "api" ? "API process" : "Engine" }),
      decisions.filter((decision) => decision.process === process).map(decisionView),
    ),
  );
}

function decisionView({ kind, key, need, winner, rank, notes, candidates }) {
  return element(
    "details",
    { class: "decision" },
    element(
      "summary",
      {},
      element("span", { class: "kind" }, kind, key && element("span", { class: "key", text: ` ${key}` })),
      element("span", { class: "winner", text: winner ? winner.name : "none" }),
      element("span", { class: "rank", text: rank }),
    ),
    need && element("p", {}, "Needed: ", element("code", { text: need })),
    winner && element("p", { text: `From ${winner.distribution} ${winner.version}` }),
    (notes ?? []).map((note) => element("p", { text: note })),
    element(
      "div",
      { class: "table", tabindex: 0, role: "region", "aria-label": `Candidates for ${kind} ${key}` },
      element(
        "table",
        {},
        element("thead", {}, element("tr", {}, ["Plugin", "Distribution", "State", "Reason"].map((text) => element("th", { scope: "col", text })))),
        element("tbody", {}, candidates.map(candidateRow)),
      ),
    ),
  );
}

const candidateRow = ({ name, distribution, state, reason }) =>
  element(
    "tr",
    { class: state === "selected" ? "chosen" : null },
    element("td", {}, element("code", { text: name })),
    element("td", { text: distribution }),
    element("td", { text: STATES[state] ?? state }),
    element("td", { text: reason }),
  );
