// The block pool as a grid. Small pools: a cell a block. Large ones: a cell stands for several, and a click looks closer.

const MAX_CELL = 46; // pixels
const MAX_LARGE_CELL = 74; // of pools that are as small as this:
const LARGE_BLOCKS = 40;
const TOKENS_SIDE = 60; // cells so wide show their tokens
const MIN_CELL = 5; // pixels; below it, cells stand for several blocks
const ZOOM_BLOCKS = 1024; // blocks of the closer look

class PoolGrid {
  constructor(canvas, { onHover, onSelect, onZoom }) {
    Object.assign(this, { canvas, onHover, onSelect, onZoom });
    this.zoom = null; // [first, end) of the closer look
    this.selected = null; // block
    this.hovered = null;
    canvas.addEventListener("pointermove", (e) => this.hover(this.hit(e)));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("click", (e) => this.click(this.hit(e)));
    canvas.addEventListener("keydown", (e) => this.key(e));
  }

  hover(cell) {
    const block = cell === null ? null : cell.first;
    if (block === this.hovered) return;
    this.hovered = block;
    this.onHover(cell);
  }

  click(cell) {
    if (cell === null) return;
    if (cell.count > 1) this.zoomTo(cell.first);
    else this.select(this.selected === cell.first ? null : cell.first);
  }

  select(block) {
    this.selected = block;
    this.onSelect(block);
  }

  zoomTo(block) {
    const n = this.state.numBlocks;
    const first = block === null ? 0 : Math.max(0, Math.min(Math.floor(block / ZOOM_BLOCKS) * ZOOM_BLOCKS, n - 1));
    this.zoom = block === null ? null : [first, Math.min(first + ZOOM_BLOCKS, n)];
    this.onZoom(this.zoom);
  }

  // Arrow keys move the selection; Enter looks closer.
  key(event) {
    const { cols, per, first, end } = this.layout;
    const step = { ArrowLeft: -per, ArrowRight: per, ArrowUp: -cols * per, ArrowDown: cols * per }[event.key];
    if (step !== undefined) {
      const start = this.selected ?? first - Math.max(step, 0);
      const target = Math.max(first, Math.min(end - 1, start + step));
      this.select(per > 1 ? target - ((target - first) % per) : target);
    } else if (event.key === "Enter" && per > 1 && this.selected !== null) this.zoomTo(this.selected);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  hit(event) {
    if (!this.layout) return null;
    const { size, cols, per, first, end } = this.layout;
    const box = this.canvas.getBoundingClientRect();
    const col = Math.floor((event.clientX - box.left) / size);
    const row = Math.floor((event.clientY - box.top) / size);
    const block = first + (row * cols + col) * per;
    if (col < 0 || col >= cols || row < 0 || block >= end) return null;
    return { first: block, count: Math.min(per, end - block) };
  }

  // The largest cells that fit, and how many blocks each stands for.
  place(width, height) {
    const [first, end] = this.zoom ?? [0, this.state.numBlocks];
    const count = Math.max(end - first, 1);
    let size = count <= LARGE_BLOCKS ? MAX_LARGE_CELL : MAX_CELL;
    const fits = (s, cells) => Math.ceil(cells / Math.max(1, Math.floor(width / s))) * s <= height;
    while (size > MIN_CELL && !fits(size, count)) size--;
    let per = 1;
    while (!fits(size, Math.ceil(count / per))) per *= 2;
    this.layout = { size, per, first, end, cols: Math.max(1, Math.floor(width / size)) };
    return this.layout;
  }

  // marked: blocks with a frame; dimmed: sequence id whose blocks alone keep their colour, or null.
  draw(state, { marked, only }) {
    this.state = state;
    const { context: c, width, height } = fitCanvas(this.canvas);
    const { size, cols, per, first, end } = this.place(width, height);
    const gap = size >= 14 ? 2 : size >= 8 ? 1 : 0.5;
    const at = (block) => {
      const cell = Math.floor((block - first) / per);
      return [(cell % cols) * size, Math.floor(cell / cols) * size];
    };
    const inside = (block) => block >= first && block < end;
    const side = size - gap;
    c.fillStyle = theme.free;
    for (let block = first; block < end; block += per) {
      const [x, y] = at(block);
      c.fillRect(x, y, side, side);
    }
    if (per > 1) this.drawShares(c, state, at, side, inside, only);
    else this.drawBlocks(c, state, at, side, inside, only);
    c.strokeStyle = theme.accent;
    c.lineWidth = size >= 14 ? 2 : 1;
    for (const block of marked) {
      if (!inside(block)) continue;
      const [x, y] = at(block);
      c.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    }
    if (this.selected !== null && inside(this.selected)) {
      const [x, y] = at(this.selected);
      c.strokeStyle = theme.ink;
      c.lineWidth = 2;
      c.strokeRect(x, y, side, side);
    }
  }

  drawBlocks(c, state, at, side, inside, only) {
    this.fills = new Map(); // block -> share of it that holds K/V
    for (const [block, content] of state.contents) {
      if (!content.published || state.owners.has(block) || !inside(block)) continue;
      const [x, y] = at(block);
      c.fillStyle = theme.cached;
      c.fillRect(x, y, side, side);
      if (side < 9) continue;
      c.strokeStyle = theme.panel;
      c.lineWidth = 1;
      c.beginPath(); // stripes: seen without colour too
      for (let d = 4; d < 2 * side; d += 5) {
        c.moveTo(x + Math.min(d, side), y + Math.max(0, d - side));
        c.lineTo(x + Math.max(0, d - side), y + Math.min(d, side));
      }
      c.stroke();
    }
    for (const seq of state.seqs.values()) {
      const faint = only !== null && only !== seq.id;
      seq.table.forEach((block, i) => {
        if (!inside(block)) return;
        const owners = state.owners.get(block);
        if (owners[0] !== seq.id && !(only === seq.id && owners.includes(only))) return;
        const [x, y] = at(block);
        // Reserved is pale; what holds K/V is full, from the bottom up.
        const filled = Math.max(0, Math.min(1, (seq.cached - i * state.blockSize) / state.blockSize));
        this.fills.set(block, faint ? 0 : filled);
        c.fillStyle = colorOf(seq.id, faint ? 0.08 : 0.3);
        c.fillRect(x, y, side, side);
        c.fillStyle = colorOf(seq.id, faint ? 0.18 : 1);
        c.fillRect(x, y + side * (1 - filled), side, side * filled);
        if (owners.length > 1 && side >= 5) this.drawShared(c, x, y, side, owners, faint);
      });
    }
    if (side >= 20) this.drawIds(c, state, at, side);
  }

  // A shared block: a corner in the colour of its second owner, and a dot.
  drawShared(c, x, y, side, owners, faint) {
    c.fillStyle = colorOf(owners[1], faint ? 0.18 : 1);
    c.beginPath();
    c.moveTo(x + side, y);
    c.lineTo(x + side, y + side);
    c.lineTo(x, y + side);
    c.fill();
    c.fillStyle = faint ? "transparent" : inkOn();
    c.beginPath();
    c.arc(x + side - Math.max(2, side * 0.18), y + Math.max(2, side * 0.18), Math.max(1, side * 0.1), 0, 7);
    c.fill();
  }

  drawIds(c, state, at, side) {
    const { first, end } = this.layout;
    if (side >= TOKENS_SIDE) {
      this.drawTokens(c, state, at, side);
      return;
    }
    c.font = `600 ${Math.min(12, side * 0.4)}px ui-monospace, monospace`;
    c.textAlign = "center";
    c.textBaseline = "middle";
    for (let block = first; block < end; block++) {
      const [x, y] = at(block);
      c.fillStyle = this.inkAt(block, 0.5);
      c.fillText(block, x + side / 2, y + side / 2 + 0.5, side - 2);
    }
  }

  // The colour of text at some height of a cell, from its top.
  inkAt(block, height) {
    return (this.fills.get(block) ?? 0) >= 1 - height ? inkOn() : theme.ink;
  }

  // Block ids and, under them, what the blocks hold.
  drawTokens(c, state, at, side) {
    const { first, end } = this.layout;
    c.textAlign = "center";
    c.textBaseline = "middle";
    for (let block = first; block < end; block++) {
      const [x, y] = at(block);
      c.fillStyle = this.inkAt(block, 0.12);
      c.font = "700 13px ui-monospace, monospace";
      c.fillText(`#${block}`, x + side / 2, y + 13, side - 2);
      const tokens = tokensOf(state, block);
      c.fillStyle = this.inkAt(block, 0.4);
      c.font = "11px ui-monospace, monospace";
      for (let i = 0; i < Math.min(tokens.length, 6); i += 2) {
        c.fillText(tokens.slice(i, i + 2).join(" "), x + side / 2, y + 32 + i * 8, side - 4);
      }
    }
  }

  // Cells of several blocks: used ones from the bottom, then cached ones; the rest is free.
  drawShares(c, state, at, side, inside, only) {
    const { per, first, end } = this.layout;
    const cells = Math.ceil((end - first) / per);
    const used = new Uint16Array(cells);
    const cached = new Uint16Array(cells);
    const owner = new Int32Array(cells);
    for (const [block, owners] of state.owners) {
      if (!inside(block) || (only !== null && !owners.includes(only))) continue;
      const cell = Math.floor((block - first) / per);
      used[cell]++;
      owner[cell] = only ?? owners[0];
    }
    for (const [block, content] of state.contents) {
      if (content.published && inside(block) && !state.owners.has(block)) cached[Math.floor((block - first) / per)]++;
    }
    for (let cell = 0; cell < cells; cell++) {
      if (!used[cell] && !cached[cell]) continue;
      const [x, y] = at(first + cell * per);
      const count = Math.min(per, end - first - cell * per);
      const usedHeight = (side * used[cell]) / count;
      const cachedHeight = (side * cached[cell]) / count;
      c.fillStyle = theme.cached;
      c.fillRect(x, y + side - usedHeight - cachedHeight, side, cachedHeight);
      c.fillStyle = colorOf(owner[cell]);
      c.fillRect(x, y + side - usedHeight, side, usedHeight);
    }
  }
}
