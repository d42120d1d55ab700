// The state of an engine, built from its events as nanovllm/inspector/view.py does it (nanovllm/engine/observer.py lists
// them). apply() also tells how to go back: the page scrubs by applying and reverting.

const KEPT_FINISHED = 12; // ended sequences that are still listed

class EngineState {
  constructor() {
    this.numBlocks = 0;
    this.blockSize = 1;
    this.model = "";
    this.time = 0;
    this.step = -1; // number of the newest step
    this.counts = { steps: 0, preemptions: 0, tokens: 0, ended: 0, prefixTokens: 0, admittedTokens: 0 };
    this.decodes = []; // of the last batch: what null stands for
    this.updated = [];
    this.clear();
  }

  clear() {
    this.seqs = new Map(); // id -> {id, name, prompt, limit, tokens, table, cached, state, reason}
    this.waiting = [];
    this.running = [];
    this.owners = new Map(); // block -> ids of the sequences that hold it
    this.contents = new Map(); // block -> {hash, parent, tokens, published}
    this.blockOfHash = new Map();
    this.next = []; // the first free blocks
    this.batch = { decodes: [], chunks: [] };
    this.finished = []; // the newest first
    this.touched = new Set(); // blocks of the last event
  }

  // Functions that undo the event, to be called last first.
  apply(event) {
    const undo = [];
    const { time, step, counts, batch, decodes, updated, touched, next, finished } = this;
    undo.push(() => Object.assign(this, { time, step, counts, batch, decodes, updated, touched, next, finished }));
    this.counts = { ...counts };
    this.touched = new Set();
    if (event.time !== undefined) this.time = event.time;
    if (event.kind === "snapshot") this.restore(event, undo);
    for (const [name, ...args] of event.ops ?? []) this[`op_${name}`](undo, ...args);
    if (event.kind === "step") {
      this.counts.steps++;
      this.step = event.step ?? this.step;
    }
    return undo;
  }

  revert(undo) {
    for (let i = undo.length - 1; i >= 0; i--) undo[i]();
  }

  restore(event, undo) {
    const { seqs, waiting, running, owners, contents, blockOfHash, numBlocks, blockSize, model } = this;
    undo.push(() => Object.assign(this, { seqs, waiting, running, owners, contents, blockOfHash, numBlocks, blockSize, model }));
    this.clear();
    this.numBlocks = event.num_blocks;
    this.blockSize = event.block_size;
    this.model = event.model;
    this.counts.preemptions = event.num_preemptions;
    this.next = event.next;
    for (const s of event.seqs) {
      const seq = { ...s, tokens: [...s.tokens], table: [] };
      this.seqs.set(seq.id, seq);
      this.take([], seq, s.table);
      if (seq.state !== "ended") (seq.state === "running" ? this.running : this.waiting).push(seq.id);
    }
    for (const [block, hash, parent, tokens, published] of event.blocks) {
      this.contents.set(block, { hash, parent, tokens, published: Boolean(published) });
      if (published) this.blockOfHash.set(hash, block);
    }
  }

  // seq gets more blocks.
  take(undo, seq, blocks) {
    seq.table.push(...blocks);
    for (const block of blocks) {
      const owners = this.owners.get(block);
      if (owners) owners.push(seq.id);
      else this.owners.set(block, [seq.id]);
      this.touched.add(block);
    }
    undo.push(() => {
      seq.table.length -= blocks.length;
      for (const block of blocks) this.disown(block, seq.id);
    });
  }

  disown(block, id) {
    const owners = this.owners.get(block);
    owners.splice(owners.lastIndexOf(id), 1);
    if (!owners.length) this.owners.delete(block);
  }

  // Blocks that get a new content lose the old one.
  repurpose(undo, blocks) {
    for (const block of blocks) {
      const content = this.contents.get(block);
      if (!content) continue;
      this.contents.delete(block);
      if (content.published) this.blockOfHash.delete(content.hash);
      undo.push(() => {
        this.contents.set(block, content);
        if (content.published) this.blockOfHash.set(content.hash, block);
      });
    }
  }

  // Sets fields of a sequence.
  set(undo, seq, fields) {
    for (const [name, value] of Object.entries(fields)) {
      const old = seq[name];
      undo.push(() => (seq[name] = old));
      seq[name] = value;
    }
  }

  splice(undo, list, index, count, ...items) {
    const removed = list.splice(index, count, ...items);
    undo.push(() => list.splice(index, items.length, ...removed));
  }

  remove(undo, seq) {
    const list = seq.state === "running" ? this.running : this.waiting;
    this.splice(undo, list, list.indexOf(seq.id), 1);
  }

  drop(undo, seq) {
    this.seqs.delete(seq.id);
    undo.push(() => this.seqs.set(seq.id, seq));
    this.finished = [seq, ...this.finished].slice(0, KEPT_FINISHED);
  }

  op_add(undo, id, name, tokens, limit) {
    const seq = { id, name, prompt: tokens.length, limit, tokens: [...tokens], table: [], cached: 0, state: "waiting", reason: null };
    this.seqs.set(id, seq);
    undo.push(() => this.seqs.delete(id));
    this.splice(undo, this.waiting, this.waiting.length, 0, id);
  }

  op_admit(undo, id, table, numCached) {
    const seq = this.seqs.get(id);
    this.remove(undo, seq);
    this.splice(undo, this.running, this.running.length, 0, id);
    this.repurpose(undo, table.slice(numCached));
    this.take(undo, seq, table);
    this.set(undo, seq, { state: "running", cached: numCached * this.blockSize });
    this.counts.prefixTokens += seq.cached;
    this.counts.admittedTokens += seq.tokens.length;
  }

  op_grow(undo, id, blocks) {
    this.repurpose(undo, blocks);
    this.take(undo, this.seqs.get(id), blocks);
  }

  op_launch(undo, decodes, chunks) {
    if (decodes) this.decodes = decodes;
    this.batch = { decodes: this.decodes, chunks };
  }

  op_cached(undo, id, count) {
    const seq = this.seqs.get(id);
    if (seq) this.set(undo, seq, { cached: count });
  }

  op_tokens(undo, ids, tokens) {
    if (ids) this.updated = ids;
    this.counts.tokens += tokens.length;
    const changed = [];
    for (let i = 0; i < tokens.length; i++) {
      const seq = this.seqs.get(this.updated[i]);
      if (!seq) continue;
      changed.push(seq, seq.cached);
      seq.tokens.push(tokens[i]);
      if (seq.state === "running") seq.cached = seq.tokens.length - 1;
    }
    undo.push(() => {
      for (let i = 0; i < changed.length; i += 2) {
        changed[i].tokens.pop();
        changed[i].cached = changed[i + 1];
      }
    });
  }

  op_hash(undo, id, start, hashes) {
    const seq = this.seqs.get(id);
    let parent = start ? this.contents.get(seq.table[start - 1]).hash : null;
    hashes.forEach((hash, j) => {
      const block = seq.table[start + j];
      const before = this.contents.get(block);
      const holder = this.blockOfHash.get(hash);
      if (holder === undefined) this.blockOfHash.set(hash, block);
      const size = this.blockSize;
      const tokens = seq.tokens.slice((start + j) * size, (start + j + 1) * size);
      this.contents.set(block, { hash, parent, tokens, published: holder === undefined || holder === block });
      this.touched.add(block);
      undo.push(() => {
        if (holder === undefined) this.blockOfHash.delete(hash);
        if (before) this.contents.set(block, before);
        else this.contents.delete(block);
      });
      parent = hash;
    });
  }

  op_preempt(undo, id) {
    const seq = this.seqs.get(id);
    this.remove(undo, seq);
    this.splice(undo, this.waiting, 0, 0, id);
    this.set(undo, seq, { state: "waiting" });
    this.counts.preemptions++;
  }

  op_end(undo, id, reason) {
    const seq = this.seqs.get(id);
    this.remove(undo, seq);
    this.set(undo, seq, { state: "ended", reason });
    this.counts.ended++;
    if (!seq.table.length) this.drop(undo, seq);
  }

  op_free(undo, id) {
    const seq = this.seqs.get(id);
    if (!seq) return;
    const table = seq.table;
    for (const block of table) {
      this.disown(block, id);
      this.touched.add(block);
    }
    this.set(undo, seq, { table: [], cached: 0 });
    undo.push(() => {
      for (const block of table) {
        const owners = this.owners.get(block);
        if (owners) owners.push(id);
        else this.owners.set(block, [id]);
      }
    });
    if (seq.state === "ended") this.drop(undo, seq);
  }

  op_next(undo, blocks) {
    this.next = blocks;
  }

  // What a look needs.

  usage() {
    let cached = 0;
    let shared = 0;
    for (const [block, content] of this.contents) if (content.published && !this.owners.has(block)) cached++;
    for (const owners of this.owners.values()) if (owners.length > 1) shared++;
    const used = this.owners.size;
    return { used, shared, cached, free: this.numBlocks - used - cached };
  }

  // "free", "cached", "used" or "shared".
  kindOf(block) {
    const owners = this.owners.get(block);
    if (owners) return owners.length > 1 ? "shared" : "used";
    return this.contents.get(block)?.published ? "cached" : "free";
  }

  // Blocks from this one back to the first of its prompt, as far as the pool still has them.
  hashChain(block) {
    const chain = [];
    for (let content = this.contents.get(block); content; ) {
      chain.push({ block, hash: content.hash });
      const parent = content.parent;
      if (parent === null) break;
      block = this.blockOfHash.get(parent);
      content = block === undefined ? undefined : this.contents.get(block);
      if (!content) chain.push({ block: null, hash: parent });
    }
    return chain;
  }

  // What the tests compare with the Python view.
  dump() {
    const sorted = (map, f) => Object.fromEntries([...map].sort((a, b) => (a[0] < b[0] ? -1 : 1)).map(([k, v]) => [k, f(v)]));
    return {
      seqs: sorted(this.seqs, (s) => [s.name, s.prompt, s.limit, s.tokens, s.table, s.cached, s.state, s.reason]),
      waiting: this.waiting,
      running: this.running,
      owners: sorted(this.owners, (o) => [...o].sort((a, b) => a - b)),
      contents: sorted(this.contents, (c) => [c.hash, c.parent, c.tokens, c.published]),
      hashes: sorted(this.blockOfHash, (b) => b),
      next: this.next,
      counts: this.counts,
      batch: [this.batch.decodes, this.batch.chunks],
    };
  }
}
