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
  const main = page.getElementById("main");
  for (const one of document.querySelectorAll("#main input[type=radio]:checked")) {
    const same = main.querySelector(`input[name="${one.name}"][value="${one.value}"]`);
    if (same !== null) same.checked = true;
  }
  document.getElementById("main").replaceWith(document.adoptNode(main));
  fresh.hidden = true;
}

fresh.addEventListener("click", renew);
let news = null, seen = null;

function take(data) {
  const known = seen === null || seen === data;
  seen = data;
  if (known) return;
  const main = document.getElementById("main");
  // What somebody reads, selects or has opened does not change under him.
  const busy = main.querySelector("details[open]") || !getSelection().isCollapsed || main.contains(document.activeElement);
  if (busy) { fresh.hidden = false; } else { renew(); }
}

// A page that nobody sees holds no connection: a browser has six of them for all pages of a host together.
function follow() {
  if (document.visibilityState !== "visible") {
    if (news !== null) news.close();
    news = null;
  } else if (news === null) {
    news = new EventSource(base + "/live");
    for (const name of ["now", "changed"]) news.addEventListener(name, (event) => take(event.data));
  }
}

document.addEventListener("visibilitychange", follow);
follow();
