// Sequences and their block tables: running, waiting and ended ones.

const MAX_ROWS = 100; // of each list
const MAX_CHIPS = 12; // of a table that is not unfolded
const MAX_UNFOLDED = 1024;

class SequenceList {
  constructor(root, { onPick, onHover, onBlock }) {
    Object.assign(this, { root, onPick, onHover, onBlock });
    this.picked = null; // sequence id whose table is unfolded
  }

  draw(state) {
    const ended = [...state.seqs.values()].filter((s) => s.state === "ended");
    const parts = [
      this.group(state, "Running", state.running.map((id) => state.seqs.get(id)), "nothing runs"),
      this.group(state, "Waiting", state.waiting.map((id) => state.seqs.get(id)), "nobody waits"),
    ];
    if (ended.length) parts.push(this.group(state, "Ended, step in flight", ended, ""));
    parts.push(this.finished(state));
    const focused = document.activeElement?.dataset?.seq;
    this.root.replaceChildren(...parts);
    if (focused) this.root.querySelector(`[data-seq="${focused}"]`)?.focus({ preventScroll: true });
  }

  group(state, title, seqs, empty) {
    const rows = seqs.slice(0, MAX_ROWS).map((seq) => this.row(state, seq));
    if (seqs.length > MAX_ROWS) rows.push(el("li", { class: "more" }, `and ${number(seqs.length - MAX_ROWS)} more`));
    if (!rows.length) rows.push(el("li", { class: "more" }, empty));
    return el("section", {}, el("h3", {}, title, el("span", { class: "count" }, number(seqs.length))), el("ul", {}, ...rows));
  }

  row(state, seq) {
    const work = state.batch.decodes.includes(seq.id)
      ? "decode"
      : state.batch.chunks.filter(([id]) => id === seq.id).map(([, start, end]) => `prefill ${start}–${end - 1}`)[0];
    const picked = this.picked === seq.id;
    const share = (n) => `${(100 * Math.min(1, n / seq.limit)).toFixed(2)}%`;
    const head = el(
      "button",
      {
        class: "seq",
        "data-seq": seq.id,
        "aria-expanded": String(picked),
        "aria-label": `sequence ${seq.name}, ${seq.state}, ${seq.tokens.length} tokens, ${plural(seq.table.length, "block")}`,
        click: () => this.onPick(picked ? null : seq.id),
        pointerenter: () => this.onHover(seq.id),
        pointerleave: () => this.onHover(null),
      },
      el("span", { class: "swatch", style: `background:${colorOf(seq.id)}` }),
      el("span", { class: "name", title: seq.name }, seq.name),
      el("span", { class: "work" }, seq.state === "running" ? (work ?? "") : (seq.reason ?? "")),
      el("span", { class: "length" }, `${number(seq.tokens.length)} / ${number(seq.limit)}`),
    );
    const bar = el(
      "div",
      { class: "progress", title: `${seq.prompt} prompt tokens, ${seq.cached} in the cache, at most ${seq.limit}` },
      el("i", { class: "known", style: `width:${share(seq.tokens.length)}` }),
      el("i", { style: `width:${share(seq.cached)};background:${colorOf(seq.id)}` }),
      el("b", { style: `left:${share(seq.prompt)}` }),
    );
    return el("li", { class: seq.state }, head, bar, this.table(state, seq, picked));
  }

  // Logical block over physical block; the first and the last ones of a long table.
  table(state, seq, unfolded) {
    if (!seq.table.length) return null;
    const limit = unfolded ? MAX_UNFOLDED : MAX_CHIPS;
    const n = seq.table.length;
    const indices = n <= limit ? [...seq.table.keys()] : [...Array(limit - 4).keys(), null, n - 3, n - 2, n - 1];
    return el(
      "div",
      { class: "table", role: "list", "aria-label": `block table of ${seq.name}` },
      ...indices.map((i) => {
        if (i === null) return el("span", { class: "gap" }, `… ${number(n - limit + 1)} …`);
        const block = seq.table[i];
        const isShared = state.owners.get(block).length > 1;
        return el(
          "span",
          {
            role: "listitem",
            class: isShared ? "chip shared" : "chip",
            style: `border-color:${colorOf(seq.id)}`,
            title: `logical block ${i} is block ${block}${isShared ? ", shared" : ""}`,
            click: () => this.onBlock(block),
          },
          el("small", {}, String(i)),
          el("b", {}, String(block)),
        );
      }),
    );
  }

  finished(state) {
    const rows = state.finished.map((seq) =>
      el(
        "li",
        { class: "done" },
        el("span", { class: "swatch", style: `background:${colorOf(seq.id, 0.5)}` }),
        el("span", { class: "name", title: seq.name }, seq.name),
        el("span", { class: "work" }, seq.reason ?? ""),
        el("span", { class: "length" }, plural(seq.tokens.length, "token")),
      ),
    );
    if (!rows.length) rows.push(el("li", { class: "more" }, "none yet"));
    return el("section", {}, el("h3", {}, "Finished", el("span", { class: "count" }, number(state.counts.ended))), el("ul", {}, ...rows));
  }
}
