// Every collective as the suite calls it, and as the linear map that it is.
#ifndef CHORUS_TESTS_CONFORMANCE_COLLECTIVES_H_
#define CHORUS_TESTS_CONFORMANCE_COLLECTIVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/optional.h"
#include "chorus/chorus.h"

namespace chorus {
namespace conformance {

enum class Kind {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kShift,     // to the next rank, from the previous one
  kExchange,  // both directions, three tags, met in another order than sent
  kBarrier,
  kGather,
  kGatherIntoTensor,
  kScatter,
  kScatterTensor,
  kAllGatherIntoTensor,
  kReduceScatterTensor,
  kAllToAll,
  kAllToAllSingle,
  kCount,
};

// Kinds with another rank in them: one rank alone cannot call them.
inline bool NeedsTwo(Kind kind) { return kind == Kind::kShift || kind == Kind::kExchange; }

// One call as one rank sees it.
struct Place {
  Kind kind;
  int rank;
  int ranks;
  int64_t size;  // elements of each piece

  int root() const { return static_cast<int>(size % ranks); }
  int next() const { return (rank + 1) % ranks; }
  int previous() const { return (rank + ranks - 1) % ranks; }
  bool is_root() const { return rank == root(); }
  // Tensors that each rank gives; a barrier's is not used, nor what is given off a root that alone
  // has something to give.
  int num_inputs() const {
    const bool list = kind == Kind::kReduceScatter || kind == Kind::kAllToAll ||
                      (kind == Kind::kScatter && is_root());
    return list ? ranks : 1;
  }
  // Elements of each of them.
  int64_t input_size() const {
    const bool whole = kind == Kind::kReduceScatterTensor || kind == Kind::kAllToAllSingle ||
                       (kind == Kind::kScatterTensor && is_root());
    return whole ? ranks * size : size;
  }
};

inline std::vector<Tensor> Call(const Place& p, const World& world, DType dtype,
                                const std::vector<Tensor>& in) {
  const Shape shape = {p.size};
  switch (p.kind) {
    case Kind::kAllReduce:
      return {AllReduce(in[0], world)};
    case Kind::kBroadcast:
      return {Broadcast(in[0], p.root(), world)};
    case Kind::kReduce:
      return {Reduce(in[0], p.root(), world)};
    case Kind::kAllGather:
      return AllGather(in[0], world);
    case Kind::kReduceScatter:
      return {ReduceScatter(in, world)};
    case Kind::kShift: {
      const Tensor sent = Send(in[0], p.next(), world);
      return {sent, Recv(dtype, shape, p.previous(), world)};
    }
    case Kind::kExchange: {
      std::vector<Tensor> out = {Send(in[0], p.next(), world, 1),
                                 Send(in[0] * 2, p.next(), world, 2),
                                 Send(in[0] * 3, p.previous(), world, 3)};
      out.push_back(Recv(dtype, shape, p.next(), world, 3));
      out.push_back(Recv(dtype, shape, p.previous(), world, 2));
      out.push_back(Recv(dtype, shape, p.previous(), world, 1));
      return out;
    }
    case Kind::kBarrier:
      return {Barrier(world)};
    case Kind::kGather:
      return Gather(in[0], p.root(), world);
    case Kind::kGatherIntoTensor:
      return {GatherIntoTensor(in[0], p.root(), world)};
    case Kind::kScatter:
      return {Scatter(p.is_root() ? in : std::vector<Tensor>(), dtype, shape, p.root(), world)};
    case Kind::kScatterTensor:
      return {ScatterTensor(p.is_root() ? in[0] : Tensor(), dtype, shape, p.root(), world)};
    case Kind::kAllGatherIntoTensor:
      return {AllGatherIntoTensor(in[0], world)};
    case Kind::kReduceScatterTensor:
      return {ReduceScatterTensor(in[0], world)};
    case Kind::kAllToAll:
      return AllToAll(in, world);
    case Kind::kAllToAllSingle:
      return {AllToAllSingle(in[0], world)};
    case Kind::kCount:
      break;
  }
  return {};
}

// What one rank has or gets; nothing: absent.
template <typename T>
using Tuple = std::vector<absl::optional<std::vector<T>>>;

template <typename T>
void AddTo(std::vector<T>* sum, const absl::optional<std::vector<T>>& x, T factor = 1) {
  for (size_t i = 0; x.has_value() && i < sum->size(); ++i) {
    (*sum)[i] = static_cast<T>((*sum)[i] + factor * (*x)[i]);
  }
}

// Piece `k` of what has several, one after the other; absent: nothing.
template <typename T>
std::vector<T> Part(const absl::optional<std::vector<T>>& whole, int k, int64_t size) {
  if (!whole.has_value()) return std::vector<T>(static_cast<size_t>(size), T{0});
  const auto begin = whole->begin() + k * size;
  return std::vector<T>(begin, begin + size);
}

// What `piece` gives for each rank, one after the other.
template <typename T, typename F>
std::vector<T> Joined(int ranks, const F& piece) {
  std::vector<T> all;
  for (int k = 0; k < ranks; ++k) {
    const std::vector<T> part = piece(k);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

// The outputs of all ranks, from the inputs of all ranks.
template <typename T>
std::vector<Tuple<T>> Apply(Kind kind, int64_t size, const std::vector<Tuple<T>>& in) {
  const int ranks = static_cast<int>(in.size());
  const std::vector<T> zeros(static_cast<size_t>(size), T{0});
  const auto sum = [&](size_t k) {
    std::vector<T> total = zeros;
    for (const Tuple<T>& x : in) AddTo(&total, x[k]);
    return total;
  };
  const auto times = [&](int rank, T factor) {
    std::vector<T> x = zeros;
    AddTo(&x, in[static_cast<size_t>(rank)][0], factor);
    return x;
  };
  std::vector<Tuple<T>> out(in.size());
  for (int r = 0; r < ranks; ++r) {
    const Place p{kind, r, ranks, size};
    Tuple<T>& mine = out[static_cast<size_t>(r)];
    switch (kind) {
      case Kind::kAllReduce:
        mine = {sum(0)};
        break;
      case Kind::kBroadcast:
        mine = {times(p.root(), 1)};
        break;
      case Kind::kReduce:
        mine = {absl::nullopt};
        if (r == p.root()) mine[0] = sum(0);
        break;
      case Kind::kAllGather:
        for (int s = 0; s < ranks; ++s) mine.push_back(times(s, 1));
        break;
      case Kind::kReduceScatter:
        mine = {sum(static_cast<size_t>(r))};
        break;
      case Kind::kShift:
        mine = {absl::nullopt, times(p.previous(), 1)};
        break;
      case Kind::kExchange:
        mine = {absl::nullopt,      absl::nullopt,          absl::nullopt,
                times(p.next(), 3), times(p.previous(), 2), times(p.previous(), 1)};
        break;
      case Kind::kBarrier:
        mine = {absl::nullopt};
        break;
      case Kind::kGather:
        mine = {absl::nullopt};
        if (!p.is_root()) break;
        mine.clear();
        for (int s = 0; s < ranks; ++s) mine.push_back(times(s, 1));
        break;
      case Kind::kGatherIntoTensor:
        mine = {absl::nullopt};
        if (p.is_root()) mine[0] = Joined<T>(ranks, [&](int s) { return times(s, 1); });
        break;
      case Kind::kScatter:
        mine = {in[static_cast<size_t>(p.root())][static_cast<size_t>(r)]};
        break;
      case Kind::kScatterTensor:
        mine = {Part(in[static_cast<size_t>(p.root())][0], r, size)};
        break;
      case Kind::kAllGatherIntoTensor:
        mine = {Joined<T>(ranks, [&](int s) { return times(s, 1); })};
        break;
      case Kind::kReduceScatterTensor: {
        std::vector<T> total = zeros;
        for (const Tuple<T>& x : in) AddTo<T>(&total, Part(x[0], r, size));
        mine = {total};
        break;
      }
      case Kind::kAllToAll:
        for (const Tuple<T>& x : in) mine.push_back(x[static_cast<size_t>(r)]);
        break;
      case Kind::kAllToAllSingle:
        mine = {
            Joined<T>(ranks, [&](int s) { return Part(in[static_cast<size_t>(s)][0], r, size); })};
        break;
      case Kind::kCount:
        break;
    }
  }
  return out;
}

// Its transpose: from what all ranks' losses want of their outputs to what they want of the inputs.
template <typename T>
std::vector<Tuple<T>> ApplyTransposed(Kind kind, int64_t size, const std::vector<Tuple<T>>& out) {
  const int ranks = static_cast<int>(out.size());
  const std::vector<T> zeros(static_cast<size_t>(size), T{0});
  const auto at = [&](int rank, size_t k) -> const absl::optional<std::vector<T>>& {
    return out[static_cast<size_t>(rank)][k];
  };
  std::vector<Tuple<T>> in(out.size());
  for (int r = 0; r < ranks; ++r) {
    const Place p{kind, r, ranks, size};
    std::vector<std::vector<T>> mine(static_cast<size_t>(p.num_inputs()), zeros);
    switch (kind) {
      case Kind::kAllReduce:
        for (int s = 0; s < ranks; ++s) AddTo(&mine[0], at(s, 0));
        break;
      case Kind::kBroadcast:
        for (int s = 0; s < ranks && r == p.root(); ++s) AddTo(&mine[0], at(s, 0));
        break;
      case Kind::kReduce:
        AddTo(&mine[0], at(p.root(), 0));
        break;
      case Kind::kAllGather:
        for (int s = 0; s < ranks; ++s) AddTo(&mine[0], at(s, static_cast<size_t>(r)));
        break;
      case Kind::kReduceScatter:
        for (int s = 0; s < ranks; ++s) AddTo(&mine[static_cast<size_t>(s)], at(s, 0));
        break;
      case Kind::kShift:
        AddTo(&mine[0], at(p.next(), 1));
        break;
      case Kind::kExchange:
        AddTo(&mine[0], at(p.previous(), 3), T{3});
        AddTo(&mine[0], at(p.next(), 4), T{2});
        AddTo(&mine[0], at(p.next(), 5));
        break;
      case Kind::kGather:
        AddTo(&mine[0], at(p.root(), static_cast<size_t>(r)));
        break;
      case Kind::kGatherIntoTensor:
        mine[0] = Part(at(p.root(), 0), r, size);
        break;
      case Kind::kScatter:
        for (int s = 0; s < ranks && p.is_root(); ++s) {
          AddTo(&mine[static_cast<size_t>(s)], at(s, 0));
        }
        break;
      case Kind::kScatterTensor:
        if (p.is_root()) mine[0] = Joined<T>(ranks, [&](int s) { return Part(at(s, 0), 0, size); });
        break;
      case Kind::kAllGatherIntoTensor:
        for (int s = 0; s < ranks; ++s) AddTo<T>(&mine[0], Part(at(s, 0), r, size));
        break;
      case Kind::kReduceScatterTensor:
        mine[0] = Joined<T>(ranks, [&](int s) { return Part(at(s, 0), 0, size); });
        break;
      case Kind::kAllToAll:
        for (int s = 0; s < ranks; ++s) {
          AddTo(&mine[static_cast<size_t>(s)], at(s, static_cast<size_t>(r)));
        }
        break;
      case Kind::kAllToAllSingle:
        mine[0] = Joined<T>(ranks, [&](int s) { return Part(at(s, 0), r, size); });
        break;
      case Kind::kBarrier:
      case Kind::kCount:
        break;
    }
    in[static_cast<size_t>(r)] = Tuple<T>(mine.begin(), mine.end());
  }
  return in;
}

}  // namespace conformance
}  // namespace chorus

#endif  // CHORUS_TESTS_CONFORMANCE_COLLECTIVES_H_
