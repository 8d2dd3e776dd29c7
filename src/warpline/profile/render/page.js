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
const colour = (kind) => getComputedStyle(document.documentElement).getPropertyValue("--" + kind) || getComputedStyle(document.documentElement).getPropertyValue("--other");
const searches = {};  // of a phase: what is searched for, and what draws again then
function matches(phase, text) { const wanted = (searches[phase] || {}).wanted; return !wanted || text.toLowerCase().includes(wanted); }
function onSearch(phase, draw) { (searches[phase] ||= { wanted: "", draws: [] }).draws.push(draw); }

// Boxes within boxes: a click shows one alone, and its parents to come back to.
for (const frame of document.querySelectorAll(".flame")) {
  const root = JSON.parse(document.getElementById(frame.dataset.source).textContent), phase = frame.dataset.source.slice(6);
  let shown = [root];  // from the whole to the box that is as wide as the frame
  const depth = (box) => 1 + Math.max(0, ...box[3].map(depth));
  function put(box, level, left, width, path) {
    if (width * frame.clientWidth < 0.5) return;
    const one = document.createElement("div"), name = box[0], label = path.map((b) => b[0]).join(" / ");
    let hue = 0;
    for (const letter of name.replace(/^h\.\d+$/, "h")) hue = (hue * 31 + letter.charCodeAt(0)) % 360;
    one.textContent = name;
    one.style.cssText = `left:${100 * left}%;width:${100 * width}%;top:${level * 20}px;background:hsl(${hue} 40% 38%)`;
    if (!matches(phase, label)) one.classList.add("dim");
    one.addEventListener("mousemove", (event) => showTip(event, `${label}\n${box[1].toLocaleString("en")} µs, ${(100 * box[1] / root[1]).toFixed(1)} %` + (box[2] ? `, ${box[2].toLocaleString("en")} µs of it waiting` : "")));
    one.addEventListener("mouseleave", hideTip);
    one.addEventListener("click", () => { shown = path; draw(); });
    frame.append(one);
  }
  function below(box, level, left, width, path) {
    let at = left;
    for (const part of box[3]) {
      const its = width * part[1] / box[1];
      put(part, level, at, its, [...path, part]);
      below(part, level + 1, at, its, [...path, part]);
      at += its;
    }
  }
  function draw() {
    frame.replaceChildren();
    shown.forEach((box, level) => put(box, level, 0, 1, shown.slice(0, level + 1)));
    const last = shown[shown.length - 1];
    below(last, shown.length, 0, 1, shown);
    frame.style.height = 20 * (shown.length - 1 + depth(last)) + "px";
  }
  function found() {  // boxes that match, without those inside of one that does
    let sum = 0;
    (function look(box, path) {
      if (box !== root && matches(phase, path)) sum += box[1];
      else for (const part of box[3]) look(part, path + " / " + part[0]);
    })(root, root[0]);
    document.getElementById("found-" + phase).textContent = searches[phase].wanted ? `${sum.toLocaleString("en", { maximumFractionDigits: 1 })} µs, ${(100 * sum / root[1]).toFixed(1)} % of the step` : "";
  }
  onSearch(phase, () => { draw(); found(); });
  addEventListener("resize", draw);
  draw();
}
for (const field of document.querySelectorAll("input.search")) {
  field.addEventListener("input", () => {
    const its = searches[field.dataset.for];
    if (!its) return;
    its.wanted = field.value.trim().toLowerCase();
    for (const draw of its.draws) draw();
  });
}
for (const canvas of document.querySelectorAll("canvas.timeline")) {
  const source = JSON.parse(document.getElementById(canvas.dataset.source).textContent), data = source.rows, phase = canvas.dataset.source.slice(9);
  // Where a lane waits if nothing is on it: during the step, on the GPU, or on the host where there is no GPU.
  const idle = (lane) => (lane === "module" || (lane === "host" && data.some((m) => m[0] === "gpu")) ? null : source.step);
  const lanes = LANES.filter((lane) => data.some((m) => m[0] === lane));
  const end = Math.max(source.step[1], ...data.map((m) => m[3] + m[4]));
  let from = 0, until = end, dragged = null;
  const colours = {};
  function hatched(g) {
    const tile = document.createElement("canvas"), pen = tile.getContext("2d");
    tile.width = tile.height = 6;
    pen.strokeStyle = "#8889";
    pen.moveTo(0, 6); pen.lineTo(6, 0); pen.stroke();
    return g.createPattern(tile, "repeat");
  }
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
      g.fillStyle = hatched(g);
      const gap = idle(lane);
      if (gap) g.fillRect(Math.max(LEFT, x(gap[0])), top, Math.min(width, x(gap[1])) - Math.max(LEFT, x(gap[0])), HEIGHT);
      for (const m of data) {
        if (m[0] !== lane) continue;
        const a = Math.max(LEFT, x(m[3])), b = x(m[3] + m[4]);
        if (b < LEFT || a > width) continue;
        g.fillStyle = lane === "module" ? `hsl(${(m[6] * 47) % 360} 45% 50%)` : colours[m[5]] ||= colour(m[5]);
        g.globalAlpha = matches(phase, m[1] + " " + m[2]) ? 1 : 0.2;
        g.fillRect(a, top, Math.max(b - a - 0.3, 0.6), HEIGHT);
        if (b - a > 46) { g.fillStyle = "#fff"; g.fillText(m[1].slice(0, Math.floor((b - a) / 7)), a + 4, top + 21); }
        g.globalAlpha = 1;
      }
      g.clearRect(0, top, LEFT, HEIGHT);
      g.fillStyle = style.color;
      g.fillText(LABELS[lane], 2, top + 21);
    });
    g.fillStyle = style.color;
    const ticks = Math.max(1, Math.floor((width - LEFT) / 170));
    for (let i = 0; i <= ticks; i++) {
      const t = from + ((until - from) * i) / ticks;
      g.textAlign = i === ticks ? "right" : "left";
      g.fillText(t.toLocaleString("en", { maximumFractionDigits: until - from < 60 ? 1 : 0 }) + " µs", x(t), lanes.length * (HEIGHT + 8) + 14);
    }
  }
  const time = (event) => from + ((event.offsetX - LEFT) / (canvas.clientWidth - LEFT)) * (until - from);
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;  // the page scrolls
    event.preventDefault();
    const at = time(event), by = (event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8;
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
  onSearch(phase, draw);
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}
document.documentElement.dataset.ready = "yes";
