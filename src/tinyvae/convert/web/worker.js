// The two streams: frames to latents to frames, one latent a call. Zeros start a video.
import * as ort from "./ort/ort.wasm.bundle.min.mjs";

ort.env.wasm.wasmPaths = { wasm: new URL("./ort/ort-wasm-simd-threaded.wasm", import.meta.url).href };
// More threads need headers that a plain file server does not send.
ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(8, navigator.hardwareConcurrency || 1) : 1;

const model = await (await fetch("./model.json")).json();
const sessions = {};
for (const side of ["encoder", "decoder"]) {
  sessions[side] = await ort.InferenceSession.create(`./${side}.onnx`, { executionProviders: ["wasm"] });
}

class Stream {
  constructor(side, latentHeight, latentWidth) {
    this.session = sessions[side];
    this.name = this.session.inputNames[0];
    this.output = this.session.outputNames[0];
    this.isHalf = model.dtype === "float16";
    this.sizes = model[side].states.map(([channels, times]) => [1, channels, times * latentHeight, times * latentWidth]);
    this.reset();
  }

  reset() {
    this.states = this.sizes.map((size) => this.tensor(new Float32Array(size.reduce((a, b) => a * b)), size));
  }

  tensor(values, size) {
    return this.isHalf ? new ort.Tensor("float16", Float16Array.from(values), size) : new ort.Tensor("float32", values, size);
  }

  async step(values, size) {
    const feeds = { [this.name]: this.tensor(values, size) };
    this.states.forEach((state, i) => { feeds[`state_${i}`] = state; });
    const made = await this.session.run(feeds);
    this.states = this.states.map((_, i) => made[`next_state_${i}`]);
    return { data: Float32Array.from(made[this.output].data), size: made[this.output].dims };
  }
}

class Video {
  constructor({ height, width, trim }) { // trim: how many first frames are left out, where there are no chunks
    const { space_factor: factor, time_factor: unit, chunk } = model.encoder;
    const [period, leftOut] = chunk ? [chunk.latents * unit, chunk.zeros_before] : [Infinity, trim];
    Object.assign(this, { height, width, unit, chunk, period, leftOut, waiting: [], held: [], numFrames: 0, numRaw: 0 });
    this.encoder = new Stream("encoder", height / factor, width / factor);
    this.decoder = new Stream("decoder", height / factor, width / factor);
  }

  async push(frame) {
    if (this.chunk && this.numFrames % this.chunk.frames === 0) { // every chunk is a video of its own
      this.encoder.reset();
      this.waiting = Array.from({ length: this.chunk.zeros_before }, () => new Float32Array(frame.length));
    }
    this.numFrames += 1;
    this.waiting.push(frame);
    if (this.waiting.length < this.unit) return;
    const values = new Float32Array(this.unit * frame.length);
    this.waiting.forEach((one, i) => values.set(one, i * frame.length));
    this.waiting = [];
    const start = performance.now();
    this.held.push(await this.encoder.step(values, [this.unit, 3, this.height, this.width]));
    this.encodeMs = performance.now() - start;
    const dropped = this.chunk ? this.chunk.last_latents_dropped : 0; // the last ones of the whole video
    while (this.held.length > dropped) await this.decode(this.held.shift());
  }

  async decode(latent) {
    const start = performance.now();
    const made = await this.decoder.step(latent.data, latent.size);
    const decodeMs = performance.now() - start;
    const length = made.data.length / made.size[0];
    const frames = [];
    for (let i = 0; i < made.size[0]; i += 1, this.numRaw += 1) {
      if (this.numRaw % this.period >= this.leftOut) frames.push(made.data.slice(i * length, (i + 1) * length));
    }
    postMessage({ kind: "latent", latent, frames, encodeMs: this.encodeMs, decodeMs }, [latent.data.buffer, ...frames.map((f) => f.buffer)]);
  }

  async flush(last) { // the last frame is repeated until a latent, or a chunk, is complete
    const unit = this.chunk ? this.chunk.frames : this.unit;
    while (this.numFrames % unit) await this.push(last.slice());
  }
}

let video = null;
let last = null;
let turn = Promise.resolve(); // messages are worked on in order

async function handle(message) {
  if (message.kind === "start") {
    video = new Video(message);
  } else if (message.kind === "frame") {
    last = message.frame.slice();
    await video.push(message.frame);
  } else {
    await video.flush(last);
  }
  postMessage({ kind: "done" });
}

onmessage = ({ data }) => {
  turn = turn.then(() => handle(data)).catch((fault) => postMessage({ kind: "fault", text: String(fault.message || fault) }));
};
postMessage({ kind: "ready", threads: ort.env.wasm.numThreads });
