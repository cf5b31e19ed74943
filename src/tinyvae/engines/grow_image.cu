// The last growing layer and the image convolution behind it in one kernel: 64 channels on the small grid -> RGB on the
// doubled grid. What lies between them, 64 channels at full size, stays in registers.
//
// grow_cells.cu says what cells, phases, quads and strips are. A cell reaches the 4x4 output pixels of four quads: quad
// (y, x) is the sum over the cells (y+dy, x+dx), dy, dx = 0, 1. So the 3x3 is a second product, 64 cells x K = 4 phases
// of 64 channels x N = 4 quads of 4 pixels of RGB = 48, and a sum of four neighbors. Cells are the rows of both
// products: what the first leaves in a thread's registers is, rounded, the left factor of the second.
//
// A warpgroup takes a strip. The sum over dy stays in the thread, the sum over dx is a shuffle; only the cells at the
// seams of its four warps go through shared memory.
// A block makes one of the frames that an input frame grows into: its weights (152 KiB) stay in shared memory.
// The loading warps fill a ring of rows for each of two computing warpgroups, which take turns at the first product:
// one rounds, sums and writes while the other multiplies.
//
// Compiled behind instructions.cu and grow_cells.cu, whose functions it uses; grow_image.py passes the constants.

__device__ __forceinline__ void wgmma_image(float* d, const u32* a, u64 b, u32 add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %29, 0; "
    "wgmma.mma_async.sync.aligned.m64n48k16.f32." ELEMENT "." ELEMENT " "
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
    "{%24, %25, %26, %27}, %28, p, 1, 1, 0; }"
    : D8(0), D8(8), D8(16) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// Barriers 1 and 2 are the turns (instructions.cu), 3 and 4 the four warps of a warpgroup.
__device__ __forceinline__ void warpgroup_sync(int member) {
  asm volatile("bar.sync %0, 128;" :: "r"(3 + member) : "memory");
}

#define IMAGE_CHUNK (48 * 16)  // of the second product's weights: [8-channel chunk][48 outputs][16 bytes]
#define SEAMS_AT (RING_AT + 2 * RING * ROW_BYTES)
#define BARRIERS_AT (SEAMS_AT + SEAM_BYTES)

// Rows of cells that a share of rows of quads needs: one more for each part.
__device__ __forceinline__ int steps_of(int first, int stop, int height) {
  return first < stop ? stop - first + (stop - 1) / height - first / height + 1 : 0;
}

// x: frames, height, width, 64. weights: of each frame made of one. out: frames · grown, 3, 2 height, 2 width, in pairs
// of pixels. All strips together have `rows` rows of quads; each warpgroup takes `share` of them.
extern "C" __global__ void __launch_bounds__(THREADS, 1) grow_image(
    const char* x, const char* weights, const float* bias, u32* out, int frames, int height, int width, int grown,
    int rows, int share) {
  extern __shared__ __align__(1024) char shared[];
  const u32 base = smem_address(shared), bars = base + BARRIERS_AT;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int made = blockIdx.x % grown;  // which of the frames
  let_next_start();
  if (thread == 0) rings_init(bars);
  __syncthreads();

  if (thread < 128) {
    fewer_registers();
    if (thread == 0) load_all_weights(base, bars, weights, made);
    wait_for_others();
    const int member = warp >> 1, first = (blockIdx.x / grown * 2 + member) * share;
    load_rows(x, base + RING_AT, bars, member, first, min(rows, first + share), frames, height, width);
    return;
  }

  more_registers();
  const int member = (warp >> 2) - 1, quarter = warp & 3;
  const int first = (blockIdx.x / grown * 2 + member) * share, stop = min(rows, first + share);
  const int other = first + (member ? -share : share);
  const int steps = steps_of(first, stop, height), other_steps = steps_of(other, min(rows, other + share), height);
  float* seams = (float*)(shared + SEAMS_AT) + member * 48;  // [warp][output pixel of a quad][RGB]
  const int down = (lane >> 1) & 1, right = lane & 1;        // the thread's output pixel of each quad
  const float offset[3] = {bias[0], bias[1], bias[2]};
  float kept[2][6] = {};  // of the row of cells above, for [cell, cell + 8][dx, RGB]
  int turn = 0, step = 0;
  wait_for_others();
  barrier_wait(WEIGHTS_FULL, 0);
  if (member == 1) turn_pass(1);
  for (int row = first; row < stop;) {
    const Part part = part_at(row, stop, height);
    row += part.count;
    const int cell = quarter * 16 + (lane >> 2);  // the thread's are this one and + 8; it writes one of the two quads
    const int left = place_at(part.start, width).column;
    const Place place = place_at(part.start + cell + right * 8, width);
    const bool exists = cell + right * 8 < CELLS - 1 && place.column < width && place.frame < frames;
    u32* quads = out + (((i64)place.frame * grown + made) * 6 * height + 2 * part.top + down) * width + place.column;
    barrier_wait(FULL(member, turn), (turn / RING) & 1);
    for (int y = part.top; y <= part.top + part.count; y++, turn++) {
      barrier_wait(FULL(member, turn + 1), ((turn + 1) / RING) & 1);
      float acc[128];  // [phase][64 channels] of the cells `lane / 4` and + 8
      turn_wait(member);
      wgmma_fence();
#pragma unroll
      for (int tap = 0; tap < 4; tap++) {
        const u32 pixels = base + RING_AT + (member * RING + (turn + (tap >> 1)) % RING) * ROW_BYTES + (tap & 1) * 16;
#pragma unroll
        for (int k = 0; k < 4; k++)
          wgmma_tile(acc, descriptor(pixels + k * 2 * PLANE, PLANE, 128),
                     descriptor(base + tap * GROW_TAP + k * 8192, 4096, 128), tap + k > 0);
        if (tap >= 2) wgmma_commit();
      }
      wgmma_wait<1>();  // the other warpgroup starts when the last tap of this one is left
      if (++step < max(steps, other_steps) || member == 0) turn_pass(member);
      wgmma_wait<0>();
      if (lane == 0) {
        barrier_arrive(EMPTY(member, turn));
        if (y == part.top + part.count) barrier_arrive(EMPTY(member, turn + 1));
      }

      u32 phases[64];  // [phase][16 channels][cell, cell + 8, and again for 8 channels more]
#pragma unroll
      for (int i = 0; i < 64; i++) phases[i] = pack_activated(acc[2 * i], acc[2 * i + 1]);
      if (y == 0 || y == height || left == 0 || left + CELLS > width) {
        const int columns[2] = {(left + cell) % (width + 1), (left + cell + 8) % (width + 1)};
#pragma unroll
        for (int i = 0; i < 64; i++) {
          const int column = columns[i & 1];
          const bool row_exists = i & 32 ? y > 0 : y < height, column_exists = i & 16 ? column > 0 : column < width;
          if (!row_exists || !column_exists) phases[i] = 0;
        }
      }
      float sums[24];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 16; k++)
        wgmma_image(sums, phases + k * 4, descriptor(base + IMAGE_AT + k * 2 * IMAGE_CHUNK, IMAGE_CHUNK, 128), k > 0);
      wgmma_commit();
      wgmma_wait<0>();

      // A thread's twelve columns of a cell are its output pixel of the four quads: [dy][dx][RGB].
      float above[2][6];  // of the quads in the row above this row of cells
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < 6; i++) {
          above[half][i] = kept[half][i] + sums[((i + 6) >> 1) * 4 + half * 2 + (i & 1)];
          kept[half][i] = sums[(i >> 1) * 4 + half * 2 + (i & 1)];
        }
      if (y == part.top) continue;  // nothing is kept yet
      if (lane < 4)  // all four warps have read the seams of the step before: they met at their turn
#pragma unroll
        for (int c = 0; c < 3; c++) seams[quarter * 12 + lane * 3 + c] = above[0][3 + c];
      warpgroup_sync(member);
      u32* to = quads;
      quads += 2 * width;
#pragma unroll
      for (int c = 0; c < 3; c++, to += (i64)2 * height * width) {
        float near = __shfl_sync(~0u, above[0][3 + c], lane + 4), far = __shfl_sync(~0u, above[1][3 + c], lane + 4);
        if (lane >= 28) {  // the neighbor of cell 7 is cell 8, that of cell 15 lies in the next warp
          near = far;
          if (quarter < 3) far = seams[(quarter + 1) * 12 + (lane & 3) * 3 + c];
        }
        near += above[0][c] + offset[c];
        far += above[1][c] + offset[c];
        // Two threads have the two columns of a quad: one writes them for the first cell, one for the second.
        const float got = __shfl_xor_sync(~0u, right ? near : far, 1);
        const u32 pixels = right ? pack(got, far) : pack(near, got);
        if (exists) *to = pixels;
      }
    }
    turn++;
  }
  for (; step < other_steps; step++) {  // so that the other warpgroup gets its turns
    turn_wait(member);
    if (step + 1 < other_steps || member == 0) turn_pass(member);
  }
}
