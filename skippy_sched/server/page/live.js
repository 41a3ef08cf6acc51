// Asks the daemon each second what goes on and shows it. No state but what it was told; all text
// from clients goes through textContent.
"use strict";

const EVERY_MS = 1000;
const HISTORY_MAX = 300;

const by = (id) => document.getElementById(id);
const timeline = new Timeline(by("timeline"), by("tip"), by("iterations-note"));
const moments = [];
let key = sessionStorage.getItem("skippy-key") || "";
let timer = 0;

// --- asking -------------------------------------------------------------------------------------

async function poll() {
  clearTimeout(timer);
  const since = moments.length ? moments[moments.length - 1].at : -1;
  try {
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    const response = await fetch(`/admin/live?after=${timeline.last}&since=${since}`, { headers });
    const body = await response.json();
    if (response.status === 401 || response.status === 403) {
      askForKey(body.error.message);
      return;
    }
    if (!response.ok) throw new Error(body.error.message);
    by("key-form").hidden = true;
    take(body);
  } catch (error) {
    const lost = error instanceof TypeError;
    say(lost ? "the daemon cannot be reached; trying again" : error.message, true);
  }
  timer = setTimeout(poll, EVERY_MS);
}

function askForKey(message) {
  by("key-form").hidden = false;
  by("key-error").textContent = key ? message : "";
  say("a key is needed", true);
  by("key").focus();
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("key").value;
  sessionStorage.setItem("skippy-key", key);
  poll();
});

let beganAt = null;

function take(facts) {
  const isOther = beganAt !== null && facts.began_at !== beganAt;
  beganAt = facts.began_at;
  if (isOther) { // another run of the daemon: it counts from one again, and told us too little
    timeline.clear();
    moments.length = 0;
    return;
  }
  by("model").textContent = facts.model;
  say(facts.state, facts.state !== "ready");
  moments.push(...facts.history);
  moments.splice(0, moments.length - HISTORY_MAX);
  timeline.add(facts);
  showNumbers(facts);
  showLanes(facts);
  showQueue(facts);
  showCharts();
}

function say(text, bad) {
  by("state").textContent = text;
  by("state").classList.toggle("bad", bad);
}

// --- numbers ------------------------------------------------------------------------------------

function shown(value, digits = 0, unit = "") {
  if (value === null || value === undefined) return "–";
  const text = value.toLocaleString("en", {
    minimumFractionDigits: digits, maximumFractionDigits: digits });
  return text + unit;
}

function showNumbers(facts) {
  const rates = facts.rates || {}, { ttft_ms: ttft, itl_ms: itl } = facts.latency;
  const kv = facts.kv.tokens_max ? (facts.kv.tokens / facts.kv.tokens_max) * 100 : 0;
  const cached = rates.cached_share === null ? null : rates.cached_share * 100;
  const full = (rates.tokens_per_iteration / facts.budget_tokens) * 100;
  const times = (of) => `p95 ${shown(of.p95)}, p99 ${shown(of.p99)}`;
  const numbers = [
    [`${facts.running.length} / ${facts.lanes}`, "lanes in use"],
    [shown(facts.queue.requests), `waiting, ${shown(facts.queue.tokens)} tokens`],
    [shown(rates.generated_tokens_per_s), "tokens/s generated"],
    [shown(rates.prefill_tokens_per_s), "tokens/s prefilled"],
    [shown(rates.requests_per_s, 1), "requests/s ended"],
    [shown(ttft.p50, 0, " ms"), `TTFT p50, ${times(ttft)}`],
    [shown(itl.p50, 0, " ms"), `ITL p50, ${times(itl)}`],
    [shown(rates.decodes_per_iteration, 1), `decodes an iteration, ${shown(rates.iterations_per_s)} it/s`],
    [shown(rates.tokens_per_iteration, 0), `tokens an iteration, ${shown(full)} % of ${facts.budget_tokens}`],
    [shown(kv, 0, " %"), `KV cache, ${shown(facts.kv.prefixes)} prefixes`],
    [shown(cached, 0, cached === null ? "" : " %"), "of prompts from the cache"],
    [shown(facts.counted.finished), `finished, ${shown(facts.counted.failed)} failed`],
  ];
  by("numbers").replaceChildren(...numbers.map(([value, text]) => {
    const card = element("div", "", "number");
    card.append(element("b", value), element("span", text));
    return card;
  }));
}

// --- tables -------------------------------------------------------------------------------------

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

function rows(id, list, empty) {
  const columns = by(id).querySelectorAll("th").length;
  const made = list.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => cell instanceof Node ? cell : element("td", ...[].concat(cell))));
    return row;
  });
  if (!made.length) {
    const row = document.createElement("tr"), cell = element("td", empty, "dim");
    cell.colSpan = columns;
    row.append(cell);
    made.push(row);
  }
  by(id).tBodies[0].replaceChildren(...made);
}

function progress(done, of, text) {
  const cell = document.createElement("td"), bar = document.createElement("progress");
  bar.className = "bar";
  bar.max = Math.max(1, of);
  bar.value = done;
  cell.append(bar, text);
  return cell;
}

function showLanes(facts) {
  rows("lanes", facts.running.map((r) => {
    const prompt = Math.min(r.computed_tokens, r.prompt_tokens);
    return [
      [String(r.lane), "n"], [r.id, "id"], [r.tenant], [shown(r.cached_tokens), "n"],
      [r.state + (r.state === "paused" ? `: waits for ${r.waits_for}` : "")],
      progress(prompt, r.prompt_tokens, `${prompt} / ${r.prompt_tokens}`),
      progress(r.completion_tokens, r.completion_tokens_max,
        `${r.completion_tokens} / ${r.completion_tokens_max}`),
      [shown(r.age_s, 1, " s"), "n"],
    ];
  }), "all lanes are free");
}

function showQueue(facts) {
  const more = facts.queue.requests - facts.queue.first.length;
  by("queue-note").textContent = more > 0 ? `and ${shown(more)} more` : "";
  rows("queue", facts.queue.first.map((r) => [
    [String(r.position), "n"], [r.id, "id"], [r.tenant], [shown(r.prompt_tokens), "n"],
    [shown(r.age_s, 1, " s"), "n"], [r.waits_for],
  ]), "nobody waits");
  rows("tenants", facts.tenants.map((t) => [
    [t.tenant], [shown(t.running), "n"], [shown(t.waiting), "n"], [shown(t.tokens_per_s, 1), "n"],
  ]), "nobody is served");
}

// --- charts -------------------------------------------------------------------------------------

const CHARTS = [
  ["chart-tokens", [["generated", (s) => s.generated_tokens_per_s], ["prefill", (s) => s.prefill_tokens_per_s]]],
  ["chart-requests", [["running", (s) => s.running], ["waiting", (s) => s.waiting]]],
  ["chart-itl", [["p50", (s) => s.itl_ms.p50], ["p99", (s) => s.itl_ms.p99]]],
  ["chart-ttft", [["p50", (s) => s.ttft_ms.p50], ["p99", (s) => s.ttft_ms.p99]]],
];
const plots = new Map();

function showCharts() {
  const now = moments.length ? moments[moments.length - 1].at : 0;
  for (const [id, series] of CHARTS) {
    const data = [moments.map((s) => s.at - now), ...series.map(([, of]) => moments.map(of))];
    if (!plots.has(id)) plots.set(id, chart(id, series.map(([name]) => name)));
    plots.get(id).setData(data);
  }
}

function chart(id, names) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: of("--soft"), grid: { stroke: of("--line"), width: 1 }, ticks: { show: false } };
  const colors = [of("--accent"), of("--fill")];
  const box = by(id);
  const plot = new uPlot({
    width: box.clientWidth, height: 150,
    scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.1 || 1)] } },
    axes: [{ ...axis, size: 28, values: (_, at) => at.map((s) => `${Math.round(s)} s`) }, { ...axis, size: 48 }],
    series: [
      { label: "at", value: (_, s) => s === null ? "–" : `${Math.round(s)} s` },
      ...names.map((label, i) => ({
        label, stroke: colors[i], width: 1.5, spanGaps: true, points: { show: false },
        value: (_, v) => shown(v) })),
    ],
  }, [[], ...names.map(() => [])], box);
  new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: 150 })).observe(box);
  return plot;
}

poll();
