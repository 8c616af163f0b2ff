// Page of a service: its models and slots, a chat, snippets for clients. No state beyond this tab.

import { AnswerView } from "./answer.js";
import { Attachments, contentOf, imagesIn } from "./attachments.js";
import { chunks, health, onRefused, read, storeKey } from "./service.js";
import { drawSlot } from "./slots.js";
import { drawSnippet, snippetsOf, unfitting } from "./snippets.js";

const POLL_MS = 5000;
const RUNNING_POLL_MS = 1000;
const NEAR_PX = 60;
const LOOPBACK = /^(localhost|127\..*|\[::1\]|.*\.localhost)$/;
const element = (id) => document.getElementById(id);
const attachments = new Attachments(element("attachments"), notice);

let cards = [];
let clients = [];
let messages = [];
let running = null;
let follows = true;
let lastTop = 0;
let mayReadSlots = true;
let usageDue = 0;
const USAGE_MS = 30_000;

const card = () => cards.find((one) => one.id === element("model").value);
const contextOf = (one) => one?.max_input_tokens ?? one?.meta?.n_ctx ?? 0;
const acceptsImages = () => Boolean(card()?.input_modalities?.includes("image"));

function notice(text) {
  element("notice").textContent = text;
  element("notice").hidden = !text;
}

// State of the service.

async function refresh() {
  if (document.hidden) return;
  const [list, state] = await Promise.all([read("/v1/models"), health()]);
  showState(state);
  if (list) showModels(list.data);
  await refreshSlots(state);
}

function showState({ isReady, text }) {
  const ready = text === "ready" ? "good" : "waiting";
  element("state").dataset.state = isReady ? ready : "bad";
  element("state").textContent = text;
}

// The part of the cards that the page shows; counts of a gateway's members change all the time.
function shownOf(listed) {
  return JSON.stringify(listed.map((one) => [one.id, contextOf(one), one.features, one.input_modalities]));
}

function showModels(listed) {
  const isSame = shownOf(listed) === shownOf(cards);
  const chosen = element("model").value;
  cards = listed;
  if (isSame) return;
  element("model").replaceChildren(...cards.map((one) => new Option(one.id, one.id)));
  if (cards.some((one) => one.id === chosen)) element("model").value = chosen;
  describe();
}

function describe() {
  const context = contextOf(card());
  element("context").textContent = context ? `${context.toLocaleString()} tokens of context` : "";
  element("attach").hidden = !acceptsImages();
  element("thinking-label").hidden = !card()?.features?.includes("thinking");
  if (!acceptsImages()) attachments.take();
  const place = LOOPBACK.test(location.hostname) ? "this computer" : location.hostname;
  element("empty-text").textContent =
    `${card()?.id ?? "The model"} runs on ${place}; nothing is sent elsewhere.` +
    (acceptsImages() ? " It takes images: attach one, drop it here, or paste it." : "");
  const snippets = snippetsOf(location.origin, card()?.id ?? "", clients, context || Infinity);
  element("snippets").replaceChildren(...snippets.map(drawSnippet));
  element("clients-note").textContent = unfitting(clients, context || Infinity);
  element("clients-note").hidden = !element("clients-note").textContent;
}

// Slots of a model in memory; of a gateway those of the chosen member.
async function refreshSlots(state) {
  const status = card()?.status?.value ?? "loaded";
  const isLoaded = state.isReady && state.text === "ready" && status === "loaded";
  const isAsked = isLoaded && mayReadSlots;
  const slots = isAsked ? await read(`/slots?model=${encodeURIComponent(card()?.id ?? "")}`) : null;
  // Without a key it is not asked again and again.
  if (isAsked && !slots) mayReadSlots = false;
  element("slots-card").hidden = !slots?.length;
  if (slots) element("slots").replaceChildren(...slots.map(drawSlot));
  if (slots && Date.now() > usageDue) await refreshUsage();
}

// Usage of all services of the home.
async function refreshUsage() {
  usageDue = Date.now() + USAGE_MS;
  const usage = await read("/usage?since=24h");
  element("usage-card").hidden = !usage?.total.n_requests;
  if (!element("usage-card").hidden) element("usage").textContent = usageText(usage);
}

function usageText({ total, price, currency }) {
  const amount = (n) => n.toLocaleString();
  return (
    `${amount(total.n_prompt - total.n_cached)} tokens read, ${amount(total.n_cached)} reused, ` +
    `${amount(total.n_generated)} written in ${amount(total.n_requests)} requests; ` +
    `${amount(Math.round(total.saved_s))} s saved. At the list price of ${price.name}: ` +
    `${total.price.toFixed(2)} ${currency}.`
  );
}

// The chat.

function bubble(role, name) {
  const item = document.createElement("li");
  item.className = role;
  const head = document.createElement("h3");
  head.textContent = name;
  item.append(head);
  element("messages").append(item);
  element("empty").hidden = true;
  return item;
}

// The view follows an answer until the reader scrolls away from its end.
function scrollToEnd() {
  const box = element("conversation");
  if (follows) box.scrollTop = box.scrollHeight;
}

function noteScroll() {
  const box = element("conversation");
  if (box.scrollTop < lastTop) follows = false;
  if (box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX) follows = true;
  lastTop = box.scrollTop;
}

function showQuestion(text, images) {
  const item = bubble("user", "You");
  if (images.length) {
    const row = document.createElement("div");
    row.className = "pictures";
    row.append(...images.map((image) => image.picture));
    item.append(row);
  }
  const words = document.createElement("p");
  words.textContent = text;
  item.append(words);
  follows = true;
  scrollToEnd();
}

function bodyOf() {
  const system = element("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  const thinking = element("thinking-label").hidden ? "" : element("thinking").value;
  return {
    model: card()?.id ?? element("model").value,
    messages: [...first, ...messages],
    ...(thinking && { enable_thinking: thinking === "on" }),
  };
}

async function send(text) {
  const images = attachments.take();
  // "New chat" begins another list while this one is answered.
  const turns = messages;
  notice("");
  turns.push({ role: "user", content: contentOf(text, images) });
  showQuestion(text, images);
  const view = new AnswerView(bubble("assistant", card()?.id ?? "Model"), scrollToEnd);
  running = new AbortController();
  toggle();
  const timer = setInterval(refresh, RUNNING_POLL_MS);
  const isAnswered = await receive(view);
  await view.finish();
  clearInterval(timer);
  if (isAnswered || view.markdown.text) turns.push(view.turn);
  else takeBack(turns, text, images);
  running = null;
  toggle();
  refresh();
}

// A failed request leaves no turn behind, so that the next one continues what was answered.
function takeBack(turns, text, images) {
  turns.pop();
  if (!element("prompt").value) element("prompt").value = text;
  attachments.putBack(images);
}

// Stream an answer into its view; false where it failed, true where it was stopped.
async function receive(view) {
  try {
    for await (const chunk of chunks(bodyOf(), running.signal)) view.take(chunk);
    return true;
  } catch (error) {
    if (error.name === "AbortError") view.stopped();
    else view.fail(error.message);
    return error.name === "AbortError";
  }
}

function toggle() {
  element("send").hidden = running !== null;
  element("stop").hidden = running === null;
}

function startOver() {
  running?.abort();
  messages = [];
  element("messages").replaceChildren();
  element("empty").hidden = false;
  attachments.take();
  notice("");
  element("prompt").focus();
}

function addImages(files) {
  if (!files.length) return;
  if (acceptsImages()) attachments.add(files);
  else notice(`${card()?.id ?? "This model"} takes no images.`);
}

// Events.

// The height of a text, for browsers whose style sheets cannot say it.
function grow(area) {
  if (CSS.supports("field-sizing", "content")) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

function listenToPrompt() {
  const prompt = element("prompt");
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      element("prompt-form").requestSubmit();
    }
  });
  element("prompt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if ((!text && !attachments.images.length) || running) return;
    prompt.value = "";
    grow(prompt);
    send(text);
  });
  prompt.addEventListener("input", () => grow(prompt));
  for (const button of element("suggestions").querySelectorAll("button")) {
    button.addEventListener("click", () => {
      prompt.value = button.textContent;
      prompt.focus();
    });
  }
}

function listenToImages() {
  element("attach").addEventListener("click", () => element("files").click());
  element("files").addEventListener("change", () => {
    addImages([...element("files").files]);
    element("files").value = "";
  });
  element("prompt").addEventListener("paste", (event) => {
    const files = imagesIn(event.clipboardData);
    if (files.length) event.preventDefault();
    addImages(files);
  });
  const chat = element("chat");
  chat.addEventListener("dragover", (event) => {
    event.preventDefault();
    chat.classList.add("dropping");
  });
  chat.addEventListener("dragleave", () => chat.classList.remove("dropping"));
  chat.addEventListener("drop", (event) => {
    event.preventDefault();
    chat.classList.remove("dropping");
    addImages(imagesIn(event.dataTransfer));
  });
}

function listenToOptions() {
  element("conversation").addEventListener("scroll", noteScroll);
  element("model").addEventListener("change", () => {
    mayReadSlots = true;
    describe();
    refresh();
  });
  element("stop").addEventListener("click", () => running?.abort());
  element("clear").addEventListener("click", startOver);
  element("info").addEventListener("click", () => {
    const isShown = document.querySelector("main").classList.toggle("info");
    element("info").setAttribute("aria-expanded", isShown);
    element("info").textContent = isShown ? "Chat" : "Slots and clients";
  });
  element("system").addEventListener("input", () => {
    element("system-mark").textContent = element("system").value.trim() ? " (set)" : "";
  });
  element("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    storeKey(element("key").value);
    mayReadSlots = true;
    element("key-form").hidden = true;
    element("key").value = "";
    refresh();
  });
}

async function start() {
  onRefused(() => (element("key-form").hidden = false));
  listenToPrompt();
  listenToImages();
  listenToOptions();
  toggle();
  element("commands").append(
    drawSnippet(["Dashboard in the terminal", `mlx-stack tui --url ${location.origin}`]),
    drawSnippet(["Dashboard in a browser", `mlx-stack tui --web --url ${location.origin}`]),
  );
  clients = (await read("/page/clients")) ?? [];
  describe();
  await refresh();
  setInterval(refresh, POLL_MS);
}

start();
