// Slots: state as a mark with a word, tokens as a bar of reused and computed ones.

export function drawSlot(slot) {
  const drawn = document.getElementById("slot").content.cloneNode(true);
  const nTokens = slot.n_tokens ?? 0;
  const reused = Math.min(slot.cached_tokens ?? 0, nTokens);
  drawn.querySelector(".name").textContent = slot.agent ?? `slot ${slot.id}`;
  drawn.querySelector(".name").title = slot.agent ?? "";
  const state = drawn.querySelector(".state");
  [state.dataset.state, state.textContent] = stateOf(slot, nTokens);
  const fill = drawn.querySelector(".fill");
  fill.setAttribute("aria-label", `${nTokens} of ${slot.n_ctx} tokens, ${reused} reused`);
  drawn.querySelector("i.reused").style.width = `${(100 * reused) / slot.n_ctx}%`;
  drawn.querySelector("i.computed").style.width = `${(100 * (nTokens - reused)) / slot.n_ctx}%`;
  drawn.querySelector(".amount").textContent = `${nTokens.toLocaleString()} of ${slot.n_ctx.toLocaleString()}`;
  return drawn;
}

// Mark and word.
function stateOf(slot, nTokens) {
  if (slot.is_processing) return ["busy", slot.state ?? "busy"];
  return nTokens ? ["good", "ready"] : ["free", "free"];
}
