// The first convolution of an encoder and the pooling layer behind it in one kernel, for patches of 1 and 2: from the
// image N 3 H W over pixel-unshuffle, 3x3 to 64 channels, bias, activation, and a 3x3 with stride 2 over two frames of
// 64 channels to N/2 H/2 W/2 64, H and W in patches. What lies between them, the largest frames of the encoder, stays
// in shared memory: they would be written once and read once, 128 bytes for each patch against 6 or 24 of the image.
//
// Three warpgroups. Two are makers, one for each frame of a pair: they make hidden rows as first_rows.cu does, 128
// pixels at a time, and put them into shared memory, rounded as a layer's result is. The third one pools: 64 pixels are
// the rows of its matrix instruction. An even hidden row has the middle taps of one pooled row (N = 64); an odd one has
// the lower taps of that row and the upper taps of the next one (N = 128), so each hidden row is made once and read
// once for each horizontal tap. There is room for one hidden row of each frame: while one is pooled, the other one is
// written. A hidden row lies there as [8-channel chunk][even columns, odd columns][16 bytes]: with stride 2 a
// horizontal tap is then a start address, and the odd columns on both sides of an even one are neighbors.
//
// A strip has 60 (PATCH 1) or 62 pooled pixels, so that its image rows begin at a multiple of 16 bytes; it computes 64.
// Each block has an equal share of the rows of all strips; a part of a strip that does not begin at the top makes one
// hidden row more. Both layers' weights (150 or 162 KiB) stay in shared memory. H and W must be even.
//
// Compiled behind instructions.cu and first_rows.cu, whose functions it uses; first_pool.py passes the constants.

__device__ __forceinline__ void wgmma_narrow(float* d, u64 a, u64 b, u32 add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0; "
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
    "%32, %33, p, 1, 1, 0, 0; }"
    : D8(0), D8(8), D8(16), D8(24) : "l"(a), "l"(b), "r"(add));
}
__device__ __forceinline__ u64 fresh(u64 v) {  // so that what is computed of it is not kept in registers over a loop
  asm volatile("" : "+l"(v)); return v;
}
__device__ __forceinline__ void store16(u32 to, const u32* v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
__device__ __forceinline__ void stores_visible() {  // to the matrix instruction of another warpgroup
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void maker_sync(int member) {  // the four warps of a maker
  asm volatile("bar.sync %0, 128;" :: "r"(1 + member) : "memory");
}

#define RING (3 + AHEAD)                 // rows of patches in shared memory for each maker; a power of two
#define CHUNKS (16 * PATCH + 2)          // of 8 values: 128 patches, and 8 values more on both sides
#define LINE_BYTES (CHUNKS * 16)
#define LINES (3 * PATCH)                // [color][row of the patch]
#define LOADS ((LINES * CHUNKS + 127) / 128)  // of a thread for a row of patches
#define SLOT_BYTES (LINES * LINE_BYTES)
#define STEPS (PATCH == 1 ? 1 : 3)       // of the matrix instruction for a row of patches
#define FRAME_WEIGHTS (9 * WEIGHT_TILE)  // of a pooling layer, for one frame: [even rows' 3 taps][odd rows' 3 taps]
#define FIRST_AT (2 * FRAME_WEIGHTS)
#define HIDDEN_AT (FIRST_AT + 3 * STEPS * 2048)
#define ODD_COLUMNS 1024                 // bytes of 64 pixels, 8 channels of each
#define CHUNK_BYTES 2080                 // 64 and 65 pixels; 16 more: four chunks of a pixel fall on different banks
#define HIDDEN_BYTES (8 * CHUNK_BYTES)
#define RINGS_AT (HIDDEN_AT + 2 * HIDDEN_BYTES)
#define BARRIERS_AT (RINGS_AT + 2 * RING * SLOT_BYTES)
#define FULL(member) (bars + 8 * (member))
#define EMPTY(member) (bars + 16 + 8 * (member))

struct Pool {
  int pairs, height, width;  // of the hidden frames: in patches
  int strips;                // of a frame
  int rows;                  // pooled rows of all strips together
  int share;                 // rows of each block
  float slope;               // of the activation below zero: 0 is ReLU
};
struct Part {  // of a strip: `count` pooled rows from row `top`, pooled pixels from `left`
  int pair, left, top, count;
};
__device__ __forceinline__ Part part_at(int row, int stop, const Pool& s) {
  const int height = s.height / 2, strip = row / height, top = row % height;
  return {strip / s.strips, strip % s.strips * STRIP, top, min(height - top, stop - row)};
}
// A part starts with the odd hidden row above it, where there is one.
__device__ __forceinline__ int start_of(Part part) { return max(2 * part.top - 1, 0); }

// Row `y` of patches into its place of the ring: `at` has the places of the thread's pieces of 16 bytes in row 0 of the
// frame, -1 outside of it. Rows outside the image are zeros.
__device__ __forceinline__ void load_row(u32 ring, const char* frame, const int* at, const Pool& s, int y, int thread) {
  const u32 row = y * s.width * PATCH * PATCH * 2, slot = ring + (y + 1 & RING - 1) * SLOT_BYTES;
#pragma unroll
  for (int i = 0; i < LOADS; i++) {
    const bool inside = at[i] >= 0 && (u32)y < (u32)s.height;
    if (i * 128 + thread < LINES * CHUNKS)
      copy16(slot + (i * 128 + thread) * 16, frame + (inside ? at[i] + row : 0), inside);
  }
}

// The left factor of step `step` for two pixels of the thread, `lane / 4` and + 8 of the even or the odd columns.
__device__ __forceinline__ void read_step(u32* a, u32 at, int step, bool odd) {
#pragma unroll
  for (int pixel = 0; pixel < 2; pixel++, at += 32 * PATCH) {
#if PATCH == 1  // the run of an even column begins within a word
    const u32 first = read4(at), second = read4(at + 4);
    a[pixel] = odd ? first : first >> 16 | second << 16;
    a[pixel + 2] = odd ? second & 0xffff : second >> 16;
#else
    a[pixel] = read4(at + step * 2 * LINE_BYTES);
    a[pixel + 2] = read4(at + (step * 2 + 1) * LINE_BYTES);
#endif
  }
}

// The even or the odd columns of hidden row `y`: two pixels of the thread, 8 channels of both halves.
template <bool ODD> __device__ __forceinline__ void make_columns(
    u32 (*made)[2][4], u32 base, u32 mine, int y, const float* offset, float slope) {
  float acc[32];
  u32 a[3][STEPS][4];
#pragma unroll
  for (int dy = 0; dy < 3; dy++)
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      read_step(a[dy][step], mine + (y + dy & RING - 1) * SLOT_BYTES + (ODD || PATCH == 1 ? 0 : 2 * PATCH), step, ODD);
  wgmma_fence();
#pragma unroll
  for (int dy = 0; dy < 3; dy++)
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      wgmma_columns(acc, a[dy][step], descriptor(base + FIRST_AT + (dy * STEPS + step) * 2048, 1024, 128),
                    dy + step > 0);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int pixel = 0; pixel < 2; pixel++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int i = (half * 4 + n) * 4 + pixel * 2;
        const float lo = acc[i] + offset[half * 8 + n * 2], hi = acc[i + 1] + offset[half * 8 + n * 2 + 1];
        made[pixel][half][n] = pack(fmaxf(lo, slope * lo), fmaxf(hi, slope * hi));
      }
}

// The hidden rows of one frame of each pair.
__device__ __forceinline__ void make_rows(
    u32 base, const char* x, const float* bias, const Pool& s, int member, int thread, int begin, int stop) {
  const u32 ring = base + RINGS_AT + member * (RING * SLOT_BYTES), bars = base + BARRIERS_AT;
  const int lane = thread & 31, quarter = lane & 3, place = (thread >> 5) * 16 + (lane >> 2);
  // A line begins 8 values before the first even column. Run of an even column 2j: from 2j - 1; of an odd one: 2j - 2.
  const u32 mine = ring + 16 - 4 * PATCH + place * 4 * PATCH +
                   (PATCH == 1 ? min(quarter, 2) * LINE_BYTES : quarter * 4);
  const u32 to = base + HIDDEN_AT + member * HIDDEN_BYTES + quarter * CHUNK_BYTES + place * 16;
  float offset[16];
#pragma unroll
  for (int i = 0; i < 16; i++) offset[i] = bias[(i >> 3) * 32 + quarter * 8 + (i & 7)];
  int turn = 0;
  for (int row = begin; row < stop;) {
    const Part part = part_at(row, stop, s);
    row += part.count;
    const int width = s.width * PATCH, height = s.height * PATCH, last = 2 * (part.top + part.count) - 1;
    const char* frame = x + ((i64)part.pair * 2 + member) * 3 * height * width * 2;
    int at[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int piece = i * 128 + thread, line = piece / CHUNKS;
      const int column = part.left * 2 * PATCH - 8 + piece % CHUNKS * 8;
      at[i] = (u32)column < (u32)width ? ((line / PATCH * height + line % PATCH) * width + column) * 2 : -1;
    }
    maker_sync(member);  // everybody has read the rows of the part before
    for (int y = start_of(part) - 1; y <= start_of(part) + AHEAD; y++) {
      if (y <= last + 1) load_row(ring, frame, at, s, y, thread);
      copies_commit();
    }
    for (int y = start_of(part); y <= last; y++, turn++) {
      maker_sync(member);  // everybody has read the row that the next one takes the place of
      if (y + 1 + AHEAD <= last + 1) load_row(ring, frame, at, s, y + 1 + AHEAD, thread);
      copies_commit();
      rows_wait<AHEAD>();
      maker_sync(member);
      u32 made[2][2][2][4];  // even and odd columns, pixel, half of the channels
      make_columns<false>(made[0], base, mine, y, offset, s.slope);
      make_columns<true>(made[1], base, mine, y, offset, s.slope);
      if (part.left + place == 0) {  // the column left of the image is the pooling layer's padding
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int n = 0; n < 4; n++) made[1][0][half][n] = 0;
      }
      barrier_wait(EMPTY(member), (turn & 1) ^ 1);
#pragma unroll
      for (int odd = 0; odd < 2; odd++)
#pragma unroll
        for (int pixel = 0; pixel < 2; pixel++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            store16(to + odd * ODD_COLUMNS + pixel * 128 + half * 4 * CHUNK_BYTES, made[odd][pixel][half]);
      stores_visible();
      barrier_arrive(FULL(member));
    }
  }
}

// What one hidden row of both frames gives to the pooled rows; `held`: the second frame's row before is still in use.
template <bool ODD> __device__ __forceinline__ void add_row(float* acc, u32 base, int turn, bool held, int lane) {
  const u32 bars = base + BARRIERS_AT;
#pragma unroll
  for (int member = 0; member < 2; member++) {
    barrier_wait(FULL(member), turn & 1);
    const u64 hidden = fresh(descriptor(base + HIDDEN_AT + member * HIDDEN_BYTES, CHUNK_BYTES, 128));
    const u64 weights = fresh(descriptor(base + member * FRAME_WEIGHTS, ODD ? 2048 : 1024, 128));
    wgmma_fence();
#pragma unroll
    for (int tap = 0; tap < 3; tap++)
#pragma unroll
      for (int k = 0; k < 4; k++) {  // a descriptor counts in 16 bytes
        const u64 a = hidden + ((tap == 1 ? 0 : ODD_COLUMNS + tap / 2 * 16) + k * 2 * CHUNK_BYTES) / 16;
        const u32 add = member + tap + k > 0;
        if (ODD) wgmma_tile(acc, a, weights + ((3 + 2 * tap) * WEIGHT_TILE + k * 4096) / 16, add);
        else wgmma_narrow(acc, a, weights + (tap * WEIGHT_TILE + k * 2048) / 16, add);
      }
    wgmma_commit();
    wgmma_wait<1>();  // the other frame's row is no longer in use
    if (lane == 0 && (member == 1 || held)) barrier_arrive(EMPTY(1 - member));
  }
}

__device__ __forceinline__ void pool_rows(u32 base, char* out, const Pool& s, int thread, int begin, int stop) {
  const u32 bars = base + BARRIERS_AT;
  const int lane = thread & 31, quarter = lane & 3, place = (thread >> 5) * 16 + (lane >> 2);
  int turn = 0;
  for (int row = begin; row < stop;) {
    const Part part = part_at(row, stop, s);
    row += part.count;
    const int width = s.width / 2;
    char* to = out + (((i64)part.pair * (s.height / 2) + part.top) * width + part.left + place) * 128 + quarter * 16;
    float kept[32] = {};  // what the hidden row above gave to the pooled row
    for (int y = max(part.top - 1, 0); y < part.top + part.count; y++) {
      const bool whole = y >= part.top;  // else only the lower row of the two, for the pooled row below
      // Apart: instructions of two shapes may not be in flight with the same accumulators.
      float even[32], odd[64];  // 64 channels of two pixels; odd: [this pooled row, the next one]
      if (whole) add_row<false>(even, base, turn++, false, lane);
      add_row<true>(odd, base, turn++, whole, lane);
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(EMPTY(1));
      if (whole) {
#pragma unroll
        for (int pixel = 0; pixel < 2; pixel++)
          if (place + pixel * 8 < STRIP && part.left + place + pixel * 8 < width)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              u32 v[4];
#pragma unroll
              for (int n = 0; n < 4; n++) {
                const int i = (half * 4 + n) * 4 + pixel * 2;
                v[n] = pack(kept[i] + even[i] + odd[i], kept[i + 1] + even[i + 1] + odd[i + 1]);
              }
              *(uint4*)(to + pixel * 8 * 128 + half * 64) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        to += (i64)width * 128;
      }
#pragma unroll
      for (int i = 0; i < 32; i++) kept[i] = odd[i + 32];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) first_pool(
    const char* x, const char* weights, const float* bias, char* out, Pool s) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = smem_address(shared), bars = base + BARRIERS_AT;
  const int thread = threadIdx.x, member = thread >> 7;
  let_next_start();
  for (int i = thread; i < HIDDEN_AT / 16; i += THREADS) copy16(base + i * 16, weights + i * 16, true);
  copies_commit();
  if (thread == 0) {
    for (int i = 0; i < 2; i++) { barrier_init(FULL(i), 128); barrier_init(EMPTY(i), 4); }
    barriers_ready();
  }
  copies_wait<0>();
  __syncthreads();
  wait_for_others();
  const int begin = blockIdx.x * s.share, stop = min(s.rows, begin + s.share);
  if (member < 2) make_rows(base, x, bias, s, member, thread & 127, begin, stop);
  else pool_rows(base, out, s, thread & 127, begin, stop);
}
