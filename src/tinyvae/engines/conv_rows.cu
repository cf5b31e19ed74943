// 3x3 convolution of 64 to 64 channels, over one frame or over two (x_t and x_{t-1}), row by row: the three convolutions
// of a memory block with 64 channels. Bias, residual and activation are inside.
//
// Pixels are the rows of the matrix instruction (M = 64). Its columns are three output rows of 64 channels (N = 192):
// an input row adds to the output rows above it, beside it and below it. So a step takes one input row with its three
// horizontal taps (K = 3 x 64 of each frame), and then the output row above is complete. It is written, and the sums of
// the other two move up. An input row is loaded once and read once per horizontal tap, not nine times.
//
// The 64 pixels of a step are eight columns of eight pixels, each with a pixel more on both sides. A column is a start
// address for the instruction, so the eight need not be neighbors: a strip takes the next eight of all columns of all
// frames, and widths that are a multiple of 8 waste nothing.
// Weights (72 KiB for each frame) stay in shared memory. Their columns are ordered so that a thread's results are
// neighboring channels: it writes 16 bytes at once, without a way through shared memory.
// The loading warps fill a ring of steps for each of two computing warpgroups, which take turns at the tensor cores:
// one writes while the other multiplies. Each warpgroup has an equal share of the rows of all strips; each part of a
// strip computes up to two rows more. Where there are few rows, one warpgroup of each block has none.
//
// Compiled behind instructions.cu, whose functions it uses; conv_rows.py passes the constants.

__device__ __forceinline__ uint4 read16(const char* from, bool exists) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"((u32)exists));
  return v;
}

#define COLUMN 160                      // bytes of ten pixels, 8 channels of each
#define PLANE (8 * COLUMN + 16)         // eight columns; 16 more: the eight chunks of a pixel fall on different banks
#define ROW_BYTES (8 * PLANE)
#define STEP_BYTES (SOURCES * ROW_BYTES)
#define TAPS (3 * SOURCES)
#define TAP_BYTES (3 * WEIGHT_TILE)     // [8-channel chunk][3 rows of 64 outputs][16 bytes]
#define RING_AT (TAPS * TAP_BYTES)
#define BIAS_AT (RING_AT + 2 * RING * STEP_BYTES)
#define BARRIERS_AT (BIAS_AT + 256)

struct Rows {
  int frames_per_video, frames, height, width;
  int columns;  // of eight pixels, in a frame
  int stacked;  // output frames that share a pixel's channels (1: none)
  int rows;     // of all strips together
  int share;    // rows of each warpgroup
  int members;  // computing warpgroups of a block that have rows: 2, or 1 where there are few rows
  float slope;  // of the activation below zero: 0 is ReLU, 1 is none
};
__device__ __forceinline__ int first_row(const Rows& s, int member) {
  return member < s.members ? (blockIdx.x * s.members + member) * s.share : s.rows;
}
struct Part {  // of a strip: `count` output rows from row `top`
  int strip, top, count;
};
__device__ __forceinline__ Part part_at(int row, int stop, int height) {
  return {row / height, row % height, min(height - row % height, stop - row)};
}
// A part starts with the input row above it, where there is one, and ends with the row below it.
__device__ __forceinline__ int start_of(Part part) { return max(part.top - 1, 0); }
__device__ __forceinline__ int steps_of(int first, int stop, int height) {
  if (first >= stop) return 0;
  return stop - first + (stop - 1) / height - first / height + 1 + (first % height > 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_rows(
    const char* x, const char* past, const char* weights, const float* bias, const char* residual, char* out, char* last,
    Rows s) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = smem_address(shared), bars = base + BARRIERS_AT;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const i64 row_bytes = (i64)s.width * 128, frame_bytes = row_bytes * s.height;
  let_next_start();
  if (thread == 0) rings_init(bars);
  if (thread < 64) ((float*)(shared + BIAS_AT))[thread] = bias[thread];
  __syncthreads();

  if (thread < 128) {
    fewer_registers();
    if (thread == 0) {
      barrier_expect(WEIGHTS_FULL, RING_AT);
      for (int i = 0; i < 3 * TAPS; i++) load_weights(base + i * WEIGHT_TILE, weights + i * WEIGHT_TILE, WEIGHTS_FULL);
    }
    wait_for_others();
    // Two warps for each warpgroup: eight threads for a column read the 128 bytes of its ten pixels.
    const int member = warp >> 1, place = (thread >> 3) & 7, chunk = thread & 7;
    const int first = first_row(s, member), stop = min(s.rows, first + s.share);
    int turn = 0;
    for (int row = first; row < stop;) {
      const Part part = part_at(row, stop, s.height);
      row += part.count;
      const int column = part.strip * 8 + place, frame = column / s.columns, left = column % s.columns * 8 - 1;
      const char* from[SOURCES];
      bool exists[SOURCES];
      from[0] = x + frame * frame_bytes;
      exists[0] = frame < s.frames;
#if SOURCES == 2
      from[1] = from[0] - frame_bytes;
      exists[1] = exists[0];
      if (frame % s.frames_per_video == 0) {
        from[1] = past + frame / s.frames_per_video * frame_bytes;
        exists[1] = exists[0] && past;
      }
#endif
      const i64 in_frame = start_of(part) * row_bytes + left * 128 + chunk * 16;
      for (int source = 0; source < SOURCES; source++) from[source] += in_frame;
      for (int y = start_of(part); y <= part.top + part.count; y++, turn++) {
        const u32 to = base + RING_AT + (member * RING + turn % RING) * STEP_BYTES + chunk * PLANE + place * COLUMN;
        barrier_wait(EMPTY(member, turn), ((turn / RING) & 1) ^ 1);
#pragma unroll
        for (int source = 0; source < SOURCES; source++) {
#pragma unroll
          for (int i = 0; i < 10; i++) {
            const bool inside = exists[source] && y < s.height && (u32)(left + i) < (u32)s.width;
            copy16(to + source * ROW_BYTES + i * 16, inside ? from[source] + i * 128 : x, inside);
          }
          from[source] += row_bytes;
        }
        copies_commit();
        copies_wait<ON_THE_WAY>();
        if (turn >= ON_THE_WAY) barrier_arrive(FULL(member, turn - ON_THE_WAY));
      }
    }
    copies_wait<0>();
    for (int last = max(turn - ON_THE_WAY, 0); last < turn; last++) barrier_arrive(FULL(member, last));
    return;
  }

  more_registers();
  const int member = (warp >> 2) - 1, quarter = warp & 3;
  const int first = first_row(s, member), stop = min(s.rows, first + s.share), other = first_row(s, 1 - member);
  const int steps = steps_of(first, stop, s.height), other_steps = steps_of(other, min(s.rows, other + s.share), s.height);
  // A thread has the channels 0..7 and 32..39 from its own first one, of two pixels: `lane / 4` of two columns.
  const int channel = (lane & 3) * 8;
  const float* offset = (const float*)(shared + BIAS_AT) + channel;  // there, because registers are few
  const bool adds = SOURCES == 1 && residual;  // only the last convolution of a block
  int turn = 0;
  wait_for_others();
#if SOURCES == 2
  if (last)  // while the first rows are on their way
    keep_last(last, x, s.frames / s.frames_per_video, s.frames_per_video, frame_bytes,
              blockIdx.x * 256 + thread - 128, gridDim.x * 256);
#endif
  barrier_wait(WEIGHTS_FULL, 0);
  if (member == 1) turn_pass(1);
  for (int row = first; row < stop;) {
    const Part part = part_at(row, stop, s.height);
    row += part.count;
    bool exists[2];
    const char* add[2];
    char* to[2];
#pragma unroll
    for (int pixel = 0; pixel < 2; pixel++) {
      const int column = part.strip * 8 + quarter * 2 + pixel, frame = column / s.columns;
      const int xx = column % s.columns * 8 + (lane >> 2);
      exists[pixel] = frame < s.frames && xx < s.width;
      add[pixel] = residual + frame * frame_bytes + part.top * row_bytes + xx * 128 + channel * 2;
      to[pixel] = out + (frame / s.stacked * frame_bytes + part.top * row_bytes + xx * 128) * s.stacked +
                 frame % s.stacked * 128 + channel * 2;
    }
    // What the steps before gave to the output rows above and beside, with the bias: [row][64 channels] of two pixels.
    // Apart from the accumulators: where those move, ptxas (CUDA 13.0) waits after each matrix instruction.
    float kept[64];
#pragma unroll
    for (int i = 0; i < 64; i++) kept[i] = offset[((i >> 4) & 1) * 32 + ((i >> 2) & 3) * 2 + (i & 1)];
    for (int y = start_of(part); y <= part.top + part.count; y++, turn++) {
      const bool writes = y > part.top;
      barrier_wait(FULL(member, turn), (turn / RING) & 1);
      float acc[96];  // [output row: above, beside, below][64 channels]
      turn_wait(member);
      wgmma_fence();
#pragma unroll
      for (int tap = 0; tap < TAPS; tap++) {
        const u32 pixels = base + RING_AT + (member * RING + turn % RING) * STEP_BYTES + tap / 3 * ROW_BYTES;
#pragma unroll
        for (int k = 0; k < 4; k++)
          wgmma_tile(acc, descriptor(pixels + tap % 3 * 16 + k * 2 * PLANE, PLANE, COLUMN),
                     descriptor(base + tap * TAP_BYTES + k * 6144, 3072, 128), tap + k > 0);
        if (tap >= TAPS - 2) wgmma_commit();
      }
      uint4 more[2][2];
      if (adds && writes) {
#pragma unroll
        for (int pixel = 0; pixel < 2; pixel++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            more[pixel][half] = read16(add[pixel] + half * 64, exists[pixel]);
      }
      wgmma_wait<1>();  // the other warpgroup starts when the last tap of this one is left
      if (turn + 1 < max(steps, other_steps) || member == 0) turn_pass(member);
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(EMPTY(member, turn));
      if (writes) {
#pragma unroll
        for (int pixel = 0; pixel < 2; pixel++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const u32 words[4] = {more[pixel][half].x, more[pixel][half].y, more[pixel][half].z, more[pixel][half].w};
            u32 v[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
              const int i = (half * 4 + n) * 4 + pixel * 2;
              float lo = kept[i] + acc[i], hi = kept[i + 1] + acc[i + 1];
              if (adds) { lo += low(words[n]); hi += high(words[n]); }
              v[n] = pack(fmaxf(lo, s.slope * lo), fmaxf(hi, s.slope * hi));
            }
            if (exists[pixel]) *(uint4*)(to[pixel] + half * 64) = make_uint4(v[0], v[1], v[2], v[3]);
          }
          add[pixel] += row_bytes;
          to[pixel] += row_bytes * s.stacked;
        }
      }
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float2 start = *(const float2*)(offset + (n >> 2) * 32 + (n & 3) * 2);
#pragma unroll
        for (int i = n * 4; i < n * 4 + 4; i++) {
          kept[i] = kept[i + 32] + acc[i + 32];
          kept[i + 32] = acc[i + 64] + (i & 1 ? start.y : start.x);
        }
      }
    }
  }
  for (; turn < other_steps; turn++) {  // so that the other warpgroup gets its turns
    turn_wait(member);
    if (turn + 1 < other_steps || member == 0) turn_pass(member);
  }
}
