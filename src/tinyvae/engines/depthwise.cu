// The two depthwise 7x7 convolutions of a super block in one pass, on tensor cores (compute capability 8.0 and more).
//
// Why tensor cores: 49 multiply-adds a value in float32 would take twice as long as moving the bytes. So a row of pixels
// is multiplied by a band matrix. For one channel and one row of taps, the 8 outputs of a row see 14 inputs:
// out[n] = sum over k of in[k] * band[k][n] with band[k][n] = tap[k - n], 16 x 8 with two rows of zeros. That is one
// instruction of m16n8k16; its 16 rows are 16 strips, all of the same channel. Sums are float32.
//
// A strip is 8 output columns and `strip_height` output rows of one frame. A block of threads takes 16 strips and 16
// channels at a time and goes down their rows; each input row is loaded once and serves the seven rows of taps. A sum
// moves one place with every row (the instruction reads one register and writes another), and leaves after seven rows:
// no sum is ever cleared, because what remains of the strips before has left when the first row is stored.
// A warp computes two channels of one convolution: warps 0-7 `depth`, 8-15 `past_depth`.
//
// Inside shared memory, pixels lie as [channel][strip][pair of neighbor columns], because the instruction wants two
// neighbors of one channel in one register, and results as [pair of channels][pixel]. The strides make every access free
// of bank conflicts. Threads 0-255 load even rows, the others odd ones, each three rows ahead.
//
// Frames are NTHWC. Compiled behind instructions.cu. An infinite value makes the 16 columns around it not a number,
// because zeros of the band multiply it too.

#define STRIPS 16
#define TAPS 7
#define PAIRS 8                        // of neighbor columns of a strip with its halo; the last one only meets zeros
#define CHANNEL_WORDS (STRIPS * PAIRS)
#define HALF_WORDS (8 * CHANNEL_WORDS + 16)  // of 8 channels; the 16 shift the banks
#define RESULT_WORDS (128 + 4)               // of a pair of channels; the 4 shift the banks

__device__ __forceinline__ void mma(float* d, uint4 a, uint2 b, const float* c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// `words` counts 16 bytes, 8 channels, as every offset into a tensor does here.
struct Shape { u32 frames_per_video, height, width, words, tiles_x, strips_y, strip_height, strips, walkers; };

// Where a strip lies; strips are counted along a row, then down the frame, then over the frames.
struct Strip {
  u32 frame, top, left;
  bool exists;
  __device__ __forceinline__ Strip(const Shape& s, u32 number) {
    u32 row = number / s.tiles_x;
    left = (number - row * s.tiles_x) * 8;
    frame = row / s.strips_y;
    top = (row - frame * s.strips_y) * s.strip_height;
    exists = number < s.strips;
  }
};

// What a thread loads of each second row: two neighbor pixels of one strip, 8 channels.
struct Loader {
  int first;  // offset of the left pixel in the strip's first row with its halo,
  int top;    // and that row; both may lie outside of the frame
  bool left_exists, right_exists;
  uint4 left, right;

  __device__ __forceinline__ void aim(const Shape& s, u32 number, u32 pair) {
    Strip strip(s, number);
    int column = (int)(strip.left + 2 * pair) - 3;
    bool wanted = strip.exists && pair < PAIRS - 1;
    left_exists = wanted && (u32)column < s.width;
    right_exists = wanted && (u32)(column + 1) < s.width;
    top = (int)strip.top - 3;
    first = (((int)(strip.frame * s.height) + top) * (int)s.width + column) * (int)s.words;
  }
  __device__ __forceinline__ void fetch(const Shape& s, const uint4* x, u32 row) {
    left = right = make_uint4(0, 0, 0, 0);
    if ((u32)(top + (int)row) >= s.height) return;
    const uint4* place = x + (first + (int)(row * s.width * s.words));
    if (left_exists) left = place[0];
    if (right_exists) right = place[s.words];
  }
  __device__ __forceinline__ void put(u32* target) const {
    const u32 a[4] = {left.x, left.y, left.z, left.w}, b[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      target[2 * i * CHANNEL_WORDS] = __byte_perm(a[i], b[i], 0x5410);
      target[(2 * i + 1) * CHANNEL_WORDS] = __byte_perm(a[i], b[i], 0x7632);
    }
  }
};

// Where a thread writes: one pixel of each row of a strip, 8 channels of one convolution. `past_depth` of a frame belongs
// to the next frame, that of a video's last frame to `last`. The threads of `depth` also put `past` (null: zeros) into a
// video's first frame.
struct Writer {
  u32 target, pitch;  // in `both`, or in `last`
  u32 past;           // in `past` or in `last`
  u32 rows;           // how many of the strip's rows lie in the frame
  bool is_first, is_last;

  __device__ __forceinline__ void aim(const Shape& s, u32 number, u32 column, bool is_past) {
    Strip strip(s, number);
    u32 x = strip.left + column, video = strip.frame / s.frames_per_video;
    u32 frame = strip.frame - video * s.frames_per_video;
    rows = strip.exists && x < s.width ? min(s.strip_height, s.height - strip.top) : 0;
    is_first = !is_past && frame == 0;
    is_last = is_past && frame + 1 == s.frames_per_video;
    past = ((video * s.height + strip.top) * s.width + x) * s.words;
    pitch = (is_last ? 1 : 2) * s.words * s.width;
    target = is_last ? past : (((strip.frame + is_past) * s.height + strip.top) * s.width + x) * 2 * s.words;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) super_depthwise(
    const uint4* x, const uint4* before, const uint2* bands, uint4* both, uint4* last, Shape s) {
  __shared__ __align__(16) u32 pixels[2][2 * HALF_WORDS];
  __shared__ __align__(16) u32 results[2][16 * RESULT_WORDS];  // 8 pairs of channels of each convolution
  const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const u32 channel_blocks = s.words / 2, channel_block = blockIdx.x % channel_blocks;
  const u32 walker = blockIdx.x / channel_blocks, rows = s.strip_height + TAPS - 1;
  const u32 steps = ((s.strips + STRIPS - 1) / STRIPS - walker + s.walkers - 1) / s.walkers * rows;
  const bool is_past = warp >= 8, has_past = before != nullptr;

  // This thread's part in loading and storing, ...
  const u32 half = lane & 1, pair = lane >> 1 & 7, loaded_strip = (warp & 7) + 8 * (lane >> 4);
  const u32 pixel = (thread & 255) >> 1, word = channel_block * 2 + half;
  const u32 put_at = half * HALF_WORDS + (warp & 7) * 16 + (pair & 3) * 4 + (pair >> 2) * 2 + (lane >> 4);
  const u32 read_at = (is_past * 8 + 4 * half) * RESULT_WORDS + pixel;
  x += word, before += word, last += word, both += word + is_past * s.words;
  // ... and in computing: two channels. The four words of a thread are strips g and g + 8, pairs j and j + 4.
  const u32 source_at = (warp >> 2 & 1) * HALF_WORDS + (warp & 3) * 2 * CHANNEL_WORDS + lane * 4;
  const u32 result_at = warp * RESULT_WORDS + (lane >> 2) * 8 + 2 * (lane & 3);
  uint2 band[2][TAPS];
  float sum[2][TAPS][4];
  const float zero[4] = {0, 0, 0, 0};
#pragma unroll
  for (int e = 0; e < 2; e++)
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
      u32 channel = is_past * 8 * s.words + channel_block * 16 + 2 * (warp & 7) + e;
      band[e][tap] = bands[(channel * TAPS + tap) * 32 + lane];
#pragma unroll
      for (int i = 0; i < 4; i++) sum[e][tap][i] = 0;
    }

  let_next_start();
  wait_for_others();
  Loader loader;
  loader.aim(s, walker * STRIPS + loaded_strip, pair);
  loader.fetch(s, x, is_past);  // row 0 or 1
  if (!is_past) {
    loader.put(pixels[0] + put_at);
    loader.fetch(s, x, 2);
  }
  Writer writer;
  writer.aim(s, walker * STRIPS + pixel / 8, pixel % 8, is_past);
  u32 load_row = 3, load_group = walker;  // what the next step loads
  int row = -1;                           // what it stores: the row of the step before
  u32 group = walker;
#pragma unroll 1
  for (u32 step = 0; step <= steps; step++) {
    __syncthreads();
    const u32 odd = step & 1;
    if (is_past != odd) {  // these threads have the next row; the others have the one after it
      loader.put(pixels[!odd] + put_at);
      if (load_row < 2) loader.aim(s, load_group * STRIPS + loaded_strip, pair);
      loader.fetch(s, x, load_row);
    }
    if (++load_row == rows) load_row = 0, load_group += s.walkers;
    const u32 out_row = row - (TAPS - 1);  // a large number in the first six rows
    const bool stores = out_row < writer.rows;
    uint4 past = make_uint4(0, 0, 0, 0);
    if (stores && writer.is_first && has_past) past = before[writer.past + out_row * s.words * s.width];
    if (step < steps) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const uint4 a = *(const uint4*)(pixels[odd] + source_at + e * CHANNEL_WORDS);
#pragma unroll
        for (int tap = TAPS - 1; tap > 0; tap--) mma(sum[e][tap], a, band[e][tap], sum[e][tap - 1]);
        mma(sum[e][0], a, band[e][0], zero);
      }
      const float *even = sum[0][TAPS - 1], *next = sum[1][TAPS - 1];
      u32* target = results[odd] + result_at;
      *(uint2*)target = make_uint2(pack(even[0], next[0]), pack(even[1], next[1]));
      *(uint2*)(target + 64) = make_uint2(pack(even[2], next[2]), pack(even[3], next[3]));  // strips 8-15
    }
    if (stores) {
      const u32* made = results[!odd] + read_at;
      uint4* target = (writer.is_last ? last : both) + (writer.target + out_row * writer.pitch);
      *target = make_uint4(made[0], made[RESULT_WORDS], made[2 * RESULT_WORDS], made[3 * RESULT_WORDS]);
      if (writer.is_first) target[s.words] = past;
    }
    if (++row == (int)rows) {
      row = 0, group += s.walkers;
      writer.aim(s, group * STRIPS + pixel / 8, pixel % 8, is_past);
    }
  }
}
