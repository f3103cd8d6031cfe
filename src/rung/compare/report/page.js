"use strict";
// Sorting, hiding, tooltips and saving. Without scripts the page still shows everything.
(() => {
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const one = (what) => document.querySelector(what);
  document.documentElement.classList.add("js");

  // The charts follow the order of the table.
  const body = one("#strategies tbody");
  const heads = all("#strategies thead th");
  const order = (rows) => {
    const place = new Map(rows.map((row, index) => [row.dataset.row, index]));
    for (const strips of all(".strips")) {
      const sorted = [...strips.children].sort((a, b) => place.get(a.dataset.row) - place.get(b.dataset.row));
      strips.append(...sorted);
    }
  };
  const sortBy = (column) => {
    const head = heads[column];
    const first = head.dataset.first;
    const other = first === "ascending" ? "descending" : "ascending";
    const direction = head.getAttribute("aria-sort") === first ? other : first;
    const sign = direction === "ascending" ? 1 : -1;
    const key = (row) => {
      const value = row.cells[column]?.dataset.sort;
      return column && value !== undefined ? Number(value) : value;
    };
    const rows = [...body.rows].sort((a, b) => {
      if (a.classList.contains("failed") !== b.classList.contains("failed")) {
        return a.classList.contains("failed") ? 1 : -1; // failed rows stay at the bottom
      }
      const [x, y] = [key(a), key(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return sign * (column ? x - y : x.localeCompare(y));
    });
    body.append(...rows);
    for (const other of heads) other.setAttribute("aria-sort", other === head ? direction : "none");
    order(rows);
    one("#sorted").textContent = `Sorted by ${head.textContent}, ${direction}.`;
  };
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => sortBy(column)));

  // Show only the checked strategies; the largest one shown takes the whole width.
  const rescale = () => {
    for (const strips of all(".strips")) {
      const shown = all(".strip:not([hidden]) > [data-size]", strips);
      const largest = Math.max(...shown.map((picture) => Number(picture.dataset.size))) || 1;
      for (const picture of shown) picture.style.setProperty("--share", Number(picture.dataset.size) / largest);
    }
  };
  for (const box of all("#choice input")) {
    const show = () => {
      for (const part of all(`main [data-row="${box.value}"]:not(tr)`)) part.toggleAttribute("hidden", !box.checked);
      rescale();
    };
    box.addEventListener("change", show);
    if (!box.checked) show(); // browsers restore earlier choices on reload
  }

  const scale = one("#scale");
  scale?.addEventListener("click", () => {
    const each = one("#timeline").classList.toggle("each");
    scale.setAttribute("aria-pressed", String(each));
  });

  // Dim the other curves while the pointer is on one.
  const curves = all(".curve");
  for (const curve of curves) {
    const isOther = (other) => other.dataset.row !== curve.dataset.row;
    curve.addEventListener("pointerenter", () => curves.forEach((c) => c.classList.toggle("dimmed", isOther(c))));
    curve.addEventListener("pointerleave", () => curves.forEach((c) => c.classList.remove("dimmed")));
  }

  // Tooltips without the delay of the browser's own.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  for (const title of all("svg .mark > title")) {
    title.parentElement.dataset.tip = title.textContent;
    title.remove();
  }
  document.addEventListener("pointermove", (event) => {
    const words = event.target.closest?.("[data-tip]")?.dataset.tip;
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
  });

  // Save and copy the data.
  const content = {
    json: () => JSON.stringify(JSON.parse(one("#data").textContent), null, 1),
    md: () => one("#markdown").textContent,
  };
  const say = (words) => { one("#done").textContent = words; };
  const copy = async (words) => {
    try {
      await navigator.clipboard.writeText(words);
    } catch {
      const area = document.createElement("textarea");
      area.value = words;
      document.body.append(area);
      area.select();
      const copied = document.execCommand("copy");
      area.remove();
      if (!copied) return say("The browser does not let a page copy; save it.");
    }
    say("Copied.");
  };
  const save = (words, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([words]));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    say(`Saved as ${name}.`);
  };
  for (const button of all("[data-do]")) {
    const { do: action, what } = button.dataset;
    button.addEventListener("click", () => {
      const words = content[what]();
      action === "copy" ? copy(words) : save(words, `report.${what}`);
    });
  }
})();
