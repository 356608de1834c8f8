"use strict";
/* Follows a run: asks for the page again, and shows a new one in place of the old without losing the reader's place or choices. */
report.isDrawn.then(async function follow() {
  const INTERVAL_MS = 2000;

  async function ask() {
    const live = document.getElementById("live");
    const answer = await fetch("/", { headers: { "If-None-Match": live.dataset.version } });
    live.className = "";
    if (answer.status === 304) return;
    if (!answer.ok) throw new Error(await answer.text());
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html"); // which runs no script
    report.hold();
    const place = window.scrollY;
    for (const node of fresh.querySelectorAll("[data-kept]")) {
      const old = document.getElementById(node.id); // what is drawn and chosen
      if (old) node.replaceWith(old);
    }
    const nameOf = (details) => details.id || details.firstElementChild.textContent;
    const open = new Set([...document.querySelectorAll("details[open]")].map(nameOf));
    for (const each of fresh.querySelectorAll("details")) each.open = open.has(nameOf(each));
    for (const part of ["#live", "main", "#data"]) document.querySelector(part).replaceWith(fresh.querySelector(part));
    document.title = fresh.title;
    await report.render();
    window.scrollTo(0, place);
  }

  if (!document.hidden) {
    await ask().catch((error) => {
      const live = document.getElementById("live");
      live.textContent = `not up to date: ${error instanceof TypeError ? "no answer; is gtpo-megatron watch still running?" : error.message}`;
      live.className = "lost";
      live.dataset.version = "";
    });
  }
  setTimeout(follow, INTERVAL_MS);
});
