"use strict";
// Sorting, hovering and the timeline. Everything else is in the page already.
const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const width = tip.offsetWidth;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - width - 10) + "px";
  tip.style.top = event.clientY + 16 + "px";
}
function hideTip() { tip.style.display = "none"; }

for (const dot of document.querySelectorAll("[data-tip]")) {
  dot.addEventListener("mousemove", (event) => showTip(event, dot.dataset.tip));
  dot.addEventListener("mouseleave", hideTip);
}

function value(cell) {
  const text = cell.textContent.trim(), number = parseFloat(text.replace(/,/g, ""));
  return isNaN(number) ? text : number;
}
for (const head of document.querySelectorAll("table.sortable th")) {
  head.tabIndex = 0;
  const sort = () => {
    const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
    const up = head.getAttribute("aria-sort") === "descending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const order = [...body.rows].sort((a, b) => {
      const x = value(a.cells[column]), y = value(b.cells[column]);
      const less = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return up ? less : -less;
    });
    body.append(...order);
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
}

// A timeline: lanes for modules, host and GPU; the wheel zooms, dragging moves, a double click shows all again.
const LANES = ["module", "host", "gpu"], LABELS = { module: "modules", host: "host", gpu: "GPU" }, HEIGHT = 34, LEFT = 62;
const COLOURS = { GEMM: "#c2410c", attention: "#7c3aed", reduction: "#0e7490", elementwise: "#4d7c0f", memory: "#64748b", exchange: "#be185d", other: "#a16207" };
for (const canvas of document.querySelectorAll("canvas.timeline")) {
  const source = JSON.parse(document.getElementById(canvas.dataset.source).textContent), data = source.rows;
  // Where a lane waits if nothing is on it: during the step, on the GPU, or on the host where there is no GPU.
  const idle = (lane) => (lane === "module" || (lane === "host" && data.some((m) => m[0] === "gpu")) ? null : source.step);
  const lanes = LANES.filter((lane) => data.some((m) => m[0] === lane));
  const end = Math.max(source.step[1], ...data.map((m) => m[3] + m[4]));
  let from = 0, until = end, dragged = null;
  const x = (t) => LEFT + ((t - from) / (until - from)) * (canvas.clientWidth - LEFT);
  function draw() {
    const scale = devicePixelRatio || 1, width = canvas.clientWidth, style = getComputedStyle(document.body);
    canvas.width = width * scale;
    canvas.height = (lanes.length * (HEIGHT + 8) + 24) * scale;
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    g.font = "12px system-ui, sans-serif";
    lanes.forEach((lane, row) => {
      const top = row * (HEIGHT + 8);
      g.fillStyle = style.getPropertyValue("--gap");
      const gap = idle(lane);
      if (gap) g.fillRect(Math.max(LEFT, x(gap[0])), top, Math.min(width, x(gap[1])) - Math.max(LEFT, x(gap[0])), HEIGHT);
      for (const m of data) {
        if (m[0] !== lane) continue;
        const a = Math.max(LEFT, x(m[3])), b = x(m[3] + m[4]);
        if (b < LEFT || a > width) continue;
        g.fillStyle = lane === "module" ? `hsl(${(m[6] * 47) % 360} 45% 50%)` : COLOURS[m[5]] || COLOURS.other;
        g.fillRect(a, top, Math.max(b - a - 0.3, 0.6), HEIGHT);
        if (b - a > 46) { g.fillStyle = "#fff"; g.fillText(m[1].slice(0, Math.floor((b - a) / 7)), a + 4, top + 21); }
      }
      g.clearRect(0, top, LEFT, HEIGHT);
      g.fillStyle = style.color;
      g.fillText(LABELS[lane], 2, top + 21);
    });
    g.fillStyle = style.color;
    for (let i = 0; i <= 6; i++) {
      const t = from + ((until - from) * i) / 6;
      g.textAlign = i === 6 ? "right" : "left";
      g.fillText(t.toLocaleString("en", { maximumFractionDigits: until - from < 60 ? 1 : 0 }) + " µs", x(t), lanes.length * (HEIGHT + 8) + 14);
    }
  }
  const time = (event) => from + ((event.offsetX - LEFT) / (canvas.clientWidth - LEFT)) * (until - from);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = time(event), by = event.deltaY > 0 ? 1.25 : 0.8;
    from = Math.max(0, at - (at - from) * by);
    until = Math.min(end, at + (until - at) * by);
    draw();
  }, { passive: false });
  canvas.addEventListener("mousedown", (event) => { dragged = event.offsetX; });
  addEventListener("mouseup", () => { dragged = null; });
  canvas.addEventListener("dblclick", () => { from = 0; until = end; draw(); });
  canvas.addEventListener("mousemove", (event) => {
    if (dragged !== null) {
      const move = ((dragged - event.offsetX) / (canvas.clientWidth - LEFT)) * (until - from), span = until - from;
      dragged = event.offsetX;
      from = Math.min(Math.max(0, from + move), end - span);
      until = from + span;
      draw();
      return;
    }
    const lane = lanes[Math.floor(event.offsetY / (HEIGHT + 8))], t = time(event);
    const hits = data.filter((m) => m[0] === lane && m[3] <= t && t < m[3] + m[4]), hit = hits[hits.length - 1];
    if (hit) showTip(event, `${hit[1]}\n${hit[2]}\n${hit[4].toLocaleString("en")} µs at ${hit[3].toLocaleString("en")} µs`);
    else if (lane && idle(lane) && t >= idle(lane)[0] && t <= idle(lane)[1]) showTip(event, "gap: nothing runs here");
    else hideTip();
  });
  canvas.addEventListener("mouseleave", hideTip);
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
document.documentElement.dataset.ready = "yes";
