// Questions to the user.

import { byId } from "./dom.js";

/** Show a dialog and return a promise of what the user typed: "" without a field, null if the
 * dialog was cancelled. */
function ask(dialog, value = "") {
  const field = dialog.querySelector("input");
  if (field) field.value = value;
  return new Promise((resolve) => {
    let answer = null;
    const accept = () => {
      if (field && !field.value.trim()) return;
      answer = field ? field.value.trim() : "";
      dialog.close();
    };
    dialog.querySelector("[data-accept]").onclick = accept;
    dialog.querySelector("[data-cancel]").onclick = () => dialog.close();
    dialog.onkeydown = (event) => {
      if (event.key === "Enter" && event.target === field) {
        event.preventDefault(); // else it also presses the button that gets the focus back
        accept();
      }
      event.stopPropagation();
    };
    dialog.onclose = () => {
      if (field) field.value = "";
      resolve(answer);
    };
    dialog.showModal();
    field?.select();
  });
}

export const askTitle = (title) => ask(byId("rename-dialog"), title);

export async function confirmRemoval(title) {
  byId("remove-title").textContent = title;
  return (await ask(byId("remove-dialog"))) !== null;
}

/** wasWrong: the key that was sent is not one of the server's. */
export function askKey(wasWrong) {
  byId("key-wrong").hidden = !wasWrong;
  return ask(byId("key-dialog"));
}

export function showHelp() {
  const dialog = byId("help-dialog");
  dialog.querySelector("[data-cancel]").onclick = () => dialog.close();
  if (!dialog.open) dialog.showModal();
}

export const isDialogOpen = () => document.querySelector("dialog[open]") !== null;
