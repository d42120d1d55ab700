// The step timeline: what the engine's thread and the device did when; and the overview behind the scrubber.

const PHASES = ["schedule", "launch", "wait", "collect"];
const LANES = 2;

class StepTimeline {
  constructor(canvas, { onPick, onHover }) {
    Object.assign(this, { canvas, onPick });
    this.numSteps = 12; // about so many are seen
    this.bars = [];
    const at = (e) => {
      const x = e.clientX - canvas.getBoundingClientRect().left;
      return this.bars.find((bar) => x >= bar.x0 && x < bar.x1);
    };
    canvas.addEventListener("click", (e) => {
      const bar = at(e);
      if (bar) onPick(bar.frame);
    });
    canvas.addEventListener("pointermove", (e) => onHover(at(e)?.event ?? null));
    canvas.addEventListener("pointerleave", () => onHover(null));
    canvas.addEventListener("wheel", (e) => this.scale(e.deltaY > 0 ? 1.25 : 0.8, e), { passive: false });
  }

  scale(factor, event) {
    event?.preventDefault();
    this.numSteps = Math.max(3, Math.min(200, this.numSteps * factor));
    this.onScale?.();
  }

  draw(history) {
    const { context: c, width, height } = fitCanvas(this.canvas);
    this.bars = [];
    const steps = [];
    for (let i = history.position - 1; i >= 0 && steps.length < this.numSteps; i--) {
      const event = history.frames[i].event;
      if (event.kind === "snapshot") break;
      if (event.us?.length) steps.unshift({ event, frame: i + 1 });
    }
    const label = 64;
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    const laneHeight = (height - 18) / LANES;
    ["engine", "device"].forEach((name, lane) => {
      c.fillStyle = theme.muted;
      c.textAlign = "right";
      c.fillText(name, label - 8, laneHeight * (lane + 0.5));
      c.fillStyle = theme.free;
      c.fillRect(label, laneHeight * lane + 3, width - label, laneHeight - 6);
    });
    c.textAlign = "left";
    if (!steps.length) {
      c.fillStyle = theme.muted;
      c.fillText("no timed steps yet", label + 8, laneHeight / 2);
      return;
    }
    const total = (e) => e.us.reduce((a, b) => a + b, 0);
    const t0 = steps[0].event.time * 1e6;
    // Idle time between steps is cut short, so that a pause of minutes does not hide everything.
    const idleLimit = Math.max(...steps.map((s) => total(s.event))) * 0.5;
    let cut = 0;
    let end = t0;
    for (const s of steps) {
      s.begin = s.event.time * 1e6 - cut;
      const idle = s.begin - end;
      s.isAfterPause = idle > idleLimit && s !== steps[0];
      if (s.isAfterPause) {
        cut += idle - idleLimit;
        s.begin -= idle - idleLimit;
      }
      end = s.begin + total(s.event);
    }
    const scale = (width - label - 4) / Math.max(end - t0, 1);
    const x = (t) => label + (t - t0) * scale;
    let deviceFree = t0;
    for (const s of steps) {
      let t = s.begin;
      s.event.us.forEach((us, i) => {
        c.fillStyle = theme[PHASES[i]];
        c.fillRect(x(t), 3, Math.max(us * scale, us ? 0.75 : 0), laneHeight - 6);
        t += us;
      });
      this.bars.push({ x0: x(s.begin), x1: x(t), frame: s.frame, event: s.event });
      if (s.event.step !== null) deviceFree = this.drawDevice(c, history, s, x, laneHeight, deviceFree);
      if (s.isAfterPause) {
        c.fillStyle = theme.muted;
        c.fillText("⋯", x(s.begin) - 12, laneHeight / 2);
      }
      if (history.frames[s.frame - 1].hasPreemption) {
        c.fillStyle = theme.danger;
        c.fillRect(x(s.begin), 0, 3, height - 18);
      }
      if (history.frames[s.frame - 1].hasHit) {
        c.fillStyle = theme.cached;
        c.fillRect(x(s.begin), 0, Math.max(3, (t - s.begin) * scale), 3);
      }
      if ((t - s.begin) * scale > 24 && s.event.step !== null) {
        c.fillStyle = theme.muted;
        c.fillText(s.event.step, x(s.begin) + 2, height - 8);
      }
    }
    c.fillStyle = theme.accent;
    const current = this.bars.at(-1);
    c.fillRect(current.x0, height - 17, Math.max(2, current.x1 - current.x0), 2);
  }

  // The step ran on the device after its launch began and the step before was over, for as long as the events say.
  drawDevice(c, history, s, x, laneHeight, deviceFree) {
    const us = history.devices.get(s.event.step);
    const launch = s.begin + s.event.us[0];
    if (us === undefined) {
      // Not timed: on the CPU, launch() is where the model runs.
      c.fillStyle = theme.gpu;
      c.globalAlpha = 0.35;
      c.fillRect(x(launch), laneHeight + 3, Math.max(1, x(launch + s.event.us[1]) - x(launch)), laneHeight - 6);
      c.globalAlpha = 1;
      return deviceFree;
    }
    const begin = Math.max(launch, deviceFree);
    c.fillStyle = theme.gpu;
    c.fillRect(x(begin), laneHeight + 3, Math.max(1, x(begin + us) - x(begin) - 0.5), laneHeight - 6);
    return begin + us;
  }
}

// Used blocks over the whole history, with preemptions in red.
function drawOverview(canvas, history) {
  const { context: c, width, height } = fitCanvas(canvas);
  const n = history.frames.length;
  if (!n || !history.state.numBlocks) return;
  const columns = Math.min(n, Math.floor(width));
  for (let i = 0; i < columns; i++) {
    const from = Math.floor((i * n) / columns);
    const to = Math.max(from + 1, Math.floor(((i + 1) * n) / columns));
    const x = (i * width) / columns;
    let used = 0;
    let hasPreemption = false;
    for (let j = from; j < to; j++) {
      used = Math.max(used, history.frames[j].usage?.[0] ?? 0);
      hasPreemption ||= history.frames[j].hasPreemption;
    }
    const bar = (height * used) / history.state.numBlocks;
    c.fillStyle = from < history.position ? theme.accent : theme.muted;
    c.globalAlpha = from < history.position ? 0.55 : 0.3;
    c.fillRect(x, height - bar, width / columns + 0.5, bar);
    c.globalAlpha = 1;
    if (hasPreemption) {
      c.fillStyle = theme.danger;
      c.fillRect(x, 0, Math.max(1, width / columns), 3);
    }
  }
}
