// The hot loops of moerl/routing: checking, packing and ranking of expert routes. A plain C interface, loaded with ctypes.
//
// moerl/routing/packing.py holds the same algorithms in numpy and is the reference: both give the same bytes. Tables come from
// there, so that no binomial is computed twice. Rows are `layers * k` ids (uint8 or uint16), and a packed row begins at a byte.
//
//   set:    rank of {c_1 < ... < c_k} is sum C(c_i, i), the combinatorial number system
//   groups: rank of the chosen groups * C(experts in them, k) + rank of the set within the chosen groups
//   order:  Lehmer code of the slots, in the bits above the set's rank
//
// Every function answers -1 if all is well, otherwise the number of the first row and layer (row * layers + layer) at fault.

#include <cstdint>
#include <cstring>

namespace {

using u64 = std::uint64_t;
using u128 = unsigned __int128;

constexpr int kBlock = 16;   // sets that are searched side by side, so that their table look-ups overlap
constexpr int kMaxGroups = 16;
constexpr int kMaxMarks = 1024;
constexpr int kMaxTopk = 20;  // 20! is the largest factorial below 2^64

inline u128 load16(const std::uint8_t* p) {
  u128 value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// `bits` (1..128) bits that begin at bit `at`; 17 bytes from there must be readable.
inline u128 read_bits(const std::uint8_t* row, std::int64_t at, int bits) {
  const std::uint8_t* p = row + (at >> 3);
  const int shift = at & 7;
  u128 value = load16(p) >> shift;
  if (shift + bits > 128) value |= static_cast<u128>(p[16]) << (128 - shift);
  return bits == 128 ? value : value & ((static_cast<u128>(1) << bits) - 1);
}

// Into bits that are still zero; 17 bytes must be writable.
inline void write_bits(std::uint8_t* row, std::int64_t at, int bits, u128 value) {
  std::uint8_t* p = row + (at >> 3);
  const int shift = at & 7;
  const u128 merged = load16(p) | (value << shift);
  std::memcpy(p, &merged, sizeof merged);
  if (shift + bits > 128) p[16] |= static_cast<std::uint8_t>(value >> (128 - shift));
}

}  // namespace

extern "C" {

// Mirrors `_Params` in moerl/routing/native.py; change both and the number that routes_interface returns.
struct Params {
  std::int64_t rows, layers, row_bytes;
  std::int32_t k, experts, wide;  // wide: ids are uint16
  std::int32_t set_bits, order_bits;
  std::int32_t groups, group_topk, group_size;  // groups = 0: no limit
  std::int32_t short_topk;                      // C(c, i) < 2^63 for all i up to this
  std::int32_t stride;                          // of the binomial tables: a power of two >= the experts of a set
  const u64 *low, *high;                        // C(c, i) at [i * stride + c], i = 1..k; all ones beyond the last expert
  u64 sets_low, sets_high;                      // sets within one choice of groups
  u64 total_low, total_high;                    // values in all
  u64 orders;                                   // k!, or 1
  const std::uint16_t *rank_of_mask, *mask_of_rank;
  const std::uint8_t* group_of;  // by expert
};

}  // extern "C"

namespace {

inline u128 join(u64 high, u64 low) { return (static_cast<u128>(high) << 64) | low; }

template <class Id>
inline bool bad_set(const Id* s, int k, int experts) {
  bool bad = false;
  for (int i = 0; i < k; ++i) {
    bad |= s[i] >= experts;
    for (int j = 0; j < i; ++j) bad |= s[i] == s[j];
  }
  return bad;
}

template <class Id, class Vector>
inline bool bad_set8(const Id* s, int experts) {
  Vector v;
  std::memcpy(&v, s, sizeof v);
  using V = Vector;
  const V r1 = {1, 2, 3, 4, 5, 6, 7, 0}, r2 = {2, 3, 4, 5, 6, 7, 0, 1}, r3 = {3, 4, 5, 6, 7, 0, 1, 2}, r4 = {4, 5, 6, 7, 0, 1, 2, 3};
  const V last = V{} + static_cast<Id>(experts - 1);
  const auto bad = (v == __builtin_shuffle(v, r1)) | (v == __builtin_shuffle(v, r2)) | (v == __builtin_shuffle(v, r3)) |
                   (v == __builtin_shuffle(v, r4)) | (v > last);
  u64 words[sizeof bad / 8];
  std::memcpy(words, &bad, sizeof bad);
  u64 any = 0;
  for (u64 word : words) any |= word;
  return any != 0;
}

using Bytes8 = std::uint8_t __attribute__((vector_size(8)));
using Words8 = std::uint16_t __attribute__((vector_size(16)));

inline bool bad_set8(const std::uint8_t* s, int experts) { return bad_set8<std::uint8_t, Bytes8>(s, experts); }
inline bool bad_set8(const std::uint16_t* s, int experts) { return bad_set8<std::uint16_t, Words8>(s, experts); }

// Marks each expert with the number of the set that used it last.
template <class Id>
std::int64_t check_by_marks(const Id* ids, std::int64_t sets, int k, int experts) {
  std::int64_t marks[kMaxMarks];
  std::memset(marks, -1, sizeof marks);
  for (std::int64_t i = 0; i < sets; ++i) {
    bool bad = false;
    for (int j = 0; j < k; ++j) {
      const unsigned expert = ids[i * k + j];
      bad |= expert >= static_cast<unsigned>(experts);
      std::int64_t& mark = marks[expert % kMaxMarks];
      bad |= mark == i;
      mark = i;
    }
    if (bad) return i;
  }
  return -1;
}

template <class Id>
std::int64_t check(const Id* ids, std::int64_t sets, int k, int experts) {
  if (k == 8) {
    for (std::int64_t i = 0; i < sets; ++i)
      if (bad_set8(ids + 8 * i, experts)) return i;
    return -1;
  }
  if (k > 3 && experts <= kMaxMarks) return check_by_marks(ids, sets, k, experts);
  for (std::int64_t i = 0; i < sets; ++i)
    if (bad_set(ids + i * k, k, experts)) return i;
  return -1;
}

// Numbers within the chosen groups, in place; the rank of the choice, or -1 if more groups are used than allowed.
inline int into_groups(const Params& p, int* e) {
  unsigned mask = 0;
  int group[kMaxTopk];
  for (int j = 0; j < p.k; ++j) {
    group[j] = p.group_of[e[j]];
    mask |= 1u << group[j];
  }
  int count = 0, shift[kMaxGroups];
  for (int g = 0; g < p.groups; ++g) count += mask >> g & 1;
  if (count > p.group_topk) return -1;
  for (; count < p.group_topk; ++count) mask |= mask + 1;  // the lowest unused groups fill up
  for (int g = 0, place = 0; g < p.groups; ++g) {
    shift[g] = (place - g) * p.group_size;
    place += mask >> g & 1;
  }
  for (int j = 0; j < p.k; ++j) e[j] += shift[group[j]];
  return p.rank_of_mask[mask];
}

inline u64 order_rank(const int* e, int k) {
  u64 rank = 0;
  for (int j = 0; j < k; ++j) {
    u64 smaller = 0;
    for (int m = j + 1; m < k; ++m) smaller += e[m] < e[j];
    rank = rank * static_cast<u64>(k - j) + smaller;
  }
  return rank;
}

template <class Id, bool Wide>
std::int64_t encode_sets(const Params& p, const Id* ids, std::uint8_t* out, std::uint8_t* scratch) {
  const int k = p.k, bits = p.set_bits + p.order_bits;
  const u128 within = join(p.sets_high, p.sets_low);
  for (std::int64_t row = 0; row < p.rows; ++row) {
    std::memset(scratch, 0, p.row_bytes);
    for (std::int64_t layer = 0; layer < p.layers; ++layer) {
      const Id* s = ids + (row * p.layers + layer) * k;
      int e[kMaxTopk], position_sum = 0;
      bool bad = false;
      for (int j = 0; j < k; ++j) {
        e[j] = s[j];
        bad |= e[j] >= p.experts;
      }
      if (bad) return row * p.layers + layer;
      const u64 order = p.order_bits ? order_rank(e, k) : 0;
      int choice = 0;
      if (p.groups && (choice = into_groups(p, e)) < 0) return row * p.layers + layer;
      u128 rank = 0;
      u64 low = 0;
      for (int j = 0; j < k; ++j) {
        int position = 1;
        for (int m = 0; m < k; ++m) position += e[m] < e[j];
        position_sum += position;
        const std::int64_t at = static_cast<std::int64_t>(position) * p.stride + e[j];
        if (Wide)
          rank += join(p.high[at], p.low[at]);
        else
          low += p.low[at];
      }
      if (position_sum != k * (k + 1) / 2) return row * p.layers + layer;  // a repeated expert
      if (!Wide) rank = low;
      if (p.groups) rank += within * static_cast<u64>(choice);
      if (p.order_bits) rank |= static_cast<u128>(order) << p.set_bits;
      write_bits(scratch, layer * bits, bits, rank);
    }
    std::memcpy(out + row * p.row_bytes, scratch, p.row_bytes);
  }
  return -1;
}

// c[b] = largest c with C(c, i) <= rank[b], by a binary search without branches; the rank becomes the rest.
inline void search(const u64* table, int stride, u64* rank, int* c) {
  for (int b = 0; b < kBlock; ++b) c[b] = 0;
  for (int step = stride / 2; step; step /= 2)
    for (int b = 0; b < kBlock; ++b) c[b] += table[c[b] + step] <= rank[b] ? step : 0;
  for (int b = 0; b < kBlock; ++b) rank[b] -= table[c[b]];
}

inline void search_wide(const u64* low, const u64* high, int stride, u128* rank, int* c) {
  for (int b = 0; b < kBlock; ++b) c[b] = 0;
  for (int step = stride / 2; step; step /= 2)
    for (int b = 0; b < kBlock; ++b) c[b] += join(high[c[b] + step], low[c[b] + step]) <= rank[b] ? step : 0;
  for (int b = 0; b < kBlock; ++b) rank[b] -= join(high[c[b]], low[c[b]]);
}

// From ascending experts to the slots of a Lehmer code.
inline void reorder(int* e, int k, u64 order) {
  int digit[kMaxTopk], sorted[kMaxTopk];
  for (int j = k - 1, base = 1; j >= 0; --j, ++base) {
    digit[j] = static_cast<int>(order % base);
    order /= base;
  }
  std::memcpy(sorted, e, k * sizeof(int));
  for (int j = 0; j < k; ++j) {
    e[j] = sorted[digit[j]];
    for (int m = digit[j]; m + 1 < k - j; ++m) sorted[m] = sorted[m + 1];
  }
}

inline void out_of_groups(const Params& p, int* e, unsigned mask) {
  int number[kMaxGroups + 1], count = 0;
  for (int g = 0; g < p.groups; ++g) {
    number[count] = g;
    count += mask >> g & 1;
  }
  for (int j = 0; j < p.k; ++j) {
    const int place = p.group_of[e[j]];
    e[j] += (number[place] - place) * p.group_size;
  }
}

template <class Id, bool Wide>
std::int64_t decode_block(const Params& p, const std::uint8_t* scratch, std::int64_t layer, int count, Id* out) {
  const int k = p.k, bits = p.set_bits + p.order_bits;
  const u128 total = join(p.total_high, p.total_low), within = join(p.sets_high, p.sets_low);
  u128 wide[kBlock] = {};
  u64 rank[kBlock] = {}, order[kBlock] = {};
  int choice[kBlock] = {}, c[kBlock], e[kBlock][kMaxTopk];
  for (int b = 0; b < count; ++b) {
    u128 value = read_bits(scratch, (layer + b) * bits, bits);
    if (p.order_bits) {
      order[b] = static_cast<u64>(value >> p.set_bits);
      value &= (static_cast<u128>(1) << p.set_bits) - 1;
    }
    if (value >= total || order[b] >= p.orders) return b;
    if (p.groups) {
      if (Wide) {
        choice[b] = static_cast<int>(value / within);
        value -= within * static_cast<u64>(choice[b]);
      } else {
        choice[b] = static_cast<int>(static_cast<u64>(value) / p.sets_low);
        value = static_cast<u64>(value) % p.sets_low;
      }
    }
    wide[b] = value;
    rank[b] = static_cast<u64>(value);
  }
  bool long_ranks = Wide;
  for (int i = k; i; --i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * p.stride;
    if (long_ranks && i <= p.short_topk) {  // what is left of every rank fits 63 bits from here on
      long_ranks = false;
      for (int b = 0; b < kBlock; ++b) rank[b] = static_cast<u64>(wide[b]);
    }
    if (long_ranks)
      search_wide(p.low + at, p.high + at, p.stride, wide, c);
    else
      search(p.low + at, p.stride, rank, c);
    for (int b = 0; b < kBlock; ++b) e[b][i - 1] = c[b];
  }
  for (int b = 0; b < count; ++b) {
    if (p.groups) out_of_groups(p, e[b], p.mask_of_rank[choice[b]]);
    if (p.order_bits) reorder(e[b], k, order[b]);
    for (int j = 0; j < k; ++j) out[b * k + j] = static_cast<Id>(e[b][j]);
  }
  return -1;
}

template <class Id, bool Wide>
std::int64_t decode_sets(const Params& p, const std::uint8_t* in, Id* ids, std::uint8_t* scratch) {
  for (std::int64_t row = 0; row < p.rows; ++row) {
    std::memcpy(scratch, in + row * p.row_bytes, p.row_bytes);
    for (std::int64_t layer = 0; layer < p.layers; layer += kBlock) {
      const int count = static_cast<int>(p.layers - layer < kBlock ? p.layers - layer : kBlock);
      const std::int64_t bad = decode_block<Id, Wide>(p, scratch, layer, count, ids + (row * p.layers + layer) * p.k);
      if (bad >= 0) return row * p.layers + layer + bad;
    }
  }
  return -1;
}

template <class Id>
void pack(const Params& p, const Id* ids, std::uint8_t* out) {
  const std::int64_t values = p.layers * p.k;
  for (std::int64_t row = 0; row < p.rows; ++row, ids += values) {
    std::uint8_t *to = out + row * p.row_bytes, *end = to + p.row_bytes;
    u64 held = 0;
    int fill = 0;
    for (std::int64_t i = 0; i < values; ++i) {
      held |= static_cast<u64>(ids[i]) << fill;
      fill += p.set_bits;
      if (fill >= 32) {
        std::memcpy(to, &held, 4);
        to += 4;
        held >>= 32;
        fill -= 32;
      }
    }
    for (; to < end; held >>= 8) *to++ = static_cast<std::uint8_t>(held);
  }
}

template <class Id>
void unpack(const Params& p, const std::uint8_t* in, Id* ids, std::uint8_t* scratch) {
  const std::int64_t values = p.layers * p.k;
  const u64 mask = (u64{1} << p.set_bits) - 1;
  for (std::int64_t row = 0; row < p.rows; ++row, ids += values) {
    std::memcpy(scratch, in + row * p.row_bytes, p.row_bytes);
    for (std::int64_t i = 0; i < values; ++i) {
      u64 word;
      std::memcpy(&word, scratch + (i * p.set_bits >> 3), 8);
      ids[i] = static_cast<Id>(word >> (i * p.set_bits & 7) & mask);
    }
  }
}

template <class Id>
std::int64_t encode_any(const Params& p, const Id* ids, std::uint8_t* out, std::uint8_t* scratch) {
  return p.total_high || p.total_low >> 63 ? encode_sets<Id, true>(p, ids, out, scratch) : encode_sets<Id, false>(p, ids, out, scratch);
}

template <class Id>
std::int64_t decode_any(const Params& p, const std::uint8_t* in, Id* ids, std::uint8_t* scratch) {
  return p.total_high || p.total_low >> 63 ? decode_sets<Id, true>(p, in, ids, scratch) : decode_sets<Id, false>(p, in, ids, scratch);
}

}  // namespace

extern "C" {

int routes_interface() { return 1; }

std::int64_t routes_check(const void* ids, int wide, std::int64_t sets, int k, int experts) {
  return wide ? check(static_cast<const std::uint16_t*>(ids), sets, k, experts) : check(static_cast<const std::uint8_t*>(ids), sets, k, experts);
}

// `scratch` holds row_bytes + 17 bytes in the four functions below.
std::int64_t routes_encode_sets(const Params* p, const void* ids, std::uint8_t* out, std::uint8_t* scratch) {
  return p->wide ? encode_any(*p, static_cast<const std::uint16_t*>(ids), out, scratch)
                 : encode_any(*p, static_cast<const std::uint8_t*>(ids), out, scratch);
}

std::int64_t routes_decode_sets(const Params* p, const std::uint8_t* in, void* ids, std::uint8_t* scratch) {
  return p->wide ? decode_any(*p, in, static_cast<std::uint16_t*>(ids), scratch) : decode_any(*p, in, static_cast<std::uint8_t*>(ids), scratch);
}

std::int64_t routes_pack(const Params* p, const void* ids, std::uint8_t* out, std::uint8_t*) {
  if (p->wide)
    pack(*p, static_cast<const std::uint16_t*>(ids), out);
  else
    pack(*p, static_cast<const std::uint8_t*>(ids), out);
  return -1;
}

std::int64_t routes_unpack(const Params* p, const std::uint8_t* in, void* ids, std::uint8_t* scratch) {
  if (p->wide)
    unpack(*p, in, static_cast<std::uint16_t*>(ids), scratch);
  else
    unpack(*p, in, static_cast<std::uint8_t*>(ids), scratch);
  return -1;
}

}  // extern "C"
