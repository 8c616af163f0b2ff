// Page of a service: its models, snippets for clients, and a chat. No state beyond this tab.

const CLIENTS = ["claude", "codex", "opencode", "aider", "pi", "qwen", "openai"];
const POLL_MS = 5000;
const KEY = "mlx-stack-api-key";
const element = (id) => document.getElementById(id);

let cards = [];
let messages = [];
let running = null;

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function model() {
  return element("model").value;
}

async function refresh() {
  try {
    const [list, health] = await Promise.all([fetch("/v1/models"), fetch("/health")]);
    const state = await health.json();
    element("state").textContent = state.status ?? state.error?.message ?? "unknown";
    if (list.ok) show((await list.json()).data);
  } catch {
    element("state").textContent = "not reachable";
  }
}

function show(found) {
  if (JSON.stringify(found) === JSON.stringify(cards)) return;
  const chosen = model();
  cards = found;
  element("model").replaceChildren(...cards.map((card) => new Option(card.id, card.id)));
  if (cards.some((card) => card.id === chosen)) element("model").value = chosen;
  describe();
}

function describe() {
  const card = cards.find((one) => one.id === model());
  const context = card?.max_input_tokens ?? card?.meta?.n_ctx;
  element("context").textContent = context ? `${context.toLocaleString()} tokens of context` : "";
  const snippets = {
    curl: curlOf(location.origin, model()),
    "Python (openai)": pythonOf(location.origin, model()),
  };
  for (const client of CLIENTS.filter((name) => name !== "openai")) {
    snippets[client] = `mlx-stack run ${client} --url ${location.origin}`;
  }
  snippets["any OpenAI SDK"] = `eval "$(mlx-stack env openai --url ${location.origin})"`;
  element("snippets").replaceChildren(...Object.entries(snippets).map(snippet));
}

// Characters that a terminal obeys when they are pasted, or that turn the direction of a text.
const OBEYED = /[\p{C}\p{Zl}\p{Zp}]/gu;
const hex = (number, width) => number.toString(16).padStart(width, "0");

function jsonOf(value) {
  const escaped = (text) => [...Array(text.length).keys()].map((i) => "\\u" + hex(text.charCodeAt(i), 4));
  return JSON.stringify(value).replace(OBEYED, (found) => escaped(found).join(""));
}

function pythonString(text) {
  // JSON's escapes are Python's, but for pairs of surrogates.
  return JSON.stringify(text).replace(OBEYED, (found) => "\\U" + hex(found.codePointAt(0), 8));
}

function shellWord(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function curlOf(origin, name) {
  const body = jsonOf({ model: name, messages: [{ role: "user", content: "Hello!" }] });
  return `curl ${origin}/v1/chat/completions -H 'content-type: application/json' -d ${shellWord(body)}`;
}

function pythonOf(origin, name) {
  return (
    `from openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key="none-needed")\n` +
    `answer = client.chat.completions.create(model=${pythonString(name)}, messages=[{"role": "user", "content": "Hello!"}])`
  );
}

function snippet([title, text]) {
  const copy = element("snippet").content.cloneNode(true);
  copy.querySelector("h3").textContent = title;
  copy.querySelector("pre").textContent = text;
  copy.querySelector("button").addEventListener("click", () => navigator.clipboard.writeText(text));
  return copy;
}

function bubble(role, text = "") {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  element("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

async function send(text) {
  messages.push({ role: "user", content: text });
  bubble("user", text);
  const item = bubble("assistant");
  running = new AbortController();
  toggle();
  const began = performance.now();
  const answer = { content: "", reasoning: "", usage: null, first: null };
  try {
    await stream(answer, () => {
      answer.first ??= performance.now() - began;
      draw(item, answer);
    });
  } catch (error) {
    if (error.name !== "AbortError") {
      item.classList.add("error");
      answer.error = error.message;
    }
  }
  // A failed request leaves no turn behind, so that the next one continues what was answered.
  if (answer.content || !answer.error) messages.push(turn(answer));
  else messages.pop();
  draw(item, answer);
  running = null;
  toggle();
}

function turn({ content, reasoning }) {
  return { role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) };
}

async function stream(answer, changed) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal: running.signal,
    body: JSON.stringify({ model: model(), messages, stream: true, stream_options: { include_usage: true } }),
  });
  if (!response.ok) {
    element("key-form").hidden = response.status !== 401;
    throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
  }
  let rest = "";
  for await (const text of pieces(response.body)) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (!data || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta ?? {};
      answer.content += delta.content ?? "";
      answer.reasoning += delta.reasoning_content ?? "";
      answer.usage = chunk.usage ?? answer.usage;
      if (delta.content || delta.reasoning_content) changed();
    }
  }
}

async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

function draw(item, answer) {
  const parts = [];
  if (answer.reasoning) {
    const details = document.createElement("details");
    details.open = !answer.content;
    const summary = document.createElement("summary");
    summary.textContent = "Reasoning";
    details.append(summary, answer.reasoning);
    parts.push(details);
  }
  parts.push(answer.content);
  if (answer.error) parts.push(answer.error);
  if (answer.usage) {
    const figures = document.createElement("span");
    figures.className = "figures";
    figures.textContent = told(answer);
    parts.push(figures);
  }
  item.replaceChildren(...parts);
}

function told({ usage, first }) {
  const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const share = Math.round((100 * reused) / usage.prompt_tokens);
  const wait = first === null ? "" : `, first token after ${Math.round(first)} ms`;
  return `${usage.prompt_tokens} prompt tokens, ${reused} reused (${share} %), ${usage.completion_tokens} generated${wait}`;
}

function toggle() {
  element("send").hidden = running !== null;
  element("stop").hidden = running === null;
}

element("model").addEventListener("change", describe);
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  element("messages").replaceChildren();
});
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, element("key").value);
  element("key-form").hidden = true;
  element("key").value = "";
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("prompt-form").requestSubmit();
  }
});
element("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("prompt").value.trim();
  if (!text || running) return;
  element("prompt").value = "";
  send(text);
});

toggle();
refresh();
setInterval(refresh, POLL_MS);
