// Answers as Markdown: the service parses the text, this builds elements. No HTML is parsed.

import { post } from "./service.js";
import { copies } from "./snippets.js";

const TAGS = new Set([
  "p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br", "table",
  "thead", "tbody", "tr", "th", "td", "strong", "em", "s", "code", "pre", "a",
]);
const DRAW_MS = 150;
const MAX_CHARACTERS = 32768;

// A text that grows: blocks that are finished stay, the last one is drawn again.
export class GrowingText {
  constructor(element, drawn) {
    this.text = "";
    this.drawn = drawn;
    this.finished = document.createElement("div");
    this.last = document.createElement("div");
    this.last.className = "raw";
    this.start = 0;
    this.drawing = null;
    element.append(this.finished, this.last);
  }

  add(piece) {
    this.text += piece;
    this.drawing ??= this.drawSoon();
  }

  async drawSoon() {
    await new Promise((resolve) => setTimeout(resolve, DRAW_MS));
    await this.draw();
    this.drawing = null;
  }

  // Draw all that has come.
  async finish() {
    await this.drawing;
    await this.draw();
  }

  async draw() {
    const rest = this.text.slice(this.start);
    try {
      if (rest.length > MAX_CHARACTERS) throw new Error("too long");
      const response = await post("/page/markdown", { text: rest });
      const { finished, last, n_finished } = await response.json();
      this.start += n_finished;
      this.finished.append(...finished.map(node));
      this.last.className = "";
      this.last.replaceChildren(...last.map(node));
    } catch {
      this.last.className = "raw";
      this.last.textContent = rest;
    }
    this.drawn();
  }
}

// A string, or [tag, attributes, ...children].
function node(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const [tag, attributes, ...children] = tree;
  if (tag === "pre") return code(attributes.language, String(children[0]));
  if (tag === "table") return table(children);
  const element = document.createElement(TAGS.has(tag) ? tag : "span");
  if (tag === "a" && isAddress(attributes.href)) link(element, attributes.href);
  if (tag === "ol" && attributes.start) element.start = Number(attributes.start);
  element.append(...children.map(node));
  return element;
}

function isAddress(text) {
  return /^https?:\/\//i.test(text ?? "");
}

function link(element, address) {
  element.href = address;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  element.title = address;
}

function table(children) {
  const frame = document.createElement("div");
  frame.className = "table";
  const element = document.createElement("table");
  element.append(...children.map(node));
  frame.append(element);
  return frame;
}

function code(language, text) {
  const block = document.createElement("figure");
  block.className = "code";
  const head = document.createElement("figcaption");
  const name = document.createElement("span");
  name.textContent = language || "text";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain copy";
  button.textContent = "Copy";
  copies(button, () => text);
  head.append(name, button);
  const body = document.createElement("pre");
  body.textContent = text;
  block.append(head, body);
  return block;
}
