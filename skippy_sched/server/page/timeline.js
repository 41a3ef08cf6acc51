// The picture of iterations over time: a row per lane, a column per iteration, and below how
// full each was. Knows the shape of /admin/live; draws on a canvas, keeps what it has seen.
"use strict";

class Timeline {
  static SHOWN = 160; // iterations across; more are too narrow to tell apart
  static AXIS = 46; // CSS pixels for the lane numbers
  static FILL = 44; // for the bars below the lanes

  constructor(canvas, tip, note) {
    this.canvas = canvas;
    this.tip = tip;
    this.note = note;
    this.iterations = [];
    this.requests = new Map();
    this.lanes = 0;
    this.budget = 1;
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  get last() {
    return this.iterations.length ? this.iterations[this.iterations.length - 1].number : -1;
  }

  // A restarted daemon counts from one again.
  clear() {
    this.iterations = [];
    this.requests.clear();
  }

  add(facts) {
    this.lanes = facts.lanes;
    this.budget = facts.budget_tokens;
    for (const [key, who] of Object.entries(facts.requests)) this.requests.set(Number(key), who);
    for (const [number, from, to, index, chunks, tokens] of facts.iterations) {
      this.iterations.push({ number, from, to, decodes: facts.decodes[index], chunks, tokens });
    }
    this.iterations.splice(0, this.iterations.length - Timeline.SHOWN);
    if (this.requests.size > 5000) {
      const keys = new Set(this.iterations.flatMap((it) => [
        ...it.decodes.filter((_, i) => i % 2), ...it.chunks.map((chunk) => chunk[1])]));
      for (const key of this.requests.keys()) if (!keys.has(key)) this.requests.delete(key);
    }
    this.draw();
  }

  // Idle time between two iterations is cut to a gap, so that the last busy spell stays legible.
  layout(width) {
    const spans = this.iterations.map((it) => it.to - it.from);
    const typical = [...spans].sort((a, b) => a - b)[spans.length >> 1] || 1e-6;
    let total = 0;
    const places = this.iterations.map((it, i) => {
      const gap = i ? Math.max(0, it.from - this.iterations[i - 1].to) : 0;
      const at = total + Math.min(gap, typical);
      const cut = gap > typical;
      total = at + Math.max(it.to - it.from, 1e-9);
      return { at, end: total, cut };
    });
    const scale = (width - Timeline.AXIS) / (total || 1);
    return places.map((p) => ({
      x: Timeline.AXIS + p.at * scale, end: Timeline.AXIS + p.end * scale, cut: p.cut }));
  }

  color(key) {
    return `hsl(${(key * 137.508) % 360} 62% 50%)`; // neighbours differ by the golden angle
  }

  draw() {
    const box = this.canvas.parentElement;
    const width = box.clientWidth;
    const row = Math.max(3, Math.min(16, 320 / Math.max(1, this.lanes)));
    const height = row * this.lanes + Timeline.FILL + 22;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const draw = this.canvas.getContext("2d");
    draw.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    // Scaled to the fullest shown: time, not tokens, is what limits most iterations.
    this.most = Math.max(1, ...this.iterations.map((it) => it.tokens));
    draw.font = "10px system-ui, sans-serif";
    draw.textBaseline = "middle";
    draw.fillStyle = of("--soft");
    const every = Math.ceil(12 / row);
    for (let lane = 0; lane < this.lanes; lane += every) {
      draw.fillText(lane ? String(lane) : "lane 0", 0, lane * row + row / 2);
    }
    const bottom = row * this.lanes + 6 + Timeline.FILL;
    draw.fillText("tokens", 0, bottom - Timeline.FILL / 2 - 6);
    draw.fillText(`to ${this.most}`, 0, bottom - Timeline.FILL / 2 + 6);
    this.row = row;
    this.places = this.layout(width);
    this.iterations.forEach((it, i) => this.drawIteration(draw, it, this.places[i], bottom, of));
    draw.fillStyle = of("--line");
    draw.fillRect(Timeline.AXIS, bottom, width - Timeline.AXIS, 1);
    this.drawNote(draw, width, bottom, of);
  }

  drawIteration(draw, it, place, bottom, of) {
    const row = this.row;
    const gap = place.end - place.x > 4 ? 1 : 0;
    const wide = Math.max(0.5, place.end - place.x - gap);
    if (place.cut) {
      draw.fillStyle = of("--line");
      draw.fillRect(place.x - 1, 0, 1, bottom);
    }
    draw.globalAlpha = 0.75;
    const thin = Math.max(1, row * 0.4);
    for (let i = 0; i < it.decodes.length; i += 2) {
      draw.fillStyle = this.color(it.decodes[i + 1]);
      draw.fillRect(place.x, it.decodes[i] * row + (row - thin) / 2, wide, thin);
    }
    draw.globalAlpha = 1;
    let prefill = 0;
    for (const [lane, key, tokens] of it.chunks) {
      prefill += tokens;
      draw.fillStyle = this.color(key);
      draw.fillRect(place.x, lane * row + 0.5, wide, row - 1);
      if (wide > 22 && row > 10) {
        draw.fillStyle = "#fff";
        draw.fillText(String(tokens), place.x + 3, lane * row + row / 2);
      }
    }
    const high = (tokens) => (tokens / this.most) * (Timeline.FILL - 4);
    draw.fillStyle = of("--fill");
    draw.fillRect(place.x, bottom - high(it.tokens), wide, high(it.tokens));
    draw.fillStyle = of("--accent");
    draw.fillRect(place.x, bottom - high(prefill), wide, high(prefill));
  }

  drawNote(draw, width, bottom, of) {
    if (!this.iterations.length) {
      this.note.textContent = "none yet";
      return;
    }
    const first = this.iterations[0], last = this.iterations[this.iterations.length - 1];
    const busy = this.iterations.reduce((sum, it) => sum + it.to - it.from, 0);
    draw.fillStyle = of("--soft");
    draw.fillText(`iteration ${first.number}`, Timeline.AXIS, bottom + 10);
    draw.textAlign = "right";
    draw.fillText(`${last.number}`, width, bottom + 10);
    draw.textAlign = "left";
    const each = (busy / this.iterations.length) * 1e3;
    this.note.textContent =
      `the last ${this.iterations.length}, ${each.toFixed(each < 10 ? 2 : 0)} ms each on average, the ` +
      `fullest ${this.most} of ${this.budget} tokens; point at one to see what it did`;
  }

  point(event) {
    const x = event.offsetX, lane = Math.floor(event.offsetY / this.row);
    const i = this.places.findIndex((place) => x >= place.x && x < place.end);
    if (i < 0) {
      this.tip.hidden = true;
      return;
    }
    const it = this.iterations[i];
    const prefill = it.chunks.reduce((sum, chunk) => sum + chunk[2], 0);
    const lines = [
      `iteration ${it.number}: ${((it.to - it.from) * 1e3).toFixed(2)} ms`,
      `${it.decodes.length / 2} decodes, ${prefill} prompt tokens of ${it.chunks.length} requests`,
      `${it.tokens} of ${this.budget} tokens (${((it.tokens / this.budget) * 100).toFixed(0)} %)`,
    ];
    const chunk = it.chunks.find((each) => each[0] === lane);
    const at = it.decodes.findIndex((each, j) => j % 2 === 0 && each === lane);
    const key = chunk ? chunk[1] : at >= 0 ? it.decodes[at + 1] : null;
    if (key !== null) {
      const [id, tenant] = this.requests.get(key) || ["(ended long ago)", "?"];
      lines.push(`lane ${lane}: ${chunk ? `prefill of ${chunk[2]} tokens` : "decode"}`,
        `${id}, tenant ${tenant}`);
    }
    this.tip.textContent = lines.join("\n");
    this.tip.hidden = false;
    const right = x > this.canvas.clientWidth - 320;
    this.tip.style.left = right ? "" : `${x + 14}px`;
    this.tip.style.right = right ? `${this.canvas.clientWidth - x + 14}px` : "";
    this.tip.style.top = `${event.offsetY + 12}px`;
  }
}
