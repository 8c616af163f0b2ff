// Answers: thoughts, Markdown, and the cost of the prompt.

import { GrowingText } from "./markdown.js";
import { copies } from "./snippets.js";

// Answer in the list of messages, which follows a stream.
export class AnswerView {
  // `drawn` is called after each change.
  constructor(item, drawn) {
    this.item = item;
    this.drawn = drawn;
    this.item.classList.add("running");
    this.content = document.createElement("div");
    this.content.className = "markdown";
    this.item.append(this.content);
    this.markdown = new GrowingText(this.content, drawn);
    this.reasoning = "";
    this.usage = null;
    this.first = null;
    this.began = performance.now();
  }

  take(chunk) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    this.usage = chunk.usage ?? this.usage;
    if (!delta.content && !delta.reasoning_content) return;
    this.first ??= performance.now() - this.began;
    if (delta.reasoning_content) this.think(delta.reasoning_content);
    if (delta.content) {
      if (this.isThinking) this.thoughts.open = false;
      this.isThinking = false;
      this.markdown.add(delta.content);
    }
  }

  think(piece) {
    if (!this.thoughts) {
      this.thoughts = document.createElement("details");
      this.thoughts.open = true;
      const summary = document.createElement("summary");
      summary.textContent = "Thinking";
      this.thoughtText = document.createElement("p");
      this.thoughts.append(summary, this.thoughtText);
      this.item.insertBefore(this.thoughts, this.content);
    }
    this.isThinking = true;
    this.reasoning += piece;
    this.thoughtText.append(piece);
    this.drawn();
  }

  async finish() {
    await this.markdown.finish();
    this.item.classList.remove("running");
    if (this.usage || this.markdown.text) this.item.append(this.foot());
    this.drawn();
  }

  fail(message) {
    this.item.classList.add("error");
    this.item.append(line("", message));
  }

  stopped() {
    this.item.append(line("quiet", "Stopped."));
  }

  foot() {
    const foot = document.createElement("footer");
    if (this.usage) foot.append(reuseBar(this.usage), figures(this.usage, this.first));
    if (this.markdown.text) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "plain copy";
      button.textContent = "Copy answer";
      copies(button, () => this.markdown.text);
      foot.append(button);
    }
    return foot;
  }

  get turn() {
    const { reasoning } = this;
    return { role: "assistant", content: this.markdown.text, ...(reasoning && { reasoning_content: reasoning }) };
  }
}

const reusedOf = (usage) => usage.prompt_tokens_details?.cached_tokens ?? 0;
const shareOf = (usage) => (usage.prompt_tokens ? (100 * reusedOf(usage)) / usage.prompt_tokens : 0);

function reuseBar(usage) {
  const bar = document.createElement("span");
  bar.className = "fill whole";
  const part = document.createElement("i");
  part.className = "reused";
  part.style.width = `${shareOf(usage)}%`;
  const rest = document.createElement("i");
  rest.className = "computed";
  rest.style.width = `${100 - shareOf(usage)}%`;
  bar.append(part, rest);
  return bar;
}

function figures(usage, first) {
  const text = document.createElement("span");
  text.className = "figures";
  const wait = first === null ? "" : `, first token after ${Math.round(first)} ms`;
  text.textContent =
    `${usage.prompt_tokens} prompt tokens, ${reusedOf(usage)} reused (${Math.round(shareOf(usage))} %), ` +
    `${usage.completion_tokens} generated${wait}`;
  return text;
}

function line(kind, text) {
  const words = document.createElement("p");
  words.className = kind;
  words.textContent = text;
  return words;
}
