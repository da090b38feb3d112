// Shows a video that is still being made: frames come as JPEGs, in the order of the video, and wait here.
// `element`, `props` and `watch` are gradio's.
const state = { video: null, frames: [], at: 0, playing: true, fps: 12, total: 0, live: false, last: null };

const find = (selector) => element.querySelector(selector);

function receive() {
  let message;
  try { message = JSON.parse(props.value); } catch { return; }
  const isNew = message.video !== state.video;
  if (isNew) Object.assign(state, { video: message.video, frames: [], at: 0, playing: true });
  Object.assign(state, { fps: message.fps, total: message.total, live: message.live });
  state.frames.length = Math.min(state.frames.length, message.start);
  for (const source of message.frames) {
    const picture = new Image();
    picture.src = source;
    state.frames.push(picture);
  }
  state.at = Math.min(state.at, Math.max(0, state.frames.length - 1));
  const canvas = find("canvas");
  if (canvas.dataset.video !== message.video) {
    // Drawn larger than the frames: the browser's smoothing on scaling a canvas is poorer than that of drawing.
    const scale = Math.max(1, Math.round(720 / message.width));
    canvas.width = message.width * scale;
    canvas.height = message.height * scale;
    canvas.dataset.video = message.video;
  }
  if (isNew) element.scrollIntoView({ block: "nearest", behavior: "smooth" });
  element.dataset.frames = state.frames.length;
  element.dataset.video = state.video;
}

function draw() {
  const canvas = find("canvas");
  const picture = state.frames[Math.floor(state.at)];
  if (canvas && picture && picture.complete) {
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  }
  const idle = find(".vg-idle");
  if (idle) idle.hidden = state.frames.length > 0;
  const seek = find("input");
  if (seek) {
    seek.max = Math.max(1, state.total - 1);
    if (document.activeElement !== seek) seek.value = Math.floor(state.at);
    const seconds = (n) => (n / state.fps).toFixed(1);
    find("output").textContent = state.frames.length ? `${seconds(state.at + 1)} / ${seconds(state.frames.length)} s` : "";
    find("button").textContent = state.playing ? "❚❚" : "▶";
  }
}

function tick(now) {
  if (!element.isConnected) return;
  const passed = state.last === null ? 0 : Math.min(0.25, (now - state.last) / 1000);
  state.last = now;
  const newest = state.frames.length - 1;
  if (state.playing && newest >= 0 && state.at < newest) {
    // While frames are being made, playing slows down before it runs dry.
    const ahead = newest - state.at;
    const pace = state.live ? Math.min(1, Math.max(0.35, ahead / state.fps)) : 1;
    state.at = Math.min(newest, state.at + passed * state.fps * pace);
  } else if (state.playing && !state.live && newest >= 0 && newest >= state.total - 1) {
    state.playing = false;
  }
  draw();
  requestAnimationFrame(tick);
}

element.addEventListener("input", (event) => {
  if (event.target.type !== "range") return;
  state.at = Math.min(Number(event.target.value), Math.max(0, state.frames.length - 1));
  state.playing = false;
});
element.addEventListener("click", (event) => {
  if (!event.target.closest("button")) return;
  const atEnd = state.at >= state.frames.length - 1;
  if (!state.playing && atEnd && !state.live) state.at = 0;
  state.playing = !state.playing;
});
watch("value", receive);
requestAnimationFrame(tick);
