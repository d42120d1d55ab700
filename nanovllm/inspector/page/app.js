// The page: modes, transport, keys, and when what is drawn.

const app = {
  mode: "walk", // "live", "file", "walk"
  histories: { live: new History({ bounded: true }), file: null, walk: null },
  fileName: "",
  isPaused: false, // the engine
  isPlaying: false, // a recording
  isFollowing: true,
  hoveredCell: null,
  hoveredSeq: null,
  get history() {
    return this.histories[this.mode];
  },
};

const source = new LiveSource({ onEvents: receive, onStatus: showStatus });
const pool = new PoolGrid($("pool"), {
  onHover: (cell) => redraw((app.hoveredCell = cell)),
  onSelect: () => redraw(),
  onZoom: () => redraw(),
});
const timeline = new StepTimeline($("timeline"), {
  onPick: (position) => seek(position),
  onHover: (event) => ($("timing").textContent = event ? timingText(event) : ""),
});
timeline.onScale = () => redraw();
const sequences = new SequenceList($("sequences"), {
  onPick: (id) => {
    sequences.picked = id;
    drawnAt = 0;
    redraw();
  },
  onHover: (id) => redraw((app.hoveredSeq = id)),
  onBlock: (block) => {
    if (pool.layout?.per > 1) pool.zoomTo(block);
    pool.select(block);
  },
});
const chat = new ChatPanel(source);
const canBeLive = location.protocol.startsWith("http") && !document.getElementById("trace");

// Modes

function setMode(mode) {
  app.mode = mode;
  app.isPlaying = false;
  app.isFollowing = mode === "live";
  pool.selected = pool.zoom = sequences.picked = app.hoveredCell = app.hoveredSeq = null;
  document.body.dataset.mode = mode;
  for (const name of ["live", "file", "walk"]) $(`mode-${name}`).setAttribute("aria-pressed", String(name === mode));
  if (mode === "live") seek(Infinity);
  drawnAt = 0;
  redraw();
}

function showHistory(mode, events) {
  const history = new History({ bounded: false });
  for (const event of events) history.add(event);
  history.seek(mode === "walk" ? 2 : 1);
  app.histories[mode] = history;
  setMode(mode);
}

function openTrace(text, name) {
  try {
    showHistory("file", parseTrace(text));
    app.fileName = name;
    $("mode-file").hidden = false;
    say(`${name}: ${plural(app.history.frames.length, "event")}`);
  } catch (error) {
    say(`${name} cannot be shown: ${error.message}`, true);
  }
}

function receive(events) {
  const history = app.histories.live;
  for (const event of events) {
    if (event.kind === "control") setPaused(event.paused);
    else if (event.kind === "end") showStatus("ended");
    else {
      if (event.kind === "snapshot") history.devices.clear();
      history.add(event);
    }
  }
  if (app.isFollowing && app.mode === "live") history.seek(history.frames.length);
  redraw();
}

function showStatus(status) {
  const texts = { connecting: "connecting …", live: "live", lost: "connection lost, trying again", ended: "the engine has ended", key: "needs the API key" };
  $("status").textContent = texts[status];
  document.body.dataset.status = status;
  $("key-form").hidden = status !== "key";
}

function setPaused(isPaused) {
  app.isPaused = isPaused;
  $("pause").textContent = isPaused ? "Resume engine" : "Pause engine";
  $("pause").setAttribute("aria-pressed", String(isPaused));
  document.body.classList.toggle("paused", isPaused);
}

let sayTimer = 0;
function say(text, isError = false) {
  $("message").textContent = text;
  $("message").className = isError ? "error" : "";
  clearTimeout(sayTimer);
  sayTimer = setTimeout(() => ($("message").textContent = ""), isError ? 15000 : 5000);
}

// Transport

function seek(position) {
  const history = app.history;
  if (!history) return;
  history.seek(position);
  app.isFollowing = app.mode === "live" && history.isAtEnd;
  drawnAt = 0;
  redraw();
}

async function control(action) {
  try {
    await source.control(action);
    if (action !== "pause") seek(Infinity);
  } catch (error) {
    say(error.message, true);
  }
}

function playOrPause() {
  if (app.mode === "live") {
    control(app.isPaused ? "resume" : "pause");
    return;
  }
  app.isPlaying = !app.isPlaying;
  if (app.isPlaying && app.history.isAtEnd) seek(1);
  if (app.isPlaying) setTimeout(playOn, 0);
  redraw();
}

function playOn() {
  if (!app.isPlaying || app.mode === "live") return;
  seek(app.history.position + 1);
  if (app.history.isAtEnd) app.isPlaying = false;
  else setTimeout(playOn, app.mode === "walk" ? 3500 : 1000 / Number($("speed").value));
}

const stepBack = () => seek(app.history.position - 1 || 1);
const stepForward = () => seek(app.history.position + 1);
function stepEngine() {
  if (app.mode === "live") control("step");
  else stepForward();
}

const KEYS = {
  " ": playOrPause,
  ArrowLeft: stepBack,
  ArrowRight: stepForward,
  Home: () => seek(1),
  End: () => seek(Infinity),
  s: stepEngine,
  t: toggleTheme,
  w: () => setMode("walk"),
  l: () => canBeLive && setMode("live"),
  "+": () => timeline.scale(0.8),
  "-": () => timeline.scale(1.25),
  "?": () => $("help").showModal(),
  Escape: () => {
    if (pool.zoom) pool.zoomTo(null);
    pool.select(null);
    sequences.picked = null;
    drawnAt = 0;
  },
};
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea, select, dialog[open]");
  const isButton = event.key === " " && event.target.closest("button, summary");
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (isTyping || isButton || event.ctrlKey || event.metaKey || event.altKey || !KEYS[key]) return;
  event.preventDefault();
  KEYS[key]();
});

function toggleTheme() {
  const isDark = getComputedStyle(document.documentElement).getPropertyValue("color-scheme").trim() === "dark";
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem("nanovllm-theme", document.documentElement.dataset.theme);
  } catch {
    // a page from a file has no storage: the choice lasts as long as the page
  }
  readTheme();
  drawnAt = 0;
  redraw();
}

// Drawing: at most once a frame, the lists less often

let isScheduled = false;
let drawnAt = 0;
function redraw() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(draw);
}

function draw(now) {
  isScheduled = false;
  const history = app.history;
  if (!history) return;
  const { state } = history;
  drawTransport(history);
  drawStats(history);
  const event = history.position ? history.frames[history.position - 1].event : null;
  const block = app.hoveredCell?.count === 1 ? app.hoveredCell.first : pool.selected;
  const chain = block === null ? [] : state.hashChain(block).map((link) => link.block).filter((b) => b !== null);
  const few = state.touched.size <= 64 ? state.touched : [];
  pool.draw(state, { marked: block === null ? few : chain, only: app.hoveredSeq ?? sequences.picked });
  timeline.draw(history);
  drawOverview($("overview"), history);
  if (now - drawnAt < 120 && drawnAt) {
    setTimeout(redraw, 120);
    return;
  }
  drawnAt = now;
  sequences.draw(state);
  drawDetails(state, event, block);
}

function drawTransport(history) {
  const { position, frames, dropped } = history;
  $("scrubber").max = Math.max(frames.length, 1);
  $("scrubber").min = Math.min(1, frames.length);
  $("scrubber").value = position;
  const event = position ? frames[position - 1].event : null;
  const step = history.state.step < 0 ? "before the first step" : `step ${number(history.state.step)}`;
  $("scrubber").setAttribute("aria-valuetext", `${step}, event ${position} of ${frames.length}`);
  $("where").textContent = `${step} · event ${number(position + dropped)} of ${number(frames.length + dropped)}`;
  $("follow").hidden = app.mode !== "live" || history.isAtEnd;
  $("play").textContent = app.isPlaying ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", app.isPlaying ? "stop playing" : "play");
  if (event && !$("timing").matches(":hover")) $("step-time").textContent = event.us ? timingText(event) : "";
}

function timingText(event) {
  const device = app.history.devices.get(event.step);
  const parts = event.us.map((us, i) => `${PHASES[i]} ${millis(us)}`);
  return `${event.step === null ? "last of the steps in flight" : `step ${event.step}`}: ${parts.join(", ")}${device === undefined ? "" : `, device ${millis(device)}`}`;
}

function drawStats(history) {
  const { state } = history;
  const { used, shared, cached, free } = state.usage();
  const { counts } = state;
  const share = counts.admittedTokens ? Math.round((100 * counts.prefixTokens) / counts.admittedTokens) : 0;
  const values = {
    used: `${number(used)}`,
    shared: number(shared),
    cached: number(cached),
    free: number(free),
    running: number(state.running.length),
    waiting: number(state.waiting.length),
    hits: `${number(counts.prefixTokens)} (${share}%)`,
    preemptions: number(counts.preemptions),
    tokens: number(counts.tokens),
    rate: rateOf(history),
  };
  for (const [name, value] of Object.entries(values)) $(`stat-${name}`).textContent = value;
  $("pool-size").textContent = `${number(state.numBlocks)} blocks of ${state.blockSize} tokens`;
  $("model").textContent = state.model.split("/").findLast(Boolean) ?? "";
  $("model").title = state.model;
  $("pool").setAttribute("aria-label", `block pool: ${used} used, ${shared} of them shared, ${cached} cached, ${free} free, of ${state.numBlocks}`);
  $("pool-zoom").hidden = !pool.zoom;
  if (pool.zoom) $("pool-range").textContent = `blocks ${number(pool.zoom[0])} to ${number(pool.zoom[1] - 1)}`;
  const per = pool.layout?.per ?? 1;
  $("pool-per").textContent = per > 1 ? `a cell is ${per} blocks` : "";
}

// Tokens a second over the last timed steps, of two seconds at most.
function rateOf(history) {
  let tokens = 0;
  let first = null;
  let last = null;
  for (let i = history.position - 1; i >= Math.max(0, history.position - 3000); i--) {
    const { event } = history.frames[i];
    if (event.kind === "snapshot" || (last !== null && last - event.time > 2)) break;
    if (!event.us?.length) continue;
    last ??= event.time + event.us.reduce((a, b) => a + b, 0) * 1e-6;
    first = event.time;
    tokens += event.ops.find((op) => op[0] === "tokens")?.[2].length ?? 0;
  }
  return last === null ? "–" : number(Math.round(tokens / Math.max(last - first, 1e-6)));
}

function drawDetails(state, event, block) {
  $("note").replaceChildren(...(event?.note ? describeNote(event) : []));
  $("note").hidden = !event?.note;
  const cell = app.hoveredCell;
  const parts = cell && cell.count > 1 ? describeCell(state, cell) : block !== null && block < state.numBlocks ? describeBlock(state, block) : null;
  $("details").replaceChildren(...(parts ?? [el("h3", {}, "Block"), el("p", { class: "hint" }, "Point at a block, or walk over the grid with the arrow keys.")]));
  $("ops").replaceChildren(...(event ? describeOps(state, event) : []));
}

// Start

for (const [id, act] of Object.entries({
  first: () => seek(1),
  back: stepBack,
  play: playOrPause,
  forward: stepForward,
  last: () => seek(Infinity),
  follow: () => seek(Infinity),
  pause: () => control(app.isPaused ? "resume" : "pause"),
  step: stepEngine,
  "mode-live": () => setMode("live"),
  "mode-file": () => setMode("file"),
  "mode-walk": () => setMode("walk"),
  "theme-toggle": toggleTheme,
  "help-open": () => $("help").showModal(),
  "pool-back": () => pool.zoomTo(null),
  open: () => $("file").click(),
})) {
  $(id).addEventListener("click", act);
}
$("scrubber").addEventListener("input", (e) => seek(Number(e.target.value)));
$("file").addEventListener("change", async (e) => {
  const [file] = e.target.files;
  if (file) openTrace(await file.text(), file.name);
  e.target.value = "";
});
document.addEventListener("dragover", (e) => e.preventDefault());
document.addEventListener("drop", async (e) => {
  e.preventDefault();
  const [file] = e.dataTransfer.files;
  if (file) openTrace(await file.text(), file.name);
});
$("key-form").addEventListener("submit", (e) => {
  e.preventDefault();
  sessionStorage.setItem("nanovllm-api-key", $("key").value);
  $("key").value = "";
  source.start();
});
new ResizeObserver(() => redraw()).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readTheme();
  redraw();
});
try {
  const saved = localStorage.getItem("nanovllm-theme");
  if (saved) document.documentElement.dataset.theme = saved;
} catch {
  // as in toggleTheme
}
readTheme();
showHistory("walk", parseTrace(document.getElementById("walkthrough").textContent));
const embedded = document.getElementById("trace")?.textContent.trim();
$("mode-live").hidden = !canBeLive;
if (embedded) openTrace(embedded, "recording");
if (canBeLive) {
  setMode("live");
  source.start();
}
// For the tests, and for the curious in the console.
window.inspector = { app, pool, seek, dump: () => app.history.state.dump() };
