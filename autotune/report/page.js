"use strict";
(() => {
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const tip = document.getElementById("tip"), said = document.getElementById("said");
  const numbers = new Map();

  /** The numbers of a chart: {t: title, x: rollouts, a, b: span, s: [{n: name, y: values, l, h: band, k: seeds, p: percent, o: sparse, u: unit}]}. */
  function dataOf(key) {
    if (!numbers.has(key)) numbers.set(key, JSON.parse(document.getElementById(key + "-d").textContent));
    return numbers.get(key);
  }

  function write(value, percent) {
    if (value === null || value === undefined) return "–";
    const v = percent ? 100 * value : value, size = Math.abs(v);
    const short = size >= 1e6 ? v.toExponential(3) : String(Number(v.toPrecision(4)));
    return percent ? short + " %" : short;
  }

  function reading(series, i) {
    let text = write(series.y[i], series.p);
    if (series.l && series.l[i] !== null) text += ` (${write(series.l[i], series.p)} to ${write(series.h[i], series.p)})`;
    if (series.k) text += `, ${series.k[i]} seed${series.k[i] === 1 ? "" : "s"}`;
    return text;
  }

  function nearest(x, value) {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= value) low = middle; else high = middle;
    }
    return Math.abs(x[low] - value) <= Math.abs(x[high] - value) ? low : high;
  }

  // -- crosshair and readings: one position for all charts of a run

  function crosses(panel, rollout) {
    const part = panel.closest("[data-sync]") || panel.parentElement;
    for (const other of all(".panel[id]", part)) {
      const data = document.getElementById(other.id + "-d"), cross = other.querySelector(".cross");
      if (!data || !cross) continue;
      cross.hidden = rollout === null;
      if (rollout === null) continue;
      const d = dataOf(other.id);
      cross.style.left = 100 * (rollout - d.a) / (d.b - d.a) + "%";
    }
  }

  function showReading(cursor, i) {
    const panel = document.getElementById(cursor.dataset.for), d = dataOf(panel.id), x = d.x[i];
    crosses(panel, x);
    const box = document.createElement("div");
    box.append(Object.assign(document.createElement("b"), {textContent: `rollout ${x}`}));
    const table = box.appendChild(document.createElement("table"));
    for (const series of d.s) {
      if (series.o && series.y[i] === null) continue; // sparse points
      const row = table.insertRow(), name = row.insertCell();
      name.append(Object.assign(document.createElement("i"), {className: series.c}), series.n);
      row.insertCell().textContent = reading(series, i);
    }
    cursor.setAttribute("aria-valuenow", x);
    cursor.setAttribute("aria-valuetext", `rollout ${x}: ` + d.s.map(s => `${s.n} ${reading(s, i)}`).join(", "));
    const frame = cursor.getBoundingClientRect();
    place(box, frame.left + frame.width * (x - d.a) / (d.b - d.a), frame.top + 8);
  }

  function place(content, x, y) {
    tip.replaceChildren(content);
    tip.hidden = false;
    const width = tip.offsetWidth, height = tip.offsetHeight;
    const left = x + 14 + width > innerWidth - 8 ? Math.max(8, x - 14 - width) : x + 14;
    tip.style.left = left + "px";
    tip.style.top = Math.max(8, Math.min(y, innerHeight - height - 8)) + "px";
  }

  function hide(panel) {
    tip.hidden = true;
    if (panel) crosses(panel, null);
    all(".shown").forEach(e => e.classList.remove("shown"));
  }

  for (const cursor of all(".cursor")) {
    const panel = cursor.closest(".panel");
    const at = event => {
      const d = dataOf(panel.id), frame = cursor.getBoundingClientRect();
      return nearest(d.x, d.a + (event.clientX - frame.left) / frame.width * (d.b - d.a));
    };
    let now = null;
    cursor.addEventListener("pointermove", event => showReading(cursor, now = at(event)));
    cursor.addEventListener("pointerleave", () => { if (document.activeElement !== cursor) hide(panel); });
    cursor.addEventListener("focus", () => { if (cursor.matches(":focus-visible")) showReading(cursor, now ??= dataOf(panel.id).x.length - 1); });
    cursor.addEventListener("blur", () => hide(panel));
    cursor.addEventListener("keydown", event => {
      const last = dataOf(panel.id).x.length - 1, from = now ?? last;
      const to = {ArrowLeft: from - 1, ArrowDown: from - 1, ArrowRight: from + 1, ArrowUp: from + 1,
                  PageDown: from - 10, PageUp: from + 10, Home: 0, End: last}[event.key];
      if (event.key === "Escape") return hide(panel);
      if (to === undefined) return;
      event.preventDefault();
      showReading(cursor, now = Math.max(0, Math.min(last, to)));
    });
  }

  // -- decisions: a mark shows its row of the table

  function showMark(mark) {
    const row = document.getElementById(mark.hash.slice(1));
    if (!row) return;
    hide();
    mark.classList.add("shown");
    row.classList.add("shown");
    const box = document.createElement("div"), cells = [...row.cells];
    const head = box.appendChild(document.createElement("p"));
    head.append(`rollout ${cells[0].textContent} · `, Object.assign(document.createElement("b"), {textContent: cells[1].textContent.trim()}), " ");
    head.append(...[...cells[2].childNodes].flatMap(n => [n.cloneNode(true), " "]));
    for (const cell of cells.slice(3)) {
      if (!cell.textContent.trim()) continue;
      const p = document.createElement("p");
      p.append(...[...cell.childNodes].map(n => n.cloneNode(true)));
      box.append(p);
    }
    const frame = mark.getBoundingClientRect();
    place(box, frame.left + frame.width / 2, frame.bottom + 6);
  }

  for (const group of all(".marks")) {
    const marks = all(".mark", group);
    marks.forEach((mark, i) => {
      mark.tabIndex = i ? -1 : 0;
      mark.addEventListener("pointerenter", () => showMark(mark));
      mark.addEventListener("pointerleave", () => hide());
      mark.addEventListener("focus", () => showMark(mark));
      mark.addEventListener("blur", () => hide());
      mark.addEventListener("keydown", event => {
        const to = {ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: marks.length - 1}[event.key];
        if (event.key === "Escape") return hide();
        if (to === undefined) return;
        event.preventDefault();
        const next = marks[Math.max(0, Math.min(marks.length - 1, to))];
        marks.forEach(m => { m.tabIndex = m === next ? 0 : -1; });
        next.focus();
      });
      mark.addEventListener("click", () => reveal(mark.hash));
    });
  }

  /** Opens what hides a target of this page, and moves the focus there. */
  function reveal(hash) {
    const target = hash && document.getElementById(hash.slice(1));
    if (!target) return;
    for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
    if (target.classList.contains("again")) {
      const box = target.closest(".scroll").previousElementSibling?.querySelector("input.again");
      if (box && !box.checked) box.click();
    }
    hide();
    setTimeout(() => { target.scrollIntoView({block: "center"}); target.focus({preventScroll: true}); });
  }
  addEventListener("hashchange", () => reveal(location.hash));
  if (location.hash) reveal(location.hash);

  for (const box of all("input.again"))
    box.addEventListener("change", () => box.closest("label").nextElementSibling.classList.toggle("all", box.checked));

  // -- every chart as a table of the numbers that are drawn

  for (const button of all(".totable")) {
    button.addEventListener("click", () => {
      const panel = document.getElementById(button.getAttribute("aria-controls")), old = panel.querySelector(".numbers");
      button.setAttribute("aria-expanded", String(!old));
      if (old) return old.remove();
      const d = dataOf(panel.id), box = document.createElement("div"), table = document.createElement("table");
      Object.assign(box, {className: "numbers scroll", tabIndex: 0});
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", d.t + ", as a table");
      table.createCaption().textContent = `${d.t}: ${d.x.length} rollouts`;
      const head = table.createTHead().insertRow();
      for (const name of ["rollout", ...d.s.map(s => s.n)])
        head.append(Object.assign(document.createElement("th"), {textContent: name, scope: "col"}));
      const body = table.createTBody();
      d.x.forEach((x, i) => {
        const row = body.insertRow();
        row.append(Object.assign(document.createElement("th"), {textContent: x, scope: "row"}));
        for (const s of d.s) row.insertCell().textContent = reading(s, i);
      });
      box.append(table);
      panel.append(box);
      said.textContent = `${d.t}: table with ${d.x.length} rows`;
    });
  }

  // -- sorting

  for (const table of all("table.sortable")) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending", body = table.tBodies[0];
      const key = row => row.cells[column].dataset.v ?? "";
      const order = (a, b) => {
        if (key(a) === "" || key(b) === "") return (key(a) === "") - (key(b) === "");
        const [x, y] = [Number(key(a)), Number(key(b))];
        const by = Number.isNaN(x) || Number.isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
        return down ? -by : by;
      };
      heads.forEach(h => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...[...body.rows].sort(order));
    }));
  }
})();
