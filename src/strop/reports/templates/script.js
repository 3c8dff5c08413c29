"use strict";
const readout = document.getElementById("readout");

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function showReadout(event, lines) {
  readout.replaceChildren(...lines);
  readout.hidden = false;
  const width = readout.offsetWidth, height = readout.offsetHeight;
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16;
  const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 16;
  readout.style.left = Math.max(4, left) + "px";
  readout.style.top = Math.max(4, top) + "px";
}

function hideReadout() { readout.hidden = true; }

// Plots: the figures nearest to the pointer, and a line where they lie.
for (const plot of document.querySelectorAll("svg.plot[data-readout]")) {
  const figures = JSON.parse(plot.dataset.readout);
  const cursor = plot.querySelector(".cursor");
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * plot.viewBox.baseVal.width;
    let nearest = 0;
    figures.x.forEach((at, index) => { if (Math.abs(at - x) < Math.abs(figures.x[nearest] - x)) nearest = index; });
    cursor.setAttribute("x1", figures.x[nearest]);
    cursor.setAttribute("x2", figures.x[nearest]);
    cursor.style.opacity = 0.6;
    const lines = [element("b", "", figures.at[nearest])];
    for (const line of figures.lines) {
      if (line.text[nearest] === null) continue;
      const row = element("span"), key = element("i");
      key.style.background = "var(--c" + line.colour + ")";
      row.append(key, line.name, element("em", "", line.text[nearest]));
      lines.push(row);
    }
    showReadout(event, lines);
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.style.opacity = 0; hideReadout(); });
}

// Rollouts: tokens are drawn when a rollout is first opened; without this script their text stays readable.
const stripsElement = document.getElementById("strips");
const strips = stripsElement ? JSON.parse(stripsElement.textContent) : [];
const tokenFacts = new WeakMap();

function drawStrip(passage, strip, rollout) {
  const isPolicy = passage.classList.contains("completion"), isKept = rollout.classList.contains("kept");
  const parts = [];
  strip.t.forEach((text, index) => {
    if (strip.gap && strip.gap[0] === index) parts.push(element("span", "gap", "… " + strip.gap[1] + " tokens left out …"));
    const isForced = isPolicy && strip.f[index] === 1, isTrained = isPolicy && isKept && !isForced;
    const token = element("span", "tok", text.replaceAll("\n", "⏎\n"));
    token.classList.add(isTrained ? "trained" : "masked");
    if (isPolicy) token.classList.add("policy");
    if (isForced) token.classList.add("forced");
    if (text === "") token.classList.add("rest");
    const why = isTrained ? "trained on, advantage " + (rollout.dataset.advantage || "missing")
      : !isPolicy ? "masked: observed, not sampled" : isForced ? "masked: forced, not sampled" : "not trained on: rollout dropped";
    tokenFacts.set(token, {
      text, why, id: strip.i[index],
      logprob: isPolicy && strip.p ? strip.p[index] : null, entropy: isPolicy && strip.h ? strip.h[index] : null,
    });
    parts.push(token);
  });
  passage.replaceChildren(...parts);
}

function drawRollout(rollout) {
  for (const passage of rollout.querySelectorAll("[data-strip]")) {
    drawStrip(passage, strips[Number(passage.dataset.strip)], rollout);
    passage.removeAttribute("data-strip");
    for (const token of passage.children) colourToken(token);
  }
}

let mode = "mask";

function colourToken(token) {
  const facts = tokenFacts.get(token);
  if (!facts) return;
  const value = mode === "logprob" ? -facts.logprob / 4 : mode === "entropy" ? facts.entropy / 2.5 : 0;
  token.style.setProperty("--heat", Math.min(1, Math.max(0, value)).toFixed(2));
}

for (const rollout of document.querySelectorAll("details.rollout")) {
  if (rollout.open) drawRollout(rollout);
  rollout.addEventListener("toggle", () => { if (rollout.open) drawRollout(rollout); });
}

for (const choice of document.querySelectorAll("input[name=mode]")) {
  choice.addEventListener("change", () => {
    mode = choice.value;
    document.body.className = "mode-" + mode;
    document.querySelectorAll(".tok").forEach(colourToken);
  });
}

function showToken(event) {
  const facts = tokenFacts.get(event.target);
  if (!facts) {
    if (event.target.closest && !event.target.closest("svg.plot")) hideReadout();
    return;
  }
  const row = (name, value) => {
    const line = element("span", "", name);
    line.append(element("em", "", value));
    return line;
  };
  const lines = [element("b", "", JSON.stringify(facts.text)), row("id", String(facts.id))];
  if (facts.logprob !== null) lines.push(row("log-prob", facts.logprob.toFixed(3) + " (p " + Math.exp(facts.logprob).toFixed(3) + ")"));
  if (facts.entropy !== null) lines.push(row("entropy", facts.entropy.toFixed(3) + " nats"));
  lines.push(element("b", "", facts.why));
  showReadout(event, lines);
}
document.addEventListener("pointermove", showToken);
document.addEventListener("pointerdown", showToken);
document.addEventListener("scroll", hideReadout, { passive: true });
