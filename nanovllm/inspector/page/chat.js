// A small chat with the server's own model, so that there is something to watch.

class ChatPanel {
  constructor(source) {
    this.source = source;
    this.messages = [];
    this.abort = null;
    $("chat-form").addEventListener("submit", (e) => {
      e.preventDefault();
      this.abort ? this.stop() : this.send();
    });
    $("chat-input").addEventListener("keydown", (e) => {
      if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
        e.preventDefault();
        if (!this.abort) this.send();
      }
      e.stopPropagation();
    });
    $("chat-clear").addEventListener("click", () => {
      this.stop();
      this.messages = [];
      $("chat-log").replaceChildren();
    });
  }

  stop() {
    this.abort?.abort();
  }

  say(role, text) {
    const line = el("div", { class: `message ${role}` }, text);
    $("chat-log").append(line);
    $("chat-log").scrollTop = $("chat-log").scrollHeight;
    return line;
  }

  async send() {
    const text = $("chat-input").value.trim();
    if (!text) return;
    $("chat-input").value = "";
    this.say("user", text);
    const messages = [...this.messages, { role: "user", content: text }];
    const line = this.say("assistant", "");
    const abort = (this.abort = new AbortController());
    $("chat-send").textContent = "Stop";
    let answer = "";
    let thoughts = "";
    try {
      this.model ??= await this.firstModel(abort.signal);
      const response = await fetch("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json", ...this.source.headers },
        body: JSON.stringify({ model: this.model, messages, stream: true, temperature: 0, max_tokens: 256 }),
        signal: abort.signal,
      });
      if (!response.ok) throw new Error(await reasonOf(response));
      await readEventStream(response, (chunk) => {
        if (chunk.error) throw new Error(chunk.error.message);
        const delta = chunk.choices?.[0]?.delta ?? {};
        thoughts += delta.reasoning_content ?? "";
        answer += delta.content ?? "";
        line.replaceChildren(...(thoughts ? [el("div", { class: "thoughts" }, thoughts)] : []), answer);
        $("chat-log").scrollTop = $("chat-log").scrollHeight;
      });
    } catch (error) {
      if (error.name === "AbortError") line.append(el("em", {}, " (stopped)"));
      else line.replaceWith(el("div", { class: "message error", role: "alert" }, error.message));
    } finally {
      this.abort = null;
      $("chat-send").textContent = "Send";
    }
    if (answer) this.messages = [...messages, { role: "assistant", content: answer }];
  }

  async firstModel(signal) {
    const response = await fetch("v1/models", { headers: this.source.headers, signal });
    if (!response.ok) throw new Error(await reasonOf(response));
    return (await response.json()).data[0].id;
  }
}
