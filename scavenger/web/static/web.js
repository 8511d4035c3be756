"use strict";
// Copies a panel's SQL, and shows new data when the server says that there is some.
const base = document.documentElement.dataset.base;
const fresh = document.getElementById("fresh"), lost = document.getElementById("lost");

document.addEventListener("click", (event) => {
  if (!event.target.matches("button.copy")) return;
  const text = event.target.nextElementSibling;
  const chosen = () => { getSelection().selectAllChildren(text); event.target.textContent = "Selected: press Ctrl+C"; };
  if (!navigator.clipboard) { chosen(); return; }
  navigator.clipboard.writeText(text.textContent).then(() => { event.target.textContent = "Copied"; }, chosen);
});

// How long the page waits before it asks again, in ms: longer with each refusal in a row.
const SOONEST = 1000, LATEST = 60000;
let wait = SOONEST, timer = null, news = null, seen = null;

function say(why) { lost.textContent = why; lost.hidden = why === ""; }

// What was known before tells nothing then: another server counts its changes from 0.
function later() {
  seen = "";
  clearTimeout(timer);
  timer = setTimeout(() => { if (news === null) follow(); else renew(); }, wait);
  wait = Math.min(2 * wait, LATEST);
}

async function renew() {
  let reply = null;
  try { reply = await fetch(location.href); } catch { /* nobody answers */ }
  if (reply === null || !reply.ok) {
    say(reply === null ? "Not live: the server does not answer"
      : reply.status === 401 ? "Not live: open the address with the token again"
      : `Not live: the server answers ${reply.status}`);
    later();
    return;
  }
  wait = SOONEST;
  say("");
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

function take(data) {
  const known = seen === null || seen === data;
  seen = data;
  if (known) return;
  const main = document.getElementById("main");
  // What somebody reads, selects or has opened does not change under him.
  const busy = main.querySelector("details[open]") || !getSelection().isCollapsed || main.contains(document.activeElement);
  if (busy) { fresh.hidden = false; } else { renew(); }
}

function dropped() {
  if (news.readyState !== EventSource.CLOSED) {  // the browser asks again
    seen = "";
    say("Not live: the server does not answer");
    return;
  }
  // Refused: by a server that does not know the cookie (any more), by a proxy, or because there are too many viewers.
  news = null;
  say("Not live: refused; open the address with the token again");
  later();
}

// A page that nobody sees holds no connection: a browser has six of them for all pages of a host together.
function follow() {
  if (document.visibilityState !== "visible") {
    if (news !== null) news.close();
    news = null;
  } else if (news === null) {
    news = new EventSource(base + "/live");
    news.addEventListener("open", () => { wait = SOONEST; say(""); });
    news.addEventListener("error", dropped);
    for (const name of ["now", "changed"]) news.addEventListener(name, (event) => take(event.data));
  }
}

document.addEventListener("visibilitychange", follow);
follow();
