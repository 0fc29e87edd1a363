// Packing on a CPU: the units of many boxes between tensors and a bucket, with threads. A plain C interface, loaded with ctypes by
// moerl/reshard/pack/native.py. moerl/reshard/pack/reference.py says in torch what must come out, bit for bit.
//
// Threads take groups of chunks from a counter. Runs are copied or cast whole, and the beginning of the next one is fetched meanwhile.

#include "pack.h"

#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

// Loops that are compiled once for each instruction set, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__has_attribute)
#if __has_attribute(target_clones) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MOERL_WIDE __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif __has_attribute(target_clones)
#define MOERL_WIDE __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef MOERL_WIDE
#define MOERL_WIDE
#endif

namespace moerl {
namespace {

constexpr i64 kGroup = 64; // chunks that a thread takes at a time: at most 1 MiB
constexpr i64 kLong = 256; // bytes of a run from which on it is copied with `copy_long`
constexpr i64 kLine = 64;
constexpr i64 kPast = 1024;  // bytes of a run from which on it is written with `copy_past`, where that is wanted
constexpr i64 kCached = 32 << 20;  // bytes of a bucket that may still be in a cache when it is read; a larger one is written past them
constexpr i64 kBlock = 4096;  // bytes that are cast together before they are written past the caches
constexpr i64 kAhead = 8;  // lines of the next run that are fetched ahead

// Of any alignment, and aliasing anything.
template <class T>
struct Loose {
  typedef T type __attribute__((aligned(1), may_alias));
};
using Loose16 = Loose<u16>::type;
using Loose32 = Loose<u32>::type;

// The first lines of a run, which the processor does not foresee.
inline void fetch(const u8* src, i64 bytes) {
  for (i64 line = 0; line < kAhead && line * kLine < bytes; ++line) __builtin_prefetch(src + line * kLine);
}

// Wide loads and stores: for long runs faster than memcpy, which takes string instructions there.
MOERL_WIDE void copy_long(u8* __restrict dst, const u8* __restrict src, i64 bytes) {
  typedef u8 Vector __attribute__((vector_size(32)));
  constexpr auto size = sizeof(Vector);
  for (; bytes >= 128; bytes -= 128, dst += 128, src += 128) {
    Vector a, b, c, d;
    std::memcpy(&a, src, size);
    std::memcpy(&b, src + 32, size);
    std::memcpy(&c, src + 64, size);
    std::memcpy(&d, src + 96, size);
    std::memcpy(dst, &a, size);
    std::memcpy(dst + 32, &b, size);
    std::memcpy(dst + 64, &c, size);
    std::memcpy(dst + 96, &d, size);
  }
  std::memcpy(dst, src, static_cast<std::size_t>(bytes));
}

// Past the caches: to where nothing is read soon, such as a weight, so that its lines are not fetched only to be overwritten.
void copy_past(u8* __restrict dst, const u8* __restrict src, i64 bytes) {
#ifdef __SSE2__
  const i64 edge = -reinterpret_cast<std::intptr_t>(dst) & (kLine - 1), lead = edge < bytes ? edge : bytes;
  std::memcpy(dst, src, static_cast<std::size_t>(lead));
  for (dst += lead, src += lead, bytes -= lead; bytes >= kLine; bytes -= kLine, dst += kLine, src += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(src);
    auto* to = reinterpret_cast<__m128i*>(dst);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
#endif
  std::memcpy(dst, src, static_cast<std::size_t>(bytes));
}

// Other threads see what `copy_past` wrote only after this.
inline void settle() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

inline void copy(u8* __restrict dst, const u8* __restrict src, i64 bytes) {
  if (bytes < kLong) std::memcpy(dst, src, static_cast<std::size_t>(bytes));
  else copy_long(dst, src, bytes);
}

MOERL_WIDE void narrow_run(u8* __restrict dst, const u8* __restrict src, i64 count) {
  auto* to = reinterpret_cast<Loose16*>(dst);
  const auto* from = reinterpret_cast<const Loose32*>(src);
  for (i64 i = 0; i < count; ++i) to[i] = narrow(from[i]);
}

MOERL_WIDE void widen_run(u8* __restrict dst, const u8* __restrict src, i64 count) {
  auto* to = reinterpret_cast<Loose32*>(dst);
  const auto* from = reinterpret_cast<const Loose16*>(src);
  for (i64 i = 0; i < count; ++i) to[i] = widen(from[i]);
}

// `rows` runs of `count` units each, `step` bytes from one to the next, on both sides.
struct Rows {
  u8* dst;
  i64 dst_step;
  const u8* src;
  i64 src_step;
  i64 rows, count;
  bool past;  // the caches
};

template <class T>
void copy_items(const Rows& r) {
  using Item = typename Loose<T>::type;
  for (i64 i = 0; i < r.rows; ++i) *reinterpret_cast<Item*>(r.dst + i * r.dst_step) = *reinterpret_cast<const Item*>(r.src + i * r.src_step);
}

void copy_rows(const Rows& r) {
  switch (r.rows > 1 ? r.count : 0) {
    case 1: return copy_items<u8>(r);
    case 2: return copy_items<u16>(r);
    case 4: return copy_items<u32>(r);
    case 8: return copy_items<std::uint64_t>(r);
    default: break;
  }
  for (i64 i = 0; i < r.rows; ++i) {
    const u8* src = r.src + i * r.src_step;
    if (i + 1 < r.rows) fetch(src + r.src_step, r.count);
    if (r.past && r.count >= kPast) copy_past(r.dst + i * r.dst_step, src, r.count);
    else copy(r.dst + i * r.dst_step, src, r.count);
  }
}

template <i64 kFrom, i64 kTo, class Cast>
void cast_past(u8* dst, const u8* src, i64 count, Cast cast) {
  alignas(kLine) u8 block[kBlock];
  while (count > 0) {
    const i64 units = count < kBlock / kTo ? count : kBlock / kTo;
    cast(block, src, units);
    copy_past(dst, block, units * kTo);
    dst += units * kTo;
    src += units * kFrom;
    count -= units;
  }
}

template <bool kNarrow>
void cast_rows(const Rows& r) {
  constexpr i64 kFrom = kNarrow ? 4 : 2, kTo = kNarrow ? 2 : 4;
  constexpr auto cast = kNarrow ? narrow_run : widen_run;
  if (r.count == 1) {
    for (i64 i = 0; i < r.rows; ++i) {
      u8* dst = r.dst + i * r.dst_step;
      const u8* src = r.src + i * r.src_step;
      if (kNarrow) *reinterpret_cast<Loose16*>(dst) = narrow(*reinterpret_cast<const Loose32*>(src));
      else *reinterpret_cast<Loose32*>(dst) = widen(*reinterpret_cast<const Loose16*>(src));
    }
    return;
  }
  for (i64 i = 0; i < r.rows; ++i) {
    if (i + 1 < r.rows) fetch(r.src + (i + 1) * r.src_step, r.count * kFrom);
    u8* dst = r.dst + i * r.dst_step;
    const u8* src = r.src + i * r.src_step;
    if (r.past && r.count * kTo >= kPast) cast_past<kFrom, kTo>(dst, src, r.count, cast);
    else cast(dst, src, r.count);
  }
}

struct Job {
  const Box* boxes;
  const std::int32_t* owners;  // of each chunk: the number of its box
  i64 end;  // the chunk behind the last
  u8* const* tensors;
  u8* bucket;
  bool pack;
  bool past;  // the caches: what is written is not read soon, or is too much to stay in one
};

void move_span(const Job& job, const Box& box, Span span) {
  u8* const tensor = job.tensors[box.tensor];
  u8* flat = job.bucket + box.at + span.begin * box.bucket_bytes;
  Walk walk(box, span.begin);
  for (i64 left = span.end - span.begin; left > 0;) {
    u8* const spot = tensor + walk.where(box);
    i64 rows = 1, count = box.run - walk.column;
    if (walk.column == 0 && left >= box.run) {
      rows = left / box.run;
      if (rows > box.sizes[kDims - 1] - walk.row[kDims - 1]) rows = box.sizes[kDims - 1] - walk.row[kDims - 1];
    } else if (count > left) {
      count = left;
    }
    const i64 flat_step = count * box.bucket_bytes, step = box.strides[kDims - 1];
    const Rows in{flat, flat_step, spot, step, rows, count, job.past}, out{spot, step, flat, flat_step, rows, count, job.past};
    const Rows& r = job.pack ? in : out;
    if (box.tensor_bytes == box.bucket_bytes) copy_rows(r);
    else if ((box.tensor_bytes == 4) == job.pack) cast_rows<true>(r);
    else cast_rows<false>(r);
    flat += rows * flat_step;
    left -= rows * count;
    walk.advance(box, rows * count);
  }
}

void work(const Job& job, std::atomic<i64>& next) {
  for (;;) {
    const i64 begin = next.fetch_add(kGroup, std::memory_order_relaxed);
    if (begin >= job.end) break;
    const i64 end = begin + kGroup < job.end ? begin + kGroup : job.end;
    for (i64 chunk = begin; chunk < end;) {
      const Box& box = job.boxes[job.owners[chunk]];
      i64 last = chunk;
      while (last + 1 < end && job.owners[last + 1] == job.owners[chunk]) ++last;
      move_span(job, box, {span_of(box, chunk).begin, span_of(box, last).end});
      chunk = last + 1;
    }
  }
  settle();
}

}  // namespace
}  // namespace moerl

extern "C" {

int pack_interface() { return moerl::kInterface; }

// The chunks [begin, end), into the bucket if `pack`, else out of it.
void pack_move(const moerl::Box* boxes, const std::int32_t* owners, std::int64_t begin, std::int64_t end, std::uint8_t* const* tensors,
               std::uint8_t* bucket, int pack, int threads) {
  const bool past = !pack || (end - begin) * moerl::kChunkBytes > moerl::kCached;
  const moerl::Job job{boxes, owners, end, tensors, bucket, pack != 0, past};
  const std::int64_t groups = (end - begin + moerl::kGroup - 1) / moerl::kGroup;
  if (threads > groups) threads = static_cast<int>(groups);
  std::atomic<std::int64_t> next{begin};
  std::vector<std::thread> helpers;
  try {
    for (int i = 1; i < threads; ++i) helpers.emplace_back([&] { moerl::work(job, next); });
  } catch (const std::system_error&) {
    // No more threads are to be had; those that run share the work.
  }
  moerl::work(job, next);
  for (auto& helper : helpers) helper.join();
}

}  // extern "C"
