// Calls to the service: its key, its state, and streamed answers.

const KEY = "mlx-stack-api-key";
const UNAUTHORIZED = 401;

let refused = () => {};

// What happens when a key is missing or wrong.
export function onRefused(action) {
  refused = action;
}

export function storeKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// JSON of a path; null where it is refused or cannot be reached.
export async function read(path) {
  try {
    const response = await fetch(path, { headers: headers() });
    if (response.status === UNAUTHORIZED) refused();
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

// Status word and text of the service.
export async function health() {
  try {
    const response = await fetch("/health");
    const body = await response.json();
    const text = body.status ?? body.error?.message ?? "unknown";
    return { isReady: response.ok, text: text === "ok" ? "ready" : text };
  } catch {
    return { isReady: false, text: "not reachable" };
  }
}

export async function post(path, body, signal) {
  const response = await fetch(path, { method: "POST", headers: headers(), signal, body: JSON.stringify(body) });
  if (response.ok) return response;
  if (response.status === UNAUTHORIZED) refused();
  const problem = await response.json().catch(() => ({}));
  throw new Error(problem.error?.message ?? `status ${response.status}`);
}

// Chunks of a chat completion.
export async function* chunks(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await post("/v1/chat/completions", asked, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
}

// Data of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((text) => text.startsWith("data: "));
      if (line) yield line.slice("data: ".length);
    }
  }
}
