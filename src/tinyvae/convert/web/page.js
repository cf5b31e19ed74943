// What the user sees: reads frames of a video, hands them to the worker, draws what comes back.
const byId = (id) => document.getElementById(id);
const model = await (await fetch("./model.json")).json();
const { space_factor: factor, time_factor: unit, latent_channels: channels, chunk } = model.encoder;

byId("model").textContent = `${model.encoder.variant}, for the latents of ${model.teacher}: ` +
  `${(model.parameters / 1e6).toFixed(1)} million parameters, one latent for ${unit} frames of ${factor}x${factor} pixels`;
for (const width of [64, 128, 192, 256, 384, 512].filter((one) => one % factor === 0)) {
  byId("width").append(new Option(`${width}`, `${width}`, false, width === 192));
}

const worker = new Worker("./worker.js", { type: "module" });
const shown = { frames: [], latents: [], decoded: [], fps: 12, height: 0, width: 0, trim: 0, peak: 0, fault: "" };
globalThis.shown = shown; // for the browser's console
let asked = null; // what `ask` waits for
let times = { encode: 0, decode: 0 };

worker.onerror = (event) => refuse(`the worker stopped: ${event.message || "it could not be loaded"}`);
worker.onmessage = ({ data }) => {
  if (data.kind === "ready") {
    say("Ready.");
    document.documentElement.dataset.ready = "true";
  } else if (data.kind === "done") {
    asked.done();
  } else if (data.kind === "latent") {
    shown.latents.push(data.latent);
    for (const value of data.latent.data) shown.peak = Math.max(shown.peak, Math.abs(value));
    shown.decoded.push(...data.frames);
    times.encode += data.encodeMs;
    times.decode += data.decodeMs;
    showFrame(Math.max(0, Math.min(shown.decoded.length, shown.frames.length) - 1));
  } else {
    refuse(data.text);
  }
};

function ask(message, moved = []) { // resolves when the worker has done it, and fails where the worker does
  return new Promise((done, wrong) => {
    asked = { done, wrong };
    worker.postMessage(message, moved);
  });
}

function refuse(text) {
  if (asked) asked.wrong(new Error(text));
  else fail(text);
}

function say(text) {
  byId("status").textContent = text;
  byId("status").classList.remove("wrong");
}

function fail(text) {
  shown.fault = text;
  byId("status").textContent = `Something went wrong: ${text}`;
  byId("status").classList.add("wrong");
  byId("progress").hidden = true;
  busy(false);
}

function busy(is) {
  for (const id of ["file", "example", "width", "fps", "seconds"]) byId(id).disabled = is;
}

const numLatents = (frames) => (chunk
  ? Math.ceil(frames / chunk.frames) * chunk.latents - chunk.last_latents_dropped
  : Math.ceil(frames / unit));

// reading

function toPlanes(canvas) {
  const { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const planes = new Float32Array(3 * width * height);
  for (let i = 0; i < width * height; i += 1) {
    for (let c = 0; c < 3; c += 1) planes[c * width * height + i] = pixels[4 * i + c] / 255;
  }
  return planes;
}

async function seek(video, seconds) {
  await new Promise((done, wrong) => {
    video.onseeked = done;
    video.onerror = () => wrong(new Error("this browser cannot read the video"));
    video.currentTime = seconds;
  });
}

async function openVideo(file) {
  const video = document.createElement("video");
  video.muted = true;
  video.preload = "auto";
  video.src = URL.createObjectURL(file);
  await new Promise((done, wrong) => {
    video.onloadeddata = done;
    video.onerror = () => wrong(new Error(`this browser cannot play ${file.name}`));
  });
  return {
    ratio: video.videoHeight / video.videoWidth,
    seconds: video.duration,
    bytesPerSecond: file.size / video.duration,
    draw: async (canvas, seconds) => {
      await seek(video, Math.min(seconds, video.duration - 0.001));
      canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
    },
    close: () => URL.revokeObjectURL(video.src),
  };
}

function drawnExample() {
  const draw = async (canvas, seconds) => {
    const g = canvas.getContext("2d");
    const { width: w, height: h } = canvas;
    const sky = g.createLinearGradient(0, 0, 0, h);
    sky.addColorStop(0, "#20488c");
    sky.addColorStop(1, "#f3b37a");
    g.fillStyle = sky;
    g.fillRect(0, 0, w, h);
    g.fillStyle = "#ffe9a8";
    g.beginPath();
    g.arc(w * (0.2 + 0.25 * seconds), h * 0.35, h * 0.12, 0, 7);
    g.fill();
    ["#3c5a3a", "#2a4030"].forEach((color, row) => {
      g.fillStyle = color;
      g.beginPath();
      g.moveTo(0, h);
      for (let x = 0; x <= w; x += 2) g.lineTo(x, h * (0.7 + 0.12 * row + 0.07 * Math.sin(x / w * 9 + row * 2 + seconds * (row + 1))));
      g.lineTo(w, h);
      g.fill();
    });
  };
  return { ratio: 0.5625, seconds: Infinity, bytesPerSecond: null, draw, close: () => {} };
}

// one video through the model

function number(id, low, high) {
  const value = Number(byId(id).value);
  return Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : low;
}

async function work(open) {
  busy(true);
  let source = null;
  try {
    say("Reading the video.");
    source = await open();
    const width = Number(byId("width").value);
    const height = Math.max(factor, Math.round(width * source.ratio / factor) * factor);
    const fps = number("fps", 1, 60);
    const count = Math.max(1, Math.floor(Math.min(number("seconds", 0.1, 60), source.seconds) * fps));
    const keepsAll = model.encoder.frame_rule === "even_keeps_all" && numLatents(count) % 2 === 0;
    const trim = keepsAll ? 0 : model.encoder.trim;
    Object.assign(shown, { frames: [], latents: [], decoded: [], fps, height, width, trim, peak: 0, fault: "" });
    times = { encode: 0, decode: 0 };
    for (const id of ["original", "decoded"]) Object.assign(byId(id), { width, height });
    byId("pictures").hidden = byId("progress").hidden = false;
    byId("player").hidden = byId("numbers").hidden = true;
    await ask({ kind: "start", height, width, trim });
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    canvas.getContext("2d", { willReadFrequently: true }); // the first call decides
    for (let i = 0; i < count; i += 1) {
      await source.draw(canvas, (i + 0.5) / fps);
      const frame = toPlanes(canvas);
      shown.frames.push(frame);
      drawFrame("original", frame);
      const sent = frame.slice();
      await ask({ kind: "frame", frame: sent }, [sent.buffer]);
      byId("progress").value = (i + 1) / count;
      say(`Frame ${i + 1} of ${count}: ${shown.latents.length} latents, ${shown.decoded.length} frames decoded.`);
    }
    await ask({ kind: "end" });
    finish(source);
  } catch (fault) {
    fail(fault.message);
  } finally {
    asked = null;
    if (source) source.close();
    busy(false);
  }
}

function finish(source) {
  shown.decoded = shown.decoded.slice(0, shown.frames.length);
  byId("progress").hidden = true;
  byId("player").hidden = byId("numbers").hidden = false;
  byId("frame").max = shown.decoded.length - 1;
  showFrame(0);
  const seconds = shown.frames.length / shown.fps;
  const pixels = 3 * shown.width * shown.height * shown.fps;
  const halfLatents = 2 * shown.latents[0].data.length * shown.latents.length / seconds;
  const rows = [["pixels, 8 bit", pixels], ["latents, 16 bit", halfLatents], ["latents, 8 bit", halfLatents / 2]];
  if (source.bytesPerSecond) rows.push(["the video file, at its own size", source.bytesPerSecond]);
  byId("rates").replaceChildren(...rows.map(([what, rate]) => {
    const row = document.createElement("tr");
    for (const text of [what, Math.round(rate).toLocaleString("en"), `1/${(pixels / rate).toFixed(1)}`]) {
      row.append(Object.assign(document.createElement("td"), { textContent: text }));
    }
    return row;
  }));
  const per = shown.latents.length * unit;
  byId("quality").textContent = `Decoded against the video: ${psnr().toFixed(2)} dB. ` +
    `Encoding took ${(times.encode / per).toFixed(0)} ms a frame, decoding ${(times.decode / per).toFixed(0)} ms.`;
  say(`Done: ${shown.frames.length} frames of ${shown.width}x${shown.height}, ${shown.latents.length} latents, ` +
    `${shown.decoded.length} frames decoded.`);
  document.documentElement.dataset.done = "true";
}

function psnr() {
  let sum = 0;
  let count = 0;
  shown.decoded.forEach((frame, i) => {
    for (let k = 0; k < frame.length; k += 1) sum += (frame[k] - shown.frames[i][k]) ** 2;
    count += frame.length;
  });
  return -10 * Math.log10(Math.max(sum / count, 1e-12));
}

// drawing

function drawFrame(id, planes) {
  const { width, height } = shown;
  const image = new ImageData(width, height);
  for (let i = 0; i < width * height; i += 1) {
    for (let c = 0; c < 3; c += 1) image.data[4 * i + c] = 255 * planes[c * width * height + i] + 0.5;
    image.data[4 * i + 3] = 255;
  }
  byId(id).getContext("2d").putImageData(image, 0, 0);
}

function drawLatent({ data, size }) {
  const [, , h, w] = size;
  const across = Math.ceil(Math.sqrt(channels * h * shown.width / (w * shown.height)));
  const down = Math.ceil(channels / across);
  const canvas = Object.assign(byId("latents"), { width: across * (w + 1) - 1, height: down * (h + 1) - 1 });
  const g = canvas.getContext("2d");
  for (let c = 0; c < channels; c += 1) {
    const tile = new ImageData(w, h);
    for (let i = 0; i < h * w; i += 1) {
      const gray = 127.5 * (1 + data[c * h * w + i] / (shown.peak || 1)); // 0 is middle gray
      tile.data.fill(gray, 4 * i, 4 * i + 3);
      tile.data[4 * i + 3] = 255;
    }
    g.putImageData(tile, (c % across) * (w + 1), Math.floor(c / across) * (h + 1));
  }
}

function latentOf(frame) { // the latent that frame comes from
  const place = chunk ? frame + chunk.zeros_before * (1 + Math.floor(frame / chunk.frames)) : frame + shown.trim;
  return shown.latents[Math.min(shown.latents.length - 1, Math.floor(place / unit))];
}

function showFrame(place) {
  if (!shown.decoded[place] || !shown.frames[place]) return;
  drawFrame("original", shown.frames[place]);
  drawFrame("decoded", shown.decoded[place]);
  drawLatent(latentOf(place));
  byId("frame").value = place;
  byId("place").textContent = `${place + 1} / ${shown.decoded.length}`;
}

// controls

let playing = null;
function stop() {
  clearInterval(playing);
  playing = null;
  byId("play").textContent = "Play";
}
byId("play").onclick = () => {
  if (playing) return stop();
  byId("play").textContent = "Pause";
  playing = setInterval(() => showFrame((Number(byId("frame").value) + 1) % shown.decoded.length), 1000 / shown.fps);
};
byId("frame").oninput = () => { stop(); showFrame(Number(byId("frame").value)); };
byId("example").onclick = () => { stop(); work(async () => drawnExample()); };
byId("file").onclick = () => { byId("file").value = ""; }; // the same file can be chosen again, with other settings
byId("file").onchange = () => { stop(); if (byId("file").files[0]) work(() => openVideo(byId("file").files[0])); };
const drop = byId("drop");
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
    const file = name === "drop" && event.dataTransfer.files[0];
    if (file && !byId("file").disabled) { stop(); work(() => openVideo(file)); }
  });
}
