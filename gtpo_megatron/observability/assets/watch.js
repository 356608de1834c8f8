"use strict";
/* Follows a run: asks for news and draws what has changed, without losing the reader's place or choices. */
(() => {
  const INTERVAL_MS = 2000;
  const main = document.querySelector("main");
  const bar = document.createElement("p");
  bar.id = "live";
  bar.setAttribute("role", "status");
  document.body.prepend(bar);
  let { version } = report.first;

  /** Takes the new text of the page, but keeps what is drawn, chosen and opened. */
  function replaceMain(html) {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    for (const node of fresh.content.querySelectorAll(".plot, .switch, #group")) {
      const old = node.id ? document.getElementById(node.id) : main.querySelector(".switch");
      if (old) node.replaceWith(old);
    }
    const open = new Set([...main.querySelectorAll("details[open] > summary")].map((each) => each.textContent));
    for (const each of fresh.content.querySelectorAll("details")) each.open = open.has(each.firstElementChild.textContent);
    main.replaceChildren(fresh.content);
  }

  /** Whoever has scrolled to the texts reads one; further up the newest telling group is as welcome as the newest curve. */
  function isReadingTexts() {
    const group = document.getElementById("group")?.getBoundingClientRect();
    return Boolean(group?.height) && group.top < window.innerHeight && group.bottom > 0;
  }

  async function ask() {
    const answer = await fetch(`/news?since=${encodeURIComponent(version)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const news = await answer.json();
    bar.textContent = news.status;
    bar.classList.remove("lost");
    if (news.main === undefined) return;
    const place = window.scrollY;
    if (isReadingTexts()) sampledGroups.hold();
    replaceMain(news.main);
    document.title = news.title;
    await report.render(news.data);
    window.scrollTo(0, place);
    version = news.version;
    document.body.dataset.version = version;
  }

  async function follow() {
    if (!document.hidden) {
      await ask().catch((error) => {
        const why = error instanceof TypeError ? "no answer; is gtpo-megatron watch still running?" : error.message;
        bar.textContent = `not up to date: ${why}`;
        bar.classList.add("lost");
      });
    }
    setTimeout(follow, INTERVAL_MS);
  }
  report.isDrawn.then(follow);
})();
