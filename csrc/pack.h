// What the CPU and the CUDA code of moerl/reshard/pack share: the descriptor of a box, a walk through it, the bfloat16 cast.
//
// A box is a strided region of a tensor. Its elements lie one after another in the bucket (row-major over the box's sizes), and in
// the tensor in runs: `run` neighbours, then up to four outer dims. Lengths are counted in units: bytes where tensor and bucket have
// the same dtype, since nothing is then cast, and elements where one is float32 and the other bfloat16.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOERL_BOTH __host__ __device__ __forceinline__
#else
#define MOERL_BOTH inline
#endif

namespace moerl {

using i64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;

// Mirrors `COLUMNS` and `CHUNK_BYTES` in moerl/reshard/pack/table.py; change both and kInterface.
constexpr int kInterface = 2;
constexpr i64 kChunkBytes = 16384;  // of the bucket: how the work is split, so that large and small boxes balance
constexpr int kDims = 4;

struct Box {
  i64 tensor;        // position in the list of addresses
  i64 offset;        // bytes from the tensor's address
  i64 at;            // bytes from the bucket's address
  i64 chunk;         // number of the box's first chunk
  i64 units;         // in all
  i64 run;           // units
  i64 tensor_bytes;  // of a unit in the tensor: 1 (moved), 4 (float32), 2 (bfloat16)
  i64 bucket_bytes;  // of a unit in the bucket
  i64 sizes[kDims];  // of the outer dims, outermost first; 1 where there is none
  i64 strides[kDims];  // bytes
};

static_assert(sizeof(Box) == 128, "16 columns of int64");

// The units [begin, end) of a box that chunk number `chunk` of the table covers.
struct Span {
  i64 begin, end;
};

MOERL_BOTH Span span_of(const Box& box, i64 chunk) {
  const i64 size = kChunkBytes / box.bucket_bytes;
  const i64 begin = (chunk - box.chunk) * size;
  return {begin, begin + size < box.units ? begin + size : box.units};
}

// A position within a box, as digits of a mixed radix: which run, and how far into it.
struct Walk {
  i64 column;  // units into the run
  i64 row[kDims];

  MOERL_BOTH Walk(const Box& box, i64 unit) {
    if (box.units >> 31) set<i64>(box, unit);
    else set<u32>(box, static_cast<u32>(unit));
  }

  // Bytes from the tensor's address.
  MOERL_BOTH i64 where(const Box& box) const {
    i64 bytes = box.offset + column * box.tensor_bytes;
    for (int dim = 0; dim < kDims; ++dim) bytes += row[dim] * box.strides[dim];
    return bytes;
  }

  // Forward by at most 2^30 units. 64-bit divisions are slow: a digit that overflows more than once has a small radix.
  MOERL_BOTH void advance(const Box& box, i64 units) {
    column += units;
    i64 carry = wrap(column, box.run);
    for (int dim = kDims - 1; dim > 0 && carry; --dim) {
      row[dim] += carry;
      carry = wrap(row[dim], box.sizes[dim]);
    }
    row[0] += carry;
  }

 private:
  // T holds every length of the box; division is much faster in 32 bits.
  template <class T>
  MOERL_BOTH void set(const Box& box, T unit) {
    column = unit % static_cast<T>(box.run);
    unit /= static_cast<T>(box.run);
    for (int dim = kDims - 1; dim > 0; --dim) {
      row[dim] = unit % static_cast<T>(box.sizes[dim]);
      unit /= static_cast<T>(box.sizes[dim]);
    }
    row[0] = unit;
  }

  MOERL_BOTH static i64 wrap(i64& digit, i64 radix) {
    if (digit < radix) return 0;
    const i64 times = digit - radix < radix ? 1 : static_cast<u32>(digit) / static_cast<u32>(radix);
    digit -= times * radix;
    return times;
  }
};

// float32 bits to bfloat16 bits: to nearest, ties to even; every NaN becomes 0x7fc0, as in torch's scalar conversion.
MOERL_BOTH u16 narrow(u32 bits) {
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

MOERL_BOTH u32 widen(u16 bits) { return static_cast<u32>(bits) << 16; }

}  // namespace moerl
