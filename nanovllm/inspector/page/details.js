// What one block holds, and what one event did, in words.

function describeBlock(state, block) {
  const content = state.contents.get(block);
  const owners = state.owners.get(block) ?? [];
  const kind = state.kindOf(block);
  const facts = [
    ["state", { free: "free", cached: "free, content cached", used: "used", shared: `shared, ${owners.length} references` }[kind]],
    ["slots", `${number(block * state.blockSize)} to ${number((block + 1) * state.blockSize - 1)}`],
  ];
  for (const id of owners.slice(0, 6)) {
    const seq = state.seqs.get(id);
    const i = seq.table.indexOf(block);
    facts.push([`in ${seq.name}`, `logical block ${i}, positions ${i * state.blockSize} to ${(i + 1) * state.blockSize - 1}`]);
  }
  if (owners.length > 6) facts.push(["", `and ${owners.length - 6} more`]);
  facts.push(["tokens", tokensOf(state, block).join(" ") || (owners.length ? "reserved" : "nothing that counts")]);
  facts.push(["hash", content ? (content.published ? content.hash : `${content.hash}, another block is published`) : "none: not full, or not computed"]);
  const chain = state.hashChain(block);
  const links = chain.slice(0, 24).map(({ block: b, hash }, i) =>
    el("li", {}, el("b", {}, b === null ? "gone" : `#${b}`), ` ${shortHash(hash)}`, i === chain.length - 1 && b !== null ? " (first of its prompt)" : ""),
  );
  if (chain.length > 24) links.push(el("li", {}, `and ${chain.length - 24} more`));
  return [
    el("h3", {}, `Block ${number(block)}`),
    el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    links.length ? el("h4", {}, "Hash chain") : null,
    links.length ? el("ol", { class: "chain" }, ...links) : null,
  ].filter(Boolean);
}

// Tokens of a hashed block, or those that its sequence has or will have in it; none of a free one.
function tokensOf(state, block) {
  const content = state.contents.get(block);
  if (content) return content.tokens;
  const owners = state.owners.get(block);
  if (!owners) return [];
  const seq = state.seqs.get(owners[0]);
  const start = seq.table.indexOf(block) * state.blockSize;
  return seq.tokens.slice(start, start + state.blockSize);
}

function describeCell(state, { first, count }) {
  const kinds = { used: 0, shared: 0, cached: 0, free: 0 };
  for (let block = first; block < first + count; block++) kinds[state.kindOf(block)]++;
  return [
    el("h3", {}, `Blocks ${number(first)} to ${number(first + count - 1)}`),
    el("dl", {}, ...Object.entries(kinds).flatMap(([name, n]) => [el("dt", {}, name), el("dd", {}, number(n))])),
    el("p", { class: "hint" }, "Click (or Enter) looks closer."),
  ];
}

// One line for each operation of an event.
function describeOps(state, event) {
  const name = (id) => state.seqs.get(id)?.name ?? state.finished.find((s) => s.id === id)?.name ?? `#${id}`;
  const few = (list, limit = 8) => list.slice(0, limit).join(", ") + (list.length > limit ? `, … (${list.length})` : "");
  const words = {
    add: (id, label, tokens) => `${label} arrives with ${plural(tokens.length, "token")}`,
    admit: (id, table, cached) => `${name(id)} is admitted: blocks ${few(table)}${cached ? `, ${cached} of them from the prefix cache` : ""}`,
    grow: (id, blocks) => `${name(id)} gets ${blocks.length > 1 ? "blocks" : "block"} ${few(blocks)}`,
    launch: (decodes, chunks) => {
      const parts = [decodes === null ? "the same sequences decode" : decodes.length ? `decode ${few(decodes.map(name))}` : null];
      parts.push(...chunks.slice(0, 8).map(([id, start, end]) => `prefill ${name(id)} ${start}–${end - 1}`));
      return `batch: ${parts.filter(Boolean).join(", ")}`;
    },
    tokens: (ids, tokens) => `${plural(tokens.length, "token")} sampled: ${few(tokens)}`,
    cached: (id, n) => `${name(id)} has ${plural(n, "token")} in the cache`,
    hash: (id, start, hashes) => `${name(id)}: logical ${hashes.length > 1 ? `blocks ${start}–${start + hashes.length - 1} are` : `block ${start} is`} full and hashed (${few(hashes.map(shortHash), 3)})`,
    preempt: (id) => `${name(id)} is preempted: its tokens will be computed again`,
    end: (id, reason) => `${name(id)} ends: ${reason}`,
    free: (id) => `${name(id)} releases its blocks`,
    next: (blocks) => `next free blocks: ${few(blocks)}`,
  };
  if (event.kind === "snapshot") return [el("li", {}, "the state when watching began")];
  return (event.ops ?? []).slice(0, 60).map(([op, ...args]) => el("li", { class: op }, words[op](...args)));
}

// The explanation of the walk-through, and what the model got.
function describeNote(event) {
  const parts = [el("h3", {}, event.note.title), el("p", {}, event.note.text)];
  const inputs = [];
  for (const [part, values] of Object.entries(event.inputs ?? {})) {
    const rows = Object.entries(values).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, JSON.stringify(value))]);
    inputs.push(el("div", {}, el("h4", {}, `${part} input`), el("dl", {}, ...rows)));
  }
  return inputs.length ? [...parts, el("div", { class: "inputs" }, ...inputs)] : parts;
}
