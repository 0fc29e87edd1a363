// Packing on a GPU: the units of many boxes between tensors and a bucket, in one launch. A plain C interface, loaded with ctypes by
// moerl/reshard/pack/cuda.py. moerl/reshard/pack/reference.py says in torch what must come out, bit for bit.
//
// A grid that fits the GPU takes chunks in turn. The threads of a block take slots of a chunk: 16 bytes, aligned in the bucket, or 8
// elements of a cast. A slot is moved with the widest access that suits both sides: one of 16 bytes as a rule, narrower ones where
// the tensor is aligned less, or where the slot is cut by the end of a run.
//
// All but the launcher is plain C++, without shared memory or barriers, so a CPU can run it thread by thread.

#include "pack.h"

namespace moerl {

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;

struct alignas(16) Words {
  u32 word[4];
};

struct Work {
  const Box* boxes;
  const std::int32_t* owners;  // of each chunk: the number of its box
  i64 chunks;
  u8* const* tensors;
  u8* bucket;
};

MOERL_BOTH u32 low_bits(const void* address) { return static_cast<u32>(reinterpret_cast<std::uintptr_t>(address)) & 15u; }

template <class T>
MOERL_BOTH void copy_items(u8* dst, const u8* src, u32 bytes) {
  for (u32 i = 0; i < bytes; i += sizeof(T)) *reinterpret_cast<T*>(dst + i) = *reinterpret_cast<const T*>(src + i);
}

// At most 16 units.
struct Move {
  static constexpr int kSlot = 16;

  MOERL_BOTH static void piece(u8* dst, const u8* src, u32 units) {
    const u32 low = low_bits(dst) | low_bits(src) | units;
    if (low % 16 == 0) *reinterpret_cast<Words*>(dst) = *reinterpret_cast<const Words*>(src);
    else if (low % 8 == 0) copy_items<unsigned long long>(dst, src, units);
    else if (low % 4 == 0) copy_items<u32>(dst, src, units);
    else if (low % 2 == 0) copy_items<u16>(dst, src, units);
    else copy_items<u8>(dst, src, units);
  }
};

// An element at any address, as the number that its bytes make.
template <class T>
MOERL_BOTH T load(const u8* src) {
  if (low_bits(src) % sizeof(T) == 0) return *reinterpret_cast<const T*>(src);
  u32 value = 0;
  for (u32 i = 0; i < sizeof(T); ++i) value |= static_cast<u32>(src[i]) << (8 * i);
  return static_cast<T>(value);
}

template <class T>
MOERL_BOTH void store(u8* dst, T value) {
  if (low_bits(dst) % sizeof(T) == 0) {
    *reinterpret_cast<T*>(dst) = value;
    return;
  }
  for (u32 i = 0; i < sizeof(T); ++i) dst[i] = static_cast<u8>(value >> (8 * i));
}

// float32 to bfloat16; at most 8 units.
struct Narrow {
  static constexpr int kSlot = 8;

  MOERL_BOTH static void piece(u8* dst, const u8* src, u32 units) {
    if (units == kSlot && (low_bits(dst) | low_bits(src)) == 0) {
      const Words low = *reinterpret_cast<const Words*>(src), high = *reinterpret_cast<const Words*>(src + 16);
      Words out;
      for (int i = 0; i < 4; ++i) {
        const Words& pair = i < 2 ? low : high;
        out.word[i] = narrow(pair.word[i % 2 * 2]) | static_cast<u32>(narrow(pair.word[i % 2 * 2 + 1])) << 16;
      }
      *reinterpret_cast<Words*>(dst) = out;
      return;
    }
    for (u32 i = 0; i < units; ++i) store<u16>(dst + 2 * i, narrow(load<u32>(src + 4 * i)));
  }
};

// bfloat16 to float32; at most 8 units.
struct Widen {
  static constexpr int kSlot = 8;

  MOERL_BOTH static void piece(u8* dst, const u8* src, u32 units) {
    if (units == kSlot && (low_bits(dst) | low_bits(src)) == 0) {
      const Words in = *reinterpret_cast<const Words*>(src);
      Words low, high;
      for (int i = 0; i < 8; ++i) (i < 4 ? low : high).word[i % 4] = widen(static_cast<u16>(in.word[i / 2] >> (i % 2 * 16)));
      *reinterpret_cast<Words*>(dst) = low;
      *reinterpret_cast<Words*>(dst + 16) = high;
      return;
    }
    for (u32 i = 0; i < units; ++i) store<u32>(dst + 4 * i, widen(load<u16>(src + 2 * i)));
  }
};

// The slots of one thread: every kThreads-th of a span.
template <class Kind, bool kPack>
MOERL_BOTH void move_span(const Box& box, Span span, u8* tensor, u8* bucket, int thread) {
  u8* const flat = bucket + box.at;
  // The first slot begins before the span where that aligns the slots in the bucket.
  const i64 excess = low_bits(flat + span.begin * box.bucket_bytes);
  const i64 shift = excess % box.bucket_bytes == 0 ? excess / box.bucket_bytes : 0;
  i64 slot = span.begin - shift + thread * Kind::kSlot;
  if (slot >= span.end) return;
  i64 unit = slot < span.begin ? span.begin : slot;
  Walk walk(box, unit);
  for (;;) {
    const i64 stop = slot + Kind::kSlot < span.end ? slot + Kind::kSlot : span.end;
    Walk piece = walk;
    for (i64 done = unit; done < stop;) {
      const i64 left = box.run - piece.column;
      const i64 units = left < stop - done ? left : stop - done;
      u8* const spot = tensor + piece.where(box);
      u8* const place = flat + done * box.bucket_bytes;
      Kind::piece(kPack ? place : spot, kPack ? spot : place, static_cast<u32>(units));
      done += units;
      if (done < stop) piece.advance(box, units);
    }
    slot += kThreads * Kind::kSlot;
    if (slot >= span.end) return;
    walk.advance(box, slot - unit);
    unit = slot;
  }
}

template <bool kPack>
MOERL_BOTH void move_chunks(const Work& work, i64 block, i64 blocks, int thread) {
  for (i64 chunk = block; chunk < work.chunks; chunk += blocks) {
    const Box& box = work.boxes[work.owners[chunk]];
    const Span span = span_of(box, chunk);
    u8* const tensor = work.tensors[box.tensor];
    if (box.tensor_bytes == box.bucket_bytes) move_span<Move, kPack>(box, span, tensor, work.bucket, thread);
    else if ((box.tensor_bytes == 4) == kPack) move_span<Narrow, kPack>(box, span, tensor, work.bucket, thread);
    else move_span<Widen, kPack>(box, span, tensor, work.bucket, thread);
  }
}

}  // namespace moerl

extern "C" int pack_interface() { return moerl::kInterface; }

#ifdef __CUDACC__

namespace moerl {

template <bool kPack>
__global__ void __launch_bounds__(kThreads) pack_kernel(const Work work) {
  move_chunks<kPack>(work, blockIdx.x, gridDim.x, static_cast<int>(threadIdx.x));
}

}  // namespace moerl

extern "C" {

// Queues the move on a stream of a device: into the bucket if `pack`, else out of it. All addresses are the device's. Returns a
// cudaError_t.
int pack_launch(const moerl::Box* boxes, const std::int32_t* owners, std::int64_t chunks, std::uint8_t* const* tensors,
                std::uint8_t* bucket, int pack, int device, void* stream) {
  int before = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&before);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const std::int64_t most = static_cast<std::int64_t>(processors) * moerl::kBlocksPerProcessor;
  const auto blocks = static_cast<unsigned>(chunks < most ? chunks : most);
  const moerl::Work work{boxes, owners, chunks, tensors, bucket};
  const auto queue = static_cast<cudaStream_t>(stream);
  if (pack) moerl::pack_kernel<true><<<blocks, moerl::kThreads, 0, queue>>>(work);
  else moerl::pack_kernel<false><<<blocks, moerl::kThreads, 0, queue>>>(work);
  status = cudaGetLastError();
  const cudaError_t back = cudaSetDevice(before);
  return status != cudaSuccess ? status : back;
}

const char* pack_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

}  // extern "C"

#endif
