// The instructions that the kernels share, as functions. NVRTC compiles this file before the file of a kernel, one kernel
// at a time (see nvrtc.py): no header, no host compiler. The macros that it reads (BFLOAT, SLOPE, PRODUCT_N, ...) come
// with -D from the Python file of the kernel.

typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64; typedef unsigned short u16;
__device__ __forceinline__ u32 smem_address(const void* p) {
  u32 a; asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p)); return a;
}
// A kernel may start while those in front of it still run (`early_launches` in nvrtc.py). The first of these functions
// allows it to the kernel behind; the second ends when all kernels in front have ended. Before it a thread touches
// nothing but weights and its own shared memory: no input, and no result, whose memory may still be read.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#if BFLOAT
#define ELEMENT "bf16"
__device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
#else
#define ELEMENT "f16"
__device__ __forceinline__ float low(u32 v) {
  float f; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(f) : "r"(v)); return f;
}
__device__ __forceinline__ float high(u32 v) {
  float f; asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(f) : "r"(v)); return f;
}
#endif
__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r; asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
}
#ifdef SLOPE
__device__ __forceinline__ float activate(float v) {  // ReLU, or LeakyReLU: 0 < SLOPE < 1
  return SLOPE == 0 ? fmaxf(v, 0.f) : fmaxf(v, (float)SLOPE * v);
}
#endif
__device__ __forceinline__ void copy16(u32 dst, const void* src, bool valid) {
  u32 bytes = valid ? 16 : 0;  // fewer bytes than 16 are filled up with zeros: the convolution's padding
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mma(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#ifdef PRODUCT_N  // kernels with Hopper's matrix instruction
// Copy the last frame of each video, for the next chunk: this is thread `member` of `members`.
__device__ __forceinline__ void keep_last(
    char* last, const char* frames, int videos, int frames_per_video, i64 frame_bytes, int member, int members) {
  const char* from = frames + (frames_per_video - 1) * frame_bytes;
  for (int video = 0; video < videos; video++, last += frame_bytes, from += frames_per_video * frame_bytes)
#pragma unroll 4
    for (i64 at = member * 16; at < frame_bytes; at += members * 16) *(uint4*)(last + at) = *(const uint4*)(from + at);
}
__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void load_weights(u32 dst, const char* src, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(dst), "l"(src), "r"(WEIGHT_TILE), "r"(bar) : "memory");
}
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
  return (u64)((address & 0x3ffff) >> 4) | ((u64)(leading_bytes >> 4) << 16) | ((u64)(stride_bytes >> 4) << 32);
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int OPEN> __device__ __forceinline__ void wgmma_wait() {  // until at most OPEN groups are not done
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(OPEN) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int OPEN> __device__ __forceinline__ void copies_wait() {  // until at most OPEN groups are on their way
  asm volatile("cp.async.wait_group %0; fence.proxy.async.shared::cta;" :: "n"(OPEN) : "memory");
}
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 56;"); }
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 224;"); }
// The matrix instruction with PRODUCT_N columns; its accumulators are half as many operands, named eight at a time,
// and the factors and the switch between adding and writing come behind them.
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
              "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7" ", %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23" ", %24, %25, %26, %27, %28, %29, %30, %31"
#define DATA_32 D8(0), D8(8), D8(16), D8(24)
#define NAMES_64 NAMES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39" ", %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55" ", %56, %57, %58, %59, %60, %61, %62, %63"
#define DATA_64 DATA_32, D8(32), D8(40), D8(48), D8(56)
#define NAMES_96 NAMES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71" ", %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87" ", %88, %89, %90, %91, %92, %93, %94, %95"
#define DATA_96 DATA_64, D8(64), D8(72), D8(80), D8(88)
#define NAMES_120 NAMES_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103" ", %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119"
#define DATA_120 DATA_96, D8(96), D8(104), D8(112)
#define NAMES_128 NAMES_120 \
  ", %120, %121, %122, %123, %124, %125, %126, %127"
#define DATA_128 DATA_120, D8(120)
#if PRODUCT_N == 64
#define NAMES NAMES_32
#define DATA DATA_32
#define FACTORS "%32, %33"
#define ADD "%34"
#elif PRODUCT_N == 128
#define NAMES NAMES_64
#define DATA DATA_64
#define FACTORS "%64, %65"
#define ADD "%66"
#elif PRODUCT_N == 192
#define NAMES NAMES_96
#define DATA DATA_96
#define FACTORS "%96, %97"
#define ADD "%98"
#elif PRODUCT_N == 240
#define NAMES NAMES_120
#define DATA DATA_120
#define FACTORS "%120, %121"
#define ADD "%122"
#elif PRODUCT_N == 256
#define NAMES NAMES_128
#define DATA DATA_128
#define FACTORS "%128, %129"
#define ADD "%130"
#else
#error "a product has 64, 128, 192, 240 or 256 columns"
#endif
__device__ __forceinline__ void wgmma_tile(float* d, u64 a, u64 b, u32 add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADD ", 0; "
    "wgmma.mma_async.sync.aligned.m64n" TEXT(PRODUCT_N) "k16.f32." ELEMENT "." ELEMENT " "
    "{" NAMES "}, " FACTORS ", p, 1, 1, 0, 0; }"
    : DATA : "l"(a), "l"(b), "r"(add));
}

#ifdef RING
// What the kernels share that go row by row: loading warps fill a ring in shared memory for each of two computing
// warpgroups, which take turns at the tensor cores.
// Barriers 1 and 2: the turn of each warpgroup.
__device__ __forceinline__ void turn_wait(int member) {
  asm volatile("bar.sync %0, 256;" :: "r"(1 + member) : "memory");
}
__device__ __forceinline__ void turn_pass(int member) {
  asm volatile("bar.arrive %0, 256;" :: "r"(2 - member) : "memory");
}
// A place of a ring has a barrier for full and one for empty; the weights have one more. `bars` is the first of them.
#define FULL(member, turn) (bars + 8 * ((member) * RING + (turn) % RING))
#define EMPTY(member, turn) (FULL(member, turn) + 16 * RING)
#define WEIGHTS_FULL (bars + 32 * RING)
__device__ __forceinline__ void rings_init(u32 bars) {
  for (int i = 0; i < 2 * RING; i++) { barrier_init(FULL(0, 0) + 8 * i, 64); barrier_init(EMPTY(0, 0) + 8 * i, 4); }
  barrier_init(WEIGHTS_FULL, 1);
  barriers_ready();
}
#endif
#endif
