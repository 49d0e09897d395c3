// Light or dark: as the system says, unless the user chooses.

import { byId, icon } from "./dom.js";

const KEY = "pegboard:theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const ICONS = { auto: "auto", light: "sun", dark: "moon" };

function apply(theme, control) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  control.replaceChildren(icon(ICONS[theme]));
  const label = `Colours: ${theme === "auto" ? "as the system" : theme}`;
  control.setAttribute("aria-label", label);
  control.title = label;
}

export function startTheme(storage) {
  const control = byId("theme");
  let theme = NEXT[storage.getItem(KEY)] ? storage.getItem(KEY) : "auto";
  apply(theme, control);
  control.addEventListener("click", () => {
    theme = NEXT[theme];
    storage.setItem(KEY, theme);
    apply(theme, control);
  });
}
