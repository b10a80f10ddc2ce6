"use strict";
(async () => {
  const PER_PAGE = 50;
  const form = document.getElementById("filter");
  const list = document.getElementById("items");
  const shown = document.getElementById("shown");
  const pager = document.getElementById("pager");
  const [index, ...packed] = document.querySelectorAll("template.packed");
  const unpacked = new Map(); // chunk number -> promise of its items' HTML

  async function unpack(template) {
    const bytes = Uint8Array.from(atob(template.content.textContent.trim()), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  function chunk(place) {
    if (!unpacked.has(place)) unpacked.set(place, unpack(packed[place]));
    return unpacked.get(place);
  }

  function element(name, className, text) {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  const side = (verdict, answer, right, verdicts) => ({ verdict, answer, right, verdicts });
  const items = (await unpack(index)).map((row, number) => {
    const [id, level, subject, gold, direction] = row;
    const before = side(...row.slice(5, 9)), after = side(...row.slice(9, 13));
    return { id, level, subject, gold, direction, before, after, chunk: row[13], place: row[14], number };
  });
  const numSamples = Number(list.dataset.samples);

  function answerOf(side) {
    const part = element("span");
    part.append(side.answer === null ? element("i", "", side.verdict.replaceAll("_", " ")) : element("code", "", side.answer));
    if (numSamples > 1) part.append(element("span", "soft", ` ${side.right} of ${numSamples} right`));
    return part;
  }

  async function open(details, item) {
    if (!details.open || details.querySelector(".inside")) return;
    const body = element("div", "inside");
    details.append(body);
    body.innerHTML = (await chunk(item.chunk))[item.place]; // escaped and sanitised when the page was written
    const texts = () => body.querySelectorAll(".two .text").forEach((text) => (text.scrollTop = text.scrollHeight));
    body.querySelectorAll("details").forEach((sample) => sample.addEventListener("toggle", texts));
    texts();
  }

  function entry(item) {
    const details = element("details", "item");
    Object.assign(details.dataset, { direction: item.direction, level: item.level, subject: item.subject, id: item.id });
    const summary = element("summary");
    const label = { right: "both right", wrong: "neither right", mixed: "unchanged", failed: "left out" };
    summary.append(
      element("span", `badge ${item.direction}`, label[item.direction] ?? item.direction), ` ${item.id}: gold `,
      element("code", "", item.gold), ", before ", answerOf(item.before), ", after ", answerOf(item.after),
      element("span", "soft", ` ${item.level && "level " + item.level} ${item.subject}`),
    );
    details.append(summary);
    details.addEventListener("toggle", () => open(details, item));
    return details;
  }

  const ENTITIES = { "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#34;": '"', "&#39;": "'", "&#x27;": "'", "&amp;": "&" };
  const texts = new Map(); // item number -> searchable text
  async function textOf(item) {
    if (!texts.has(item.number)) {
      const body = (await chunk(item.chunk))[item.place].replace(/<[^>]*>/g, "");
      const plain = body.replace(/&(?:lt|gt|quot|amp|#34|#39|#x27);/g, (entity) => ENTITIES[entity]);
      texts.set(item.number, `${item.id} ${item.level} ${item.subject} ${plain}`.toLowerCase());
    }
    return texts.get(item.number);
  }

  let found = [], page = 0, asked = 0;

  function show() {
    const first = page * PER_PAGE;
    list.replaceChildren(...found.slice(first, first + PER_PAGE).map(entry));
    const last = Math.min(found.length, first + PER_PAGE);
    shown.textContent = `${found.length} of ${items.length} items` + (found.length > PER_PAGE ? `, ${first + 1} to ${last}` : "");
    pager.hidden = found.length <= PER_PAGE;
    pager.querySelector("[name=previous]").disabled = page === 0;
    pager.querySelector("[name=next]").disabled = last === found.length;
  }

  async function apply() {
    const turn = ++asked;
    const words = form.elements.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { direction, verdict, level, subject } = form.elements;
    const is = (select, value) => !select || select.value === "" || select.value === value;
    const chosen = [];
    for (const item of items) {
      const changed = item.direction === "gained" || item.direction === "lost";
      if (direction.value === "changed" ? !changed : !is(direction, item.direction)) continue;
      if (verdict.value && ![item.before, item.after].some((side) => side.verdicts.includes(verdict.value))) continue;
      if (!is(level, item.level) || !is(subject, item.subject)) continue;
      if (words.length) {
        const text = await textOf(item);
        if (turn !== asked) return; // superseded by a newer search
        if (!words.every((word) => text.includes(word))) continue;
      }
      chosen.push(item);
    }
    [found, page] = [chosen, 0];
    show();
  }

  const source = document.getElementById("source");
  const showSource = () => list.classList.toggle("source", source.checked);

  form.addEventListener("input", (event) => (event.target === source ? showSource() : apply()));
  form.addEventListener("reset", () => setTimeout(() => (showSource(), apply())));
  form.addEventListener("submit", (event) => event.preventDefault());
  pager.addEventListener("click", (event) => {
    page += { next: 1, previous: -1 }[event.target.name] ?? 0;
    show();
    list.scrollIntoView();
  });
  form.hidden = false;
  if (!items.some((item) => item.direction === "gained" || item.direction === "lost")) form.elements.direction.value = "";
  await apply();
  document.documentElement.dataset.items = "ready";
})().catch((error) => {
  document.getElementById("items").append(`${error}`);
});
