// Commands and programs that connect a client, and buttons that copy them.

const COPIED_MS = 1500;

// Characters that a terminal obeys when they are pasted, or that turn the direction of a text.
const OBEYED = /[\p{C}\p{Zl}\p{Zp}]/gu;
const hex = (number, width) => number.toString(16).padStart(width, "0");

function jsonOf(value) {
  const escaped = (text) => [...Array(text.length).keys()].map((i) => "\\u" + hex(text.charCodeAt(i), 4));
  return JSON.stringify(value).replace(OBEYED, (text) => escaped(text).join(""));
}

function pythonString(text) {
  // JSON's escapes are Python's, but for pairs of surrogates.
  return JSON.stringify(text).replace(OBEYED, (character) => "\\U" + hex(character.codePointAt(0), 8));
}

function shellWord(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function curlOf(origin, name) {
  const body = jsonOf({ model: name, messages: [{ role: "user", content: "Hello!" }] });
  return `curl ${origin}/v1/chat/completions -H 'content-type: application/json' -d ${shellWord(body)}`;
}

export function pythonOf(origin, name) {
  return (
    `from openai import OpenAI\n\nclient = OpenAI(base_url="${origin}/v1", api_key="none-needed")\n` +
    `answer = client.chat.completions.create(model=${pythonString(name)}, messages=[{"role": "user", "content": "Hello!"}])`
  );
}

// Snippets by title; of the clients only those whose prompts fit a slot of `context` tokens.
export function snippetsOf(origin, name, clients, context) {
  const fitting = clients.filter((client) => client.name !== "openai" && client.least_context <= context);
  const runs = fitting.map((client) => [client.name, `mlx-stack run ${client.name} --url ${origin}`]);
  return [
    ...runs,
    ["any OpenAI SDK", `eval "$(mlx-stack env openai --url ${origin})"`],
    ["curl", curlOf(origin, name)],
    ["Python (openai)", pythonOf(origin, name)],
  ];
}

// Sentence on clients whose prompts do not fit, or "".
export function unfitting(clients, context) {
  const names = clients.filter((client) => client.least_context > context).map((client) => client.name);
  if (!names.length) return "";
  return `Not offered for slots of ${context.toLocaleString()} tokens: ${names.join(", ")}. Their first prompts are larger.`;
}

export function drawSnippet([title, text]) {
  const drawn = document.getElementById("snippet").content.cloneNode(true);
  drawn.querySelector("h3").textContent = title;
  drawn.querySelector("pre").textContent = text;
  copies(drawn.querySelector("button"), () => text);
  return drawn;
}

// Let a button copy a text, and say so for a moment.
export function copies(button, text) {
  const word = button.textContent;
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Select and copy";
    setTimeout(() => (button.textContent = word), COPIED_MS);
  });
}

// Without TLS a page of another machine has no clipboard, but may copy what is selected.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedSelection(text);
  }
}

function copiedSelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}
