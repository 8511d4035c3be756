"use strict";
// Copies a panel's SQL, and shows new data when the server says that there is some.
const base = document.documentElement.dataset.base;
const fresh = document.getElementById("fresh");

document.addEventListener("click", (event) => {
  if (!event.target.matches("button.copy")) return;
  const text = event.target.nextElementSibling;
  const chosen = () => { getSelection().selectAllChildren(text); event.target.textContent = "Selected: press Ctrl+C"; };
  if (!navigator.clipboard) { chosen(); return; }
  navigator.clipboard.writeText(text.textContent).then(() => { event.target.textContent = "Copied"; }, chosen);
});

async function renew() {
  const reply = await fetch(location.href);
  if (!reply.ok) return;
  const page = new DOMParser().parseFromString(await reply.text(), "text/html");
  document.getElementById("main").replaceWith(document.adoptNode(page.getElementById("main")));
  fresh.hidden = true;
}

fresh.addEventListener("click", renew);
new EventSource(base + "/live").addEventListener("changed", () => {
  const main = document.getElementById("main");
  // What somebody reads, selects or has opened does not change under him.
  const busy = main.querySelector("details[open]") || !getSelection().isCollapsed || main.contains(document.activeElement);
  if (busy) { fresh.hidden = false; } else { renew(); }
});
