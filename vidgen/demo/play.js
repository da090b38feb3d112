// Plays worlds side by side: what is held goes to the server, one request at a time, and pictures come back.
// `element`, `props`, `server` and `watch` are gradio's.
// A key stands for the first of its names that the worlds know: a camera that can't turn slides.
const KEYS = {
  KeyW: ["forward"], ArrowUp: ["forward"], KeyS: ["back"], ArrowDown: ["back"], KeyA: ["left"], KeyD: ["right"],
  ArrowLeft: ["turn left", "left"], ArrowRight: ["turn right", "right"], KeyQ: ["turn left"], KeyE: ["turn right"],
};
const SIGNS = {
  "turn left": ["↺", "←"], forward: ["▲", "W ↑"], "turn right": ["↻", "→"],
  left: ["◀", "A"], back: ["▼", "S ↓"], right: ["▶", "D"],
};
const COLORS = { encode: "#94a3b8", context: "#8b5cf6", denoise: "#0d9488", decode: "#f59e0b", render: "#38bdf8" };
const RECENT = 60;

const state = { token: null, choices: [], fps: 12, frame: 0, inFlight: false, trips: [], held: new Map(), pressed: new Set() };
const find = (selector) => element.querySelector(selector);
const keysOf = () => new Set([...state.held.values(), ...state.pressed]);

function receive() {
  let message;
  try { message = JSON.parse(props.value); } catch { return; }
  Object.assign(state, { token: message.token, choices: message.choices, fps: message.fps, trips: [] });
  release();
  layOut(message);
  show(message);
  find(".vg-play").focus({ preventScroll: true });
  element.scrollIntoView({ block: "nearest", behavior: "smooth" });
}

function layOut(message) {
  const worlds = find(".vg-worlds");
  worlds.replaceChildren();
  worlds.dataset.count = message.worlds.length;
  for (const world of message.worlds) {
    const box = document.createElement("div");
    box.className = "vg-world";
    box.innerHTML = `<h4><b></b><span></span></h4><div class="vg-screen"><canvas width="512" height="512"></canvas></div>
      <div class="vg-stages"></div><div class="vg-legend"></div>`;
    box.querySelector("b").textContent = world.name;
    worlds.append(box);
  }
  const pad = find(".vg-pad");
  pad.replaceChildren();
  const known = Object.keys(SIGNS).filter((name) => state.choices.includes(name));
  const others = state.choices.filter((name) => !(name in SIGNS));
  for (const [names, style] of [[known, known.length === 6 ? "" : " vg-flow"], [others, " vg-flow"]]) {
    if (!names.length) continue;
    const group = document.createElement("div");
    group.className = `vg-keys${style}`;
    for (const name of names) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.key = name;
      button.title = name;
      button.setAttribute("aria-label", name);
      button.textContent = SIGNS[name] ? SIGNS[name][0] : name;
      const hint = document.createElement("small");
      const number = others.indexOf(name) + 1;
      hint.textContent = SIGNS[name] ? SIGNS[name][1] : number <= 9 ? number : "";
      button.append(hint);
      group.append(button);
    }
    pad.append(group);
  }
}

function show(message) {
  state.frame = message.frame;
  const boxes = find(".vg-worlds").children;
  message.worlds.forEach((world, index) => {
    const box = boxes[index];
    if (!box) return;
    const picture = new Image();
    picture.onload = () => {
      const canvas = box.querySelector("canvas");
      const height = Math.round((canvas.width * picture.height) / picture.width);
      if (canvas.height !== height) canvas.height = height;
      const context = canvas.getContext("2d");
      context.imageSmoothingQuality = "high";
      context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    };
    picture.src = world.picture;
    const stages = Object.entries(world.stages).filter(([, ms]) => ms > 0);
    const total = stages.reduce((sum, [, ms]) => sum + ms, 0);
    box.querySelector("span").textContent = total ? `${total.toFixed(0)} ms` : "";
    // A full bar is 200 ms, about where playing begins to feel slow.
    const bars = stages.map(([name, ms]) => {
      const bar = document.createElement("i");
      bar.style.background = COLORS[name] ?? "#64748b";
      bar.style.width = `${(100 * ms) / Math.max(200, total)}%`;
      return bar;
    });
    box.querySelector(".vg-stages").replaceChildren(...bars);
    const words = stages.map(([name, ms]) => {
      const word = document.createElement("span");
      word.style.setProperty("--stage", COLORS[name] ?? "#64748b");
      word.textContent = `${name} ${ms < 10 ? ms.toFixed(1) : ms.toFixed(0)} ms`;
      return word;
    });
    box.querySelector(".vg-legend").replaceChildren(...words);
  });
  element.dataset.frame = state.frame;
  if (message.waited === undefined) return;
  const parts = [`frame ${state.frame}`];
  if (state.trips.length) {
    const sorted = [...state.trips].sort((a, b) => a - b);
    const median = sorted[Math.floor(sorted.length / 2)];
    element.dataset.median = median;
    parts.push(`round trip ${state.trips.at(-1).toFixed(0)} ms, median ${median.toFixed(0)} ms`);
  }
  if (message.waited > 5) parts.push(`waited ${message.waited.toFixed(0)} ms for others`);
  find(".vg-hud").textContent = parts.join(" · ");
  if (message.recorded !== null) {
    const mark = document.createElement("b");
    mark.textContent = ` ● recording, ${message.recorded} frames`;
    find(".vg-hud").append(mark);
  }
}

function light() {
  const keys = keysOf();
  for (const button of element.querySelectorAll(".vg-pad button")) {
    button.classList.toggle("vg-held", keys.has(button.dataset.key));
  }
}

function press(source, name) {
  if (!state.token || !state.choices.includes(name)) return;
  state.held.set(source, name);
  state.pressed.add(name); // a tap that ends before the request leaves counts all the same
  light();
  step();
}

function lift(source) {
  if (state.held.delete(source)) light();
}

function release() {
  state.held.clear();
  state.pressed.clear();
  if (find(".vg-pad")) light();
}

async function step() {
  if (state.inFlight || !state.token) return;
  const keys = keysOf();
  if (!keys.size) return;
  state.inFlight = true;
  state.pressed.clear();
  const token = state.token;
  const began = performance.now();
  try {
    const answer = await server.play_frame({ token, keys: [...keys] });
    if (token === state.token) {
      if (answer.error) {
        release();
        if (answer.gone) state.token = null;
        find(".vg-hud").textContent = answer.error;
      } else {
        state.trips.push(performance.now() - began);
        if (state.trips.length > RECENT) state.trips.shift();
        show(answer);
      }
    }
  } catch (error) {
    release();
    find(".vg-hud").textContent = "The server doesn't answer; press New game.";
  }
  const rest = Math.max(0, 1000 / state.fps - (performance.now() - began));
  setTimeout(() => { state.inFlight = false; light(); step(); }, rest);
}

const isTyping = () => {
  const focus = document.activeElement;
  if (!focus || focus.type === "checkbox") return false;
  return focus.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(focus.tagName);
};
const isVisible = () => element.isConnected && element.offsetParent !== null;

function onKeyDown(event) {
  if (!isVisible() || isTyping() || event.ctrlKey || event.metaKey || event.altKey) return;
  const others = state.choices.filter((name) => !(name in SIGNS));
  const number = /^Digit[1-9]$/.test(event.code) ? Number(event.code.at(-1)) : 0;
  const name = number ? others[number - 1] : KEYS[event.code]?.find((known) => state.choices.includes(known));
  if (!name) return;
  event.preventDefault();
  if (!event.repeat) press(event.code, name);
}

window.addEventListener("keydown", onKeyDown);
window.addEventListener("keyup", (event) => lift(event.code));
// A key that goes up while the window has no focus is never heard of.
window.addEventListener("blur", release);
document.addEventListener("visibilitychange", () => { if (document.hidden) release(); });
element.addEventListener("pointerdown", (event) => {
  const button = event.target.closest(".vg-pad button");
  if (!button) return;
  event.preventDefault();
  press(`pointer ${event.pointerId}`, button.dataset.key);
});
for (const name of ["pointerup", "pointercancel"]) {
  window.addEventListener(name, (event) => lift(`pointer ${event.pointerId}`));
}
element.addEventListener("contextmenu", (event) => { if (event.target.closest(".vg-pad")) event.preventDefault(); });
watch("value", receive);
