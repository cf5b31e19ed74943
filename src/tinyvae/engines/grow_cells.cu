// What the kernels share that join the last growing layer and the image convolution (grow_image.cu, grow_patches.cu).
//
// Cells. Cell (y, x) holds the four pixels of the rows 2y-1, 2y and the columns 2x-1, 2x of the doubled grid: phase
// (i, j) is pixel (2y-i, 2x-j). All four read the same 2x2 small pixels (y-1..y, x-1..x), so a growing layer is one
// product: 64 cells x K = 4 taps of 64 channels x N = 4 phases of 64 channels. There is one row and one column of cells
// more than small pixels. Pixels outside the image are zeros for the 3x3, so the outer cells lose two of their phases.
// Quad (y, x) is the pixels 2y..2y+1, 2x..2x+1 of the result; its 3x3 needs the cells y..y+1, x..x+1.
//
// A strip is 64 cells wide and goes down row by row. A step reads one new row of 65 small pixels, so a strip computes 64
// cells for 63 quads, and one row of cells more for each part of a strip.
//
// Compiled between instructions.cu and the file of the kernel.

#define PLANE ((CELLS + 1) * 16)  // 8 channels of a row; 65 pixels: the eight chunks of a pixel fall on different banks
#define ROW_BYTES (PLANE * 8)
#define GROW_TAP 32768           // bytes of one tap: [8-channel chunk][4 phases of 64 outputs][16 bytes]
#define IMAGE_AT (4 * GROW_TAP)  // where the image convolution's weights start
#define RING_AT (WEIGHT_TILES * WEIGHT_TILE)

__device__ __forceinline__ u32 pack_activated(float lo, float hi) {
  if (SLOPE != 0) return pack(activate(lo), activate(hi));
  u32 r; asm("cvt.rn.relu." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}

struct Part {  // of a strip: the quads of `count` rows from row `top`
  int frame, left, top, count;
};
__device__ __forceinline__ Part part_at(int row, int stop, int height, int strips) {
  const int strip = row / height, top = row % height;
  return {strip / strips, strip % strips * (CELLS - 1), top, min(height - top, stop - row)};
}

// By one thread: all weights of the frame `made` of those that an input frame grows into.
__device__ __forceinline__ void load_all_weights(u32 base, u32 bars, const char* weights, int made) {
  barrier_expect(WEIGHTS_FULL, RING_AT);
  for (int i = 0; i < WEIGHT_TILES; i++)
    load_weights(base + i * WEIGHT_TILE, weights + (made * WEIGHT_TILES + i) * WEIGHT_TILE, WEIGHTS_FULL);
}

// By two warps: the rows of small pixels that the rows `first` to `stop` of quads need, into the ring of a member. Eight
// threads read a pixel's 128 bytes.
__device__ __forceinline__ void load_rows(
    const char* x, u32 rings, u32 bars, int member, int first, int stop, int height, int width, int strips) {
  const int place = (threadIdx.x >> 3) & 7, chunk = threadIdx.x & 7;
  int turn = 0;
  for (int row = first; row < stop;) {
    const Part part = part_at(row, stop, height, strips);
    for (int y = part.top - 1; y <= part.top + part.count; y++, turn++) {
      const u32 to = rings + (member * RING + turn % RING) * ROW_BYTES + chunk * PLANE;
      const char* from = x + ((i64)part.frame * height + y) * width * 128 + chunk * 16;
      barrier_wait(EMPTY(member, turn), ((turn / RING) & 1) ^ 1);
      for (int pixel = place; pixel <= CELLS; pixel += 8) {
        const int xx = part.left - 1 + pixel;
        const bool inside = (u32)y < (u32)height && (u32)xx < (u32)width;
        copy16(to + pixel * 16, inside ? from + xx * 128 : x, inside);
      }
      copies_commit();
      copies_wait<0>();
      barrier_arrive(FULL(member, turn));
    }
    row += part.count;
  }
}
