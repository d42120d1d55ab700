// Where events come from: a server, the lines of a recording; and the history of them that one can scrub through.

const MAX_WEIGHT = 6e6; // numbers in the events of a live history; the oldest go first

class History {
  constructor({ bounded }) {
    this.bounded = bounded;
    this.state = new EngineState();
    this.frames = []; // {event, undo: null while not applied, usage: [used, running, waiting], hasPreemption, hasHit}
    this.position = 0; // frames that are applied
    this.dropped = 0; // frames that are forgotten
    this.weight = 0;
    this.devices = new Map(); // step -> microseconds on the device
  }

  get isAtEnd() {
    return this.position === this.frames.length;
  }

  add(event) {
    const follow = this.isAtEnd;
    if (event.done && event.done[1] !== null) this.devices.set(event.done[0], event.done[1]);
    const hasPreemption = Boolean(event.ops?.some((op) => op[0] === "preempt"));
    const hasHit = Boolean(event.ops?.some((op) => op[0] === "admit" && op[3] > 0));
    this.frames.push({ event, undo: null, usage: null, hasPreemption, hasHit });
    this.weight += weightOf(event);
    if (follow) this.forward();
    if (this.bounded && this.weight > MAX_WEIGHT) this.forget();
  }

  forward() {
    const frame = this.frames[this.position++];
    frame.undo = this.state.apply(frame.event);
    frame.usage ??= [this.state.owners.size, this.state.running.length, this.state.waiting.length];
  }

  seek(position) {
    position = Math.max(0, Math.min(position, this.frames.length));
    while (this.position < position) this.forward();
    while (this.position > position) {
      const frame = this.frames[--this.position];
      this.state.revert(frame.undo);
      frame.undo = null;
    }
  }

  forget() {
    const count = Math.ceil(this.frames.length / 5);
    if (this.position < count) this.seek(count);
    for (const { event } of this.frames.splice(0, count)) {
      this.weight -= weightOf(event);
      if (event.done) this.devices.delete(event.done[0]);
    }
    this.position -= count;
    this.dropped += count;
  }
}

function weightOf(event) {
  let weight = 8;
  for (const op of event.ops ?? []) for (const arg of op) weight += Array.isArray(arg) ? arg.length : 1;
  for (const seq of event.seqs ?? []) weight += seq.tokens.length + seq.table.length;
  return weight + (event.blocks?.length ?? 0) * 8;
}

// The events of a recording; a last line that was cut off is left out. Throws an Error that names the line.
function parseTrace(text) {
  const lines = text.split("\n");
  const events = [];
  lines.forEach((line, i) => {
    if (!line.trim()) return;
    try {
      events.push(JSON.parse(line));
    } catch (error) {
      if (i && i === lines.length - 1) return;
      throw new Error(`line ${i + 1} is no JSON: ${error.message}`);
    }
  });
  const header = events[0];
  if (header?.format !== undefined) {
    if (header.format !== "nanovllm-trace" || header.version !== 1) throw new Error("this is a recording of another version");
    events.shift();
  }
  if (events[0]?.kind !== "snapshot") throw new Error("this is no recording that --record wrote");
  return events;
}

// Keeps a stream of server-sent events open, and opens it again when it breaks.
class LiveSource {
  constructor({ onEvents, onStatus }) {
    this.onEvents = onEvents;
    this.onStatus = onStatus;
    this.abort = null;
  }

  get headers() {
    const key = sessionStorage.getItem("nanovllm-api-key");
    return key ? { Authorization: `Bearer ${key}` } : {};
  }

  async start() {
    this.stop();
    const abort = (this.abort = new AbortController());
    let delay = 500;
    while (!abort.signal.aborted) {
      this.onStatus("connecting");
      try {
        const response = await fetch("inspector/events", { headers: this.headers, signal: abort.signal });
        if (response.status === 401 || response.status === 403) {
          this.onStatus("key");
          return;
        }
        if (!response.ok) throw new Error(`HTTP ${response.status}`);
        delay = 500;
        this.onStatus("live");
        await readEventStream(response, this.onEvents);
      } catch (error) {
        if (abort.signal.aborted) return;
      }
      if (abort.signal.aborted) return;
      this.onStatus("lost");
      await new Promise((resolve) => setTimeout(resolve, delay));
      delay = Math.min(2 * delay, 8000);
    }
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  // Throws an Error with the server's reason.
  async control(action, steps = 1) {
    const response = await fetch("inspector/control", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers },
      body: JSON.stringify({ action, steps }),
    });
    if (!response.ok) throw new Error(await reasonOf(response));
  }
}

async function reasonOf(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    const detail = body.error?.message ?? body.detail ?? text;
    return typeof detail === "string" ? detail : JSON.stringify(detail);
  } catch {
    return text || `HTTP ${response.status}`;
  }
}

// Calls onMessage with the parsed JSON of every message until the stream ends.
async function readEventStream(response, onMessage) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const messages = buffer.split(/\r?\n\r?\n/);
    buffer = messages.pop();
    for (const message of messages) {
      const data = message.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data && data !== "[DONE]") onMessage(JSON.parse(data));
    }
  }
}
