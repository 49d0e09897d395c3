// The tabs, and the panels at the sides.

import { byId } from "./dom.js";

const TABS = ["chat", "plugins"];
const NARROW = matchMedia("(max-width: 52rem)");

/** Show a tab. */
export function selectTab(name) {
  for (const tab of TABS) {
    const isSelected = tab === name;
    byId(`${tab}-tab`).setAttribute("aria-selected", String(isSelected));
    byId(`${tab}-tab`).tabIndex = isSelected ? 0 : -1;
    byId(`${tab}-panel`).hidden = !isSelected;
  }
  byId("title").classList.toggle("hidden-visually", name !== "chat");
}

/** Let the user open tabs. onOpen(name): called after one was opened. */
export function startTabs(onOpen) {
  const open = (name) => {
    selectTab(name);
    onOpen(name);
  };
  for (const name of TABS) {
    byId(`${name}-tab`).addEventListener("click", () => open(name));
    byId(`${name}-tab`).addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = TABS.find((each) => each !== name);
      open(other);
      byId(`${other}-tab`).focus();
    });
  }
}

/** Show or hide a panel: "sidebar" or "settings". */
function toggle(panel, isOpen) {
  document.body.classList.toggle(`${panel}-open`, isOpen);
  byId(`${panel}-toggle`).setAttribute("aria-expanded", String(isOpen));
}

/** On a narrow screen the panels cover the conversation. */
export function closePanels() {
  if (!NARROW.matches) return;
  toggle("sidebar", false);
  toggle("settings", false);
}

/** onSettings: called after the settings were opened. */
export function startPanels(onSettings) {
  for (const panel of ["sidebar", "settings"]) {
    byId(`${panel}-toggle`).addEventListener("click", () => {
      const isOpen = !document.body.classList.contains(`${panel}-open`);
      toggle(panel, isOpen);
      if (isOpen && panel === "settings") onSettings();
      if (isOpen && NARROW.matches) byId(panel).querySelector("button").focus();
    });
  }
  byId("settings-close").addEventListener("click", () => {
    toggle("settings", false);
    byId("settings-toggle").focus();
  });
  byId("backdrop").addEventListener("click", closePanels);
  toggle("sidebar", !NARROW.matches);
  toggle("settings", false);
}
