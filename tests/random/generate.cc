#include "tests/random/generate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>

#include "tests/random/evaluate.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr double kLargest = 50;
constexpr double kLargestGradient = 1e5;

class Generator {
 public:
  Generator(uint64_t seed, const GeneratorOptions& options) : options_(options), random_(seed) {
    p_.seed = seed;
  }

  Program Make() {
    Plan();
    const int before = Between(2, 7) + (Chance(0.3) ? Between(0, 10) : 0);
    Statements(before, 0.4);
    for (int order = 0; order < orders_; ++order) {
      const bool last = order + 1 == orders_;
      if (order == 0 && Chance(0.15) && Gradients(false, true)) Statements(Between(0, 2), 0.3);
      if (!Gradients(!last, false)) break;
      if (!last) Statements(Between(0, 3), 0.25);
    }
    if (Chance(0.3)) Statements(Between(1, 3), 0.5);
    Finish();
    return std::move(p_);
  }

 private:
  // --- Chance -----------------------------------------------------------------------------------

  bool Chance(double p) { return static_cast<double>(random_() >> 11) * 0x1p-53 < p; }
  int Between(int lo, int hi) {
    return lo + static_cast<int>(random_() % static_cast<uint64_t>(hi - lo + 1));
  }
  template <typename T>
  T& Any(std::vector<T>& list) {
    return list[random_() % list.size()];
  }
  template <typename T>
  T AnyOf(std::initializer_list<T> list) {
    return *(list.begin() + static_cast<std::ptrdiff_t>(random_() % list.size()));
  }
  std::vector<int> Shuffled(std::vector<int> list) {
    for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[random_() % i]);
    return list;
  }

  // --- The frame --------------------------------------------------------------------------------

  void Plan() {
    const int ranks = AnyOf({1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6});
    const int style = Between(0, 9);
    for (int r = 0; r < ranks; ++r) {
      p_.trainer_of.push_back(style < 6 ? r : style < 8 ? 0 : Between(0, r));
    }
    // Trainers are numbered without gaps.
    std::vector<int> names(static_cast<size_t>(ranks), -1);
    int next = 0;
    for (int& t : p_.trainer_of) {
      int& name = names[static_cast<size_t>(t)];
      if (name < 0) name = next++;
      t = name;
    }
    GroupOf everybody;
    for (int r = 0; r < ranks; ++r) everybody.ranks.push_back(r);
    p_.groups.push_back(everybody);
    const int more = Chance(0.6) ? Between(1, 3) : 0;
    for (int g = 0; g < more; ++g) {
      GroupOf group;
      if (Chance(0.4)) {
        group.ranks = p_.groups.back().ranks;  // two of the same
      } else {
        const std::vector<int> all = Shuffled(everybody.ranks);
        group.ranks.assign(all.begin(), all.begin() + Between(1, ranks));
      }
      p_.groups.push_back(group);
    }
    for (int t = 0; t < p_.trainers(); ++t) {
      const std::vector<int> mine = p_.RanksOf(t);
      // What can be compiled has one world: that of the devices, or that of the job.
      only_devices_.push_back(mine.size() > 1 && Chance(0.6));
      if (mine.size() < 2 || (!only_devices_.back() && Chance(0.6))) continue;
      GroupOf devices;
      devices.devices = true;
      devices.ranks = Chance(0.5) ? mine : Shuffled(mine);
      if (Chance(0.2))
        devices.ranks.resize(static_cast<size_t>(Between(1, static_cast<int>(mine.size()))));
      p_.groups.push_back(devices);
    }
    main_ = AnyOf({DType::kF32, DType::kF32, DType::kF32, DType::kF32, DType::kF64, DType::kF64,
                   DType::kF16, DType::kBF16});
    orders_ = AnyOf({0, 1, 1, 1, 2, 2, 2, 3});
    if (orders_ == 3 && ranks > 4) orders_ = 2;
    orders_ = std::min(orders_, options_.orders);
    no_grads_ = Chance(0.25);
    some_without_ = Chance(0.3);
    coarse_ = Chance(0.5);
    directly_ = Chance(0.3) || options_.directly;
    for (int r = 0; r < ranks; ++r) {
      without_.push_back(some_without_ && Chance(0.5));
      // In higher orders every trainer keeps a gradient of its own.
      if (orders_ >= 2 || !without_.back()) Leaf(r, main_, SomeShape(), true);
    }
    for (int t = 0; t < p_.trainers(); ++t) p_.shuffles.push_back(0);
    if (Chance(0.4)) {
      for (uint64_t& s : p_.shuffles) s = 1 + random_() % 1000000;
    }
  }

  void Statements(int count, double collectives) {
    for (int i = 0; i < count; ++i) {
      if (Chance(0.05)) Burst();
      for (int attempt = 0; attempt < 8; ++attempt) {
        const bool shared = Chance(collectives);
        if (shared && Chance(SomeGroup(false) < 0 ? 1 : 0.35) && DeviceGroups() > 0) {
          if (OfDevices()) break;
        } else if (shared) {
          if (Collective()) break;
        } else if (Local()) {
          break;
        }
      }
    }
  }

  // --- Values -----------------------------------------------------------------------------------

  Dims SomeShape(int least_rank = 0) {
    Dims shape;
    const int rank = std::max(least_rank, AnyOf({0, 1, 1, 1, 2, 2, 3}));
    for (int d = 0; d < rank; ++d) {
      shape.push_back(Chance(0.03) ? 0 : AnyOf({1, 2, 2, 3, 3, 4}));
    }
    while (Elements(shape) > (orders_ >= 2 ? 9 : 20))
      *std::max_element(shape.begin(), shape.end()) = 1;
    if (rank > 0 && orders_ <= 1 && Chance(0.01)) shape = {Between(1000, 2100)};
    return shape;
  }

  std::vector<double> SomeData(DType dtype, int64_t n) {
    std::vector<double> data;
    const int profile = coarse_ ? Between(0, 2) : Between(0, 5);
    for (int64_t i = 0; i < n; ++i) {
      double x = 0;
      if (dtype == DType::kBool) {
        x = Between(0, 1);
      } else if (!IsFloating(dtype)) {
        x = Chance(0.05) ? Between(-40, 100) : Between(-3, 4);
        if (dtype == DType::kU8) x = std::fabs(x);
      } else if (profile == 0) {
        x = Between(-3, 3);
      } else if (profile == 1) {
        x = Between(-8, 8) / 4.0;
      } else if (profile == 2) {
        x = Between(1, 6);
      } else if (profile == 3) {
        x = AnyOf({0.0, 0.0, 1.0, 20.0, -15.0});  // far apart
      } else {
        x = (static_cast<double>(random_() >> 11) * 0x1p-53 - 0.4) * 3;
      }
      data.push_back(RoundTo(dtype, x));
    }
    return data;
  }

  int Leaf(int rank, DType dtype, const Dims& shape, bool may_have_gradient,
           std::vector<double> data = {}) {
    Statement s;
    s.op = Op::kLeaf;
    s.data = data.empty() ? SomeData(dtype, Elements(shape)) : std::move(data);
    s.requires_grad = IsFloating(dtype) && may_have_gradient &&
                      (!without_.empty() && static_cast<size_t>(rank) < without_.size() &&
                               without_[static_cast<size_t>(rank)]
                           ? orders_ >= 2 && Chance(0.2)
                           : Chance(0.85));
    s.captured = !s.requires_grad && Chance(0.15);
    Call call;
    call.rank = rank;
    call.out = {p_.AddValue(rank, dtype, shape)};
    s.calls = {call};
    const int v = call.out[0];
    Try(std::move(s));
    return v;
  }
  int Indices(int rank, const Dims& shape, int64_t below) {
    std::vector<double> data;
    for (int64_t i = 0; i < Elements(shape); ++i) {
      data.push_back(static_cast<double>(random_() % static_cast<uint64_t>(below)));
    }
    const DType dtype =
        below > 100 ? DType::kI64 : AnyOf({DType::kI64, DType::kI64, DType::kI32, DType::kU8});
    if (data.empty()) return Leaf(rank, dtype, shape, false);
    return Leaf(rank, dtype, shape, false, data);
  }
  int CountsOf(int rank, const std::vector<int64_t>& counts) {
    std::vector<double> data(counts.begin(), counts.end());
    return Leaf(rank, DType::kI64, {static_cast<int64_t>(counts.size())}, false, data);
  }

  // One that is there, the later the likelier; -1: none.
  int Existing(int rank, const std::function<bool(const Value&)>& fits) {
    std::vector<int> found;
    for (int v = 0; v < static_cast<int>(p_.values.size()); ++v) {
      const Value& value = p_.value(v);
      if (value.rank == rank && !value.absent && fits(value)) found.push_back(v);
    }
    if (found.empty()) return -1;
    if (Chance(0.5)) return found[found.size() - 1 - random_() % std::min<size_t>(3, found.size())];
    return Any(found);
  }
  int SomeFloat(int rank) {
    const int v = Existing(rank, [](const Value& x) { return IsFloating(x.dtype); });
    return v >= 0 ? v : Leaf(rank, main_, SomeShape(), true);
  }
  int SomeNumbers(int rank) {
    if (Chance(0.85)) return SomeFloat(rank);
    const int v = Existing(rank, [](const Value& x) { return x.dtype != DType::kBool; });
    return v >= 0 ? v : Leaf(rank, SomeDType(), SomeShape(), true);
  }
  DType SomeDType() {
    return AnyOf({main_, main_, DType::kF32, DType::kF64, DType::kF16, DType::kBF16, DType::kI64,
                  DType::kI32, DType::kI16, DType::kI8, DType::kU8});
  }

  // A value of that type: one that is there, one made from another, or a leaf.
  int Operand(int rank, DType dtype, const Dims& shape) {
    if (Chance(0.75)) {
      const int v =
          Existing(rank, [&](const Value& x) { return x.dtype == dtype && x.shape == shape; });
      if (v >= 0) return v;
    }
    if (Chance(0.25)) {
      // Of as many elements, as a view.
      const int v = Existing(rank, [&](const Value& x) {
        return x.dtype == dtype && Elements(x.shape) == Elements(shape) && x.shape != shape;
      });
      if (v >= 0) {
        Statement s = Of(Op::kReshape, rank, {v}, dtype, shape);
        s.ints = shape;
        const int out = s.calls[0].out[0];
        if (Try(std::move(s))) return out;
      }
    }
    if (Chance(0.15) && Elements(shape) > 0) {
      // One number, or a part that stretches.
      const int v = Existing(rank, [&](const Value& x) {
        return x.dtype == dtype && Elements(x.shape) == 1 && x.shape.size() <= shape.size();
      });
      if (v >= 0) {
        Statement s = Of(Op::kExpand, rank, {v}, dtype, shape);
        s.ints = shape;
        const int out = s.calls[0].out[0];
        if (Try(std::move(s))) return out;
      }
    }
    if (IsFloating(dtype) && Chance(0.04)) {
      // Of nothing, and with a history all the same.
      Dims empty = shape;
      empty.push_back(0);
      const int v = Leaf(rank, dtype, empty, true);
      const Op op = Chance(0.5) ? Op::kProduct : Op::kSum;
      Statement s = Of(op, rank, {v}, dtype, shape);
      s.ints = {static_cast<int64_t>(shape.size())};
      const int out = s.calls[0].out[0];
      if (Try(std::move(s))) return out;
    }
    return Leaf(rank, dtype, shape, true);
  }

  Statement Of(Op op, int rank, std::vector<int> in, DType dtype, const Dims& shape,
               int out_rank = -1) {
    Statement s;
    s.op = op;
    Call call;
    call.rank = rank;
    call.in = std::move(in);
    call.out = {p_.AddValue(out_rank < 0 ? rank : out_rank, dtype, shape)};
    call.no_grad = no_grads_ && Chance(0.06);
    s.calls = {call};
    return s;
  }

  bool IsWanted(Op op) const {
    return options_.without.empty() ||
           std::string(OpName(op)).find(options_.without) == std::string::npos;
  }
  // Adds it, if what it gives is sound and of moderate size.
  bool Try(Statement s, double largest = kLargest) {
    if (!IsWanted(s.op)) {
      for (const Call& call : s.calls) {
        for (const int out : call.out) Orphan(static_cast<size_t>(out));
      }
      return false;
    }
    const int first = static_cast<int>(p_.statements.size());
    p_.statements.push_back(std::move(s));
    return Settle(first, largest, true);
  }
  bool Settle(int first, double largest, bool good) {
    const auto mark = e_.Now();
    for (int i = first; good && i < static_cast<int>(p_.statements.size()); ++i) {
      // Leaves always go: callers name them without looking.
      const bool leaf = p_.statements[static_cast<size_t>(i)].op == Op::kLeaf;
      good = e_.Add(p_, i).ok() && (leaf || e_.size() < 400000);
      if (!good) break;
      for (const Call& call : p_.statements[static_cast<size_t>(i)].calls) {
        for (const int out : call.out) good = good && Moderate(out, largest);
      }
    }
    if (!good) {
      e_.Undo(mark);
      int least = static_cast<int>(p_.values.size());
      for (size_t i = static_cast<size_t>(first); i < p_.statements.size(); ++i) {
        for (const Call& call : p_.statements[i].calls) {
          for (const int out : call.out) least = std::min(least, out);
        }
      }
      p_.statements.resize(static_cast<size_t>(first));
      // Unless something else was added behind them.
      bool used = false;
      for (const Statement& s : p_.statements) {
        for (const Call& call : s.calls) {
          for (const int out : call.out) used = used || out >= least;
        }
      }
      if (!used) {
        p_.values.resize(static_cast<size_t>(least));
      } else {
        for (size_t v = static_cast<size_t>(least); v < p_.values.size(); ++v) Orphan(v);
      }
    }
    return good;
  }
  // A value that nothing gives: nobody may use it.
  void Orphan(size_t v) {
    for (const Statement& s : p_.statements) {
      for (const Call& call : s.calls) {
        if (std::count(call.out.begin(), call.out.end(), static_cast<int>(v)) > 0) return;
      }
    }
    p_.values[v].absent = true;
    p_.values[v].rank = -1;
  }
  bool Moderate(int v, double largest) {
    const Value& value = p_.value(v);
    const Numbers numbers = e_.Of(v);
    for (size_t i = 0; i < numbers.values.size(); ++i) {
      const double x = numbers.values[i];
      if (!IsFloating(value.dtype)) {
        if (std::fabs(x) > 9e15) return false;
        continue;
      }
      if (!(std::fabs(x) <= largest)) return false;
      if (!(numbers.errors[i] <= 0.05 * std::max(1.0, std::fabs(x))) && Chance(0.8)) return false;
    }
    return true;
  }

  // --- Local ops --------------------------------------------------------------------------------

  Dims Without(const Dims& shape, const std::vector<int64_t>& axes, bool all, bool keep) {
    Dims result;
    for (size_t d = 0; d < shape.size(); ++d) {
      const bool reduced = all || std::count(axes.begin(), axes.end(), static_cast<int64_t>(d)) > 0;
      if (!reduced) result.push_back(shape[d]);
      if (reduced && keep) result.push_back(1);
    }
    return result;
  }

  bool Local() {
    const int rank = Between(0, p_.ranks() - 1);
    switch (Between(0, 15)) {
      case 0:
      case 1:
        return Unary(rank);
      case 2:
      case 3:
      case 4:
      case 5:
        return Binary(rank);
      case 6:
        return Number(rank);
      case 7:
      case 8:
        return Reduction1(rank);
      case 9:
      case 10:
      case 11:
        return View(rank);
      case 12:
        return Model(rank);
      case 13:
        return Indexed(rank);
      case 14:
        return Select(rank);
      default: {
        const int x = SomeNumbers(rank);
        const Value value = p_.value(x);
        if (Chance(0.3)) return Try(Of(Op::kDetach, rank, {x}, value.dtype, value.shape));
        const DType to = SomeDType();
        return Try(Of(Op::kCast, rank, {x}, to, value.shape));
      }
    }
  }

  bool Unary(int rank) {
    const Op op = static_cast<Op>(Between(static_cast<int>(Op::kNeg), static_cast<int>(Op::kCeil)));
    const bool any = op == Op::kNeg || op == Op::kAbs || op == Op::kRelu || op == Op::kSign;
    const int x = any ? SomeNumbers(rank) : SomeFloat(rank);
    return Try(Of(op, rank, {x}, p_.value(x).dtype, p_.value(x).shape));
  }

  bool Binary(int rank) {
    const Op op = AnyOf({Op::kAdd, Op::kAdd, Op::kSub, Op::kSub, Op::kMul, Op::kMul, Op::kMul,
                         Op::kDiv, Op::kMaximum, Op::kMinimum, Op::kPow});
    const int x = op == Op::kPow ? SomeFloat(rank) : SomeNumbers(rank);
    const Value a = p_.value(x);
    int y = -1;
    if (Chance(0.2)) {
      // Of a shape that stretches.
      Dims shape = a.shape;
      for (int64_t& n : shape) {
        if (Chance(0.4)) n = 1;
      }
      if (!shape.empty() && Chance(0.4)) shape.erase(shape.begin());
      y = Operand(rank, a.dtype, shape);
    } else if (Chance(0.8)) {
      y = Existing(rank, [&](const Value& v) { return v.dtype == a.dtype && v.shape == a.shape; });
    }
    if (y < 0) y = Operand(rank, a.dtype, a.shape);
    Dims shape = a.shape;
    if (p_.value(y).shape.size() == shape.size()) {
      for (size_t d = 0; d < shape.size(); ++d) {
        if (shape[d] == 1) shape[d] = p_.value(y).shape[d];
      }
    }
    std::vector<int> in = {x, y};
    if (Chance(0.3)) std::swap(in[0], in[1]);
    return Try(Of(op, rank, in, a.dtype, shape));
  }

  // Many small ops of one rank and type, one behind the other: what is sent together, and waits for
  // this collective or that.
  void Burst() {
    const int rank = Between(0, p_.ranks() - 1);
    const Value like = p_.value(SomeFloat(rank));
    const auto fits = [&](const Value& v) {
      return v.dtype == like.dtype && v.shape == like.shape;
    };
    for (int i = Between(5, 12); i > 0; --i) {
      const Op op = AnyOf({Op::kAdd, Op::kAdd, Op::kSub, Op::kSub, Op::kMul});
      const std::vector<int> in = {Existing(rank, fits), Existing(rank, fits)};
      Try(Of(op, rank, in, like.dtype, like.shape));
    }
  }

  bool Number(int rank) {
    const int x = SomeNumbers(rank);
    Statement s = Of(Chance(0.5) ? Op::kAddNumber : Op::kMulNumber, rank, {x}, p_.value(x).dtype,
                     p_.value(x).shape);
    s.number = AnyOf({2.0, -1.0, 3.0, 1.0});
    if (p_.value(x).dtype == DType::kU8) s.number = std::fabs(s.number);
    if (IsFloating(p_.value(x).dtype) && Chance(0.5)) s.number = AnyOf({0.5, -0.25, 1.5});
    return Try(std::move(s));
  }

  bool Reduction1(int rank) {
    const Op op = AnyOf({Op::kSum, Op::kSum, Op::kMean, Op::kMax, Op::kMin, Op::kProduct});
    const int x = op == Op::kMean ? SomeFloat(rank) : SomeNumbers(rank);
    const Value a = p_.value(x);
    std::vector<int64_t> axes;
    const bool all = Chance(0.4);
    for (size_t d = 0; d < a.shape.size() && !all; ++d) {
      if (Chance(0.5)) axes.push_back(static_cast<int64_t>(d));
    }
    const bool keep = Chance(0.3);
    Statement s = Of(op, rank, {x}, a.dtype, Without(a.shape, axes, all, keep));
    s.ints = axes;
    s.number = all ? 1 : 0;
    s.flag = keep;
    return Try(std::move(s));
  }

  bool View(int rank) {
    const int x = SomeNumbers(rank);
    const Value a = p_.value(x);
    const auto dims = static_cast<int>(a.shape.size());
    switch (Between(0, 5)) {
      case 0: {
        Dims shape = a.shape;
        for (int64_t& n : shape) {
          if (n == 1) n = Between(1, 3);
        }
        if (Chance(0.6)) shape.insert(shape.begin(), Between(1, 3));
        if (Elements(shape) > 40) return false;
        Statement s = Of(Op::kExpand, rank, {x}, a.dtype, shape);
        s.ints = shape;
        return Try(std::move(s));
      }
      case 1: {
        Dims shape = {Elements(a.shape)};
        if (Chance(0.3)) shape.push_back(1);
        if (Elements(a.shape) % 2 == 0 && Elements(a.shape) > 0 && Chance(0.5)) {
          shape = {2, Elements(a.shape) / 2};
        }
        if (Elements(a.shape) == 1 && Chance(0.5)) shape = {};
        Statement s = Of(Op::kReshape, rank, {x}, a.dtype, shape);
        s.ints = shape;
        return Try(std::move(s));
      }
      case 2: {
        if (dims < 2) return false;
        std::vector<int> order;
        for (int d = 0; d < dims; ++d) order.push_back(d);
        order = Shuffled(order);
        Dims shape;
        for (const int d : order) shape.push_back(a.shape[static_cast<size_t>(d)]);
        Statement s = Of(Op::kTranspose, rank, {x}, a.dtype, shape);
        s.ints.assign(order.begin(), order.end());
        return Try(std::move(s));
      }
      case 3: {
        if (dims < 1) return false;
        const int axis = Between(0, dims - 1);
        const auto size = static_cast<int>(a.shape[static_cast<size_t>(axis)]);
        const int begin = Between(0, size);
        const int end = Between(begin, size);
        Dims shape = a.shape;
        shape[static_cast<size_t>(axis)] = end - begin;
        Statement s = Of(Op::kSlice, rank, {x}, a.dtype, shape);
        s.ints = {axis, begin, end};
        return Try(std::move(s));
      }
      case 4: {
        if (dims < 1) return false;
        const int axis = Between(0, dims - 1);
        std::vector<int> in = {x};
        Dims shape = a.shape;
        for (int i = Between(0, 2); i > 0; --i) {
          Dims other = a.shape;
          other[static_cast<size_t>(axis)] = Between(0, 3);
          in.push_back(Chance(0.3) ? x : Operand(rank, a.dtype, other));
          shape[static_cast<size_t>(axis)] += p_.value(in.back()).shape[static_cast<size_t>(axis)];
        }
        if (Elements(shape) > 60) return false;
        Statement s = Of(Op::kConcat, rank, in, a.dtype, shape);
        s.ints = {axis};
        return Try(std::move(s));
      }
      default: {
        std::vector<int> others;
        for (const int r : p_.RanksOf(p_.trainer_of[static_cast<size_t>(rank)])) {
          if (r != rank) others.push_back(r);
        }
        if (others.empty()) return false;
        return Try(Of(Op::kCopyTo, rank, {x}, a.dtype, a.shape, Any(others)));
      }
    }
  }

  bool Model(int rank) {
    if (Chance(0.4)) {
      const int m = Between(1, 3);
      const int k = Between(0, 3);
      const int n = Between(1, 3);
      int x = Existing(rank, [](const Value& v) {
        return IsFloating(v.dtype) && v.shape.size() >= 2 && Elements(v.shape) <= 16;
      });
      if (x < 0) x = Operand(rank, main_, {m, k});
      const Value a = p_.value(x);
      const int y = Operand(rank, a.dtype, {a.shape.back(), n});
      Dims shape = a.shape;
      shape.back() = n;
      return Try(Of(Op::kMatMul, rank, {x, y}, a.dtype, shape));
    }
    int x = Existing(rank, [](const Value& v) {
      return IsFloating(v.dtype) && !v.shape.empty() && v.shape.back() > 0;
    });
    if (x < 0) x = Operand(rank, main_, {Between(1, 3), Between(1, 4)});
    const Value a = p_.value(x);
    if (Chance(0.5)) {
      Dims rows = a.shape;
      rows.pop_back();
      const int labels = Indices(rank, rows, a.shape.back());
      return Try(Of(Op::kCrossEntropy, rank, {x, labels}, a.dtype, rows));
    }
    Statement s = Of(Chance(0.5) ? Op::kSoftmax : Op::kLogSoftmax, rank, {x}, a.dtype, a.shape);
    s.ints = {Between(0, static_cast<int>(a.shape.size()) - 1)};
    return Try(std::move(s));
  }

  bool Indexed(int rank) {
    int x = Existing(rank, [](const Value& v) {
      return v.dtype != DType::kBool && !v.shape.empty() && Elements(v.shape) > 0;
    });
    if (x < 0) x = Operand(rank, main_, {Between(1, 4)});
    const Value a = p_.value(x);
    const auto dims = static_cast<int>(a.shape.size());
    const int axis = Between(0, dims - 1);
    const int64_t size = a.shape[static_cast<size_t>(axis)];
    const int64_t to = Between(1, 4);
    switch (Between(0, 5)) {
      case 0: {
        const Dims indices = Chance(0.2) ? Dims{} : Dims{Between(0, 3)};
        Dims shape(a.shape.begin(), a.shape.begin() + axis);
        shape.insert(shape.end(), indices.begin(), indices.end());
        shape.insert(shape.end(), a.shape.begin() + axis + 1, a.shape.end());
        Statement s = Of(Op::kTake, rank, {x, Indices(rank, indices, size)}, a.dtype, shape);
        s.ints = {axis};
        return Try(std::move(s));
      }
      case 1: {
        Dims shape = a.shape;
        shape[static_cast<size_t>(axis)] = to;
        Statement s = Of(Op::kScatterAdd, rank, {x, Indices(rank, {size}, to)}, a.dtype, shape);
        s.ints = {to, axis};
        return Try(std::move(s));
      }
      case 2: {
        Dims shape = a.shape;
        shape[static_cast<size_t>(axis)] = Between(0, 3);
        Statement s = Of(Op::kTakeAlong, rank, {x, Indices(rank, shape, size)}, a.dtype, shape);
        s.ints = {axis};
        return Try(std::move(s));
      }
      case 3: {
        Dims shape = a.shape;
        shape[static_cast<size_t>(axis)] = to;
        Statement s =
            Of(Op::kScatterAddAlong, rank, {x, Indices(rank, a.shape, to)}, a.dtype, shape);
        s.ints = {to, axis};
        return Try(std::move(s));
      }
      case 4: {
        const bool keep = Chance(0.3);
        Statement s =
            Of(Op::kArgMax, rank, {x}, DType::kI64, Without(a.shape, {axis}, false, keep));
        s.ints = {axis};
        s.flag = keep;
        return Try(std::move(s));
      }
      default: {
        const int indices = Indices(rank, {Between(0, 3)}, to);
        Dims shape = p_.value(indices).shape;
        shape.push_back(to);
        Statement s = Of(Op::kOneHot, rank, {indices}, main_, shape);
        s.ints = {to};
        return Try(std::move(s));
      }
    }
  }

  bool Select(int rank) {
    const int x = SomeNumbers(rank);
    const Value a = p_.value(x);
    const int y = Operand(rank, a.dtype, a.shape);
    int condition = Existing(
        rank, [&](const Value& v) { return v.dtype == DType::kBool && v.shape == a.shape; });
    if (condition < 0 || Chance(0.4)) {
      Statement s = Of(Chance(0.6) ? Op::kLess : Op::kEqual, rank, {x, y}, DType::kBool, a.shape);
      condition = s.calls[0].out[0];
      if (!Try(std::move(s))) return false;
      if (Chance(0.3)) return true;
    }
    if (Chance(0.2)) {
      return Try(Of(Op::kLogicalNot, rank, {condition}, DType::kBool, a.shape));
    }
    return Try(Of(Op::kWhere, rank, {condition, x, y}, a.dtype, a.shape));
  }

  // --- Collectives ------------------------------------------------------------------------------

  int DeviceGroups() const {
    return static_cast<int>(std::count_if(p_.groups.begin(), p_.groups.end(),
                                          [](const GroupOf& g) { return g.devices; }));
  }
  int SomeGroup(bool devices) {
    std::vector<int> found;
    for (int g = 0; g < static_cast<int>(p_.groups.size()); ++g) {
      const GroupOf& group = p_.groups[static_cast<size_t>(g)];
      bool fits = group.devices == devices;
      for (const int rank : group.ranks) {
        fits =
            fits && (devices ||
                     !only_devices_[static_cast<size_t>(p_.trainer_of[static_cast<size_t>(rank)])]);
      }
      if (fits) found.push_back(g);
    }
    return found.empty() ? -1 : Any(found);
  }

  Reduction SomeReduction(DType dtype) {
    if (IsFloating(dtype)) {
      return AnyOf({Reduction::kSum, Reduction::kSum, Reduction::kSum, Reduction::kAvg,
                    Reduction::kProduct, Reduction::kMin, Reduction::kMax, Reduction::kPremulSum});
    }
    return AnyOf({Reduction::kSum, Reduction::kProduct, Reduction::kMin, Reduction::kMax,
                  Reduction::kBand, Reduction::kBor, Reduction::kBxor});
  }

  // The type that the operands of a collective have: that of something that is there, or another.
  Value SomeType(const std::vector<int>& ranks) {
    const int rank = ranks[random_() % ranks.size()];
    int v = -1;
    if (Chance(0.7)) {
      v = Existing(rank, [&](const Value& x) {
        return (IsFloating(x.dtype) || Chance(0.2)) && Elements(x.shape) <= 30;
      });
    }
    if (v >= 0) return p_.value(v);
    Value value;
    value.dtype = Chance(0.8) ? main_ : Chance(0.2) ? DType::kBool : SomeDType();
    value.shape = SomeShape();
    return value;
  }

  bool Collective() {
    const int g = SomeGroup(false);
    if (g < 0) return false;
    const std::vector<int> ranks = p_.groups[static_cast<size_t>(g)].ranks;
    static constexpr Op kOps[] = {Op::kAllReduce,
                                  Op::kAllReduce,
                                  Op::kAllReduce,
                                  Op::kAllReduce,
                                  Op::kBroadcast,
                                  Op::kBroadcast,
                                  Op::kReduce,
                                  Op::kAllGather,
                                  Op::kAllGatherIntoTensor,
                                  Op::kGather,
                                  Op::kGatherIntoTensor,
                                  Op::kScatter,
                                  Op::kScatterTensor,
                                  Op::kReduceScatter,
                                  Op::kReduceScatterTensor,
                                  Op::kReduceScatterTensor,
                                  Op::kAllToAll,
                                  Op::kAllToAllSingle,
                                  Op::kTransfer,
                                  Op::kTransfer,
                                  Op::kBarrier,
                                  Op::kAllToAllRagged,
                                  Op::kAllGatherRagged,
                                  Op::kGatherRagged,
                                  Op::kScatterRagged,
                                  Op::kReduceScatterRagged};
    Statement like;
    like.op = kOps[random_() % (sizeof(kOps) / sizeof(kOps[0]))];
    like.group = g;
    if (like.op == Op::kTransfer && ranks.size() < 2) return false;
    Value type = SomeType(ranks);
    like.reduction = SomeReduction(type.dtype);
    like.root = Between(0, static_cast<int>(ranks.size()) - 1);
    for (const int rank : ranks) {
      Call call;
      call.rank = rank;
      call.no_grad = no_grads_ && Chance(0.1);
      call.factor = AnyOf({1.0, 2.0, 0.5, -1.0});
      like.calls.push_back(call);
    }
    const bool several = CanCoalesce(like.op) && Chance(0.3);
    bool any = false;
    for (int i = several ? Between(2, 3) : 1; i > 0; --i) {
      if (i > 1 || any) {
        type.shape = Chance(0.5) ? type.shape : SomeShape();
      }
      if (!One(like, type, several)) return any;
      // It may have needed operands, which now stand between.
      if (any) Join();
      any = true;
    }
    return true;
  }

  // Makes the last statement one with the block before it: with leaves and local ops between moved
  // to where the block begins.
  void Join() {
    const auto last = static_cast<int>(p_.statements.size()) - 1;
    int before = last - 1;
    const Op op = p_.statements[static_cast<size_t>(last)].op;
    while (before >= 0 && p_.statements[static_cast<size_t>(before)].op != op) --before;
    if (before < 0) return;
    int first = before;
    while (p_.statements[static_cast<size_t>(first)].joined) --first;
    Program joined = p_;
    std::vector<Statement> between(joined.statements.begin() + before + 1,
                                   joined.statements.begin() + last);
    for (const Statement& s : between) {
      if (IsCollective(s.op) || IsOfDevices(s.op) || s.op == Op::kGradient) return;
    }
    joined.statements.erase(joined.statements.begin() + before + 1,
                            joined.statements.begin() + last);
    joined.statements.insert(joined.statements.begin() + first, between.begin(), between.end());
    joined.statements.back().joined = true;
    // It may have come to read what the block gives.
    if (Check(joined).ok()) p_ = std::move(joined);
  }

  std::vector<int64_t> SomeRows(size_t n, bool uneven) {
    std::vector<int64_t> rows(n, Between(0, 3));
    for (int64_t& r : rows) {
      if (uneven) r = Between(0, 3);
    }
    return rows;
  }

  // One collective as `like`; false: it does not go. `plain`: without rows and dims of its own.
  bool One(Statement s, const Value& type, bool plain) {
    const size_t size = s.calls.size();
    const auto root = static_cast<size_t>(s.root);
    const DType dtype = type.dtype;
    Dims shape = type.shape;
    const bool uneven = !plain && Chance(0.5);
    const auto result = [&](Call& call, const Dims& of) {
      call.out.push_back(p_.AddValue(call.rank, dtype, of));
    };
    const auto absent = [&](Call& call) {
      call.out.push_back(p_.AddValue(call.rank, dtype, {}, true));
    };
    const auto with = [](Dims of, int64_t axis, int64_t rows) {
      of[static_cast<size_t>(axis)] = rows;
      return of;
    };
    const auto tensor_shape = [&] {
      if (shape.empty()) shape = {1};
    };
    // Operands first: they may need statements, and values, of their own.
    switch (s.op) {
      case Op::kAllReduce:
      case Op::kReduce:
      case Op::kBroadcast:
        for (Call& call : s.calls) call.in = {Operand(call.rank, dtype, shape)};
        for (size_t p = 0; p < size; ++p) {
          if (s.op == Op::kReduce && p != root) {
            absent(s.calls[p]);
          } else {
            result(s.calls[p], shape);
          }
        }
        break;
      case Op::kAllGather:
      case Op::kGather:
      case Op::kAllGatherIntoTensor:
      case Op::kGatherIntoTensor: {
        const bool tensor = s.op == Op::kAllGatherIntoTensor || s.op == Op::kGatherIntoTensor;
        const bool at_root = s.op == Op::kGather || s.op == Op::kGatherIntoTensor;
        if (tensor && !plain && !shape.empty() && Chance(0.3)) {
          s.dim = Between(0, static_cast<int>(shape.size()) - 1);
        }
        std::vector<Dims> shapes(size, shape);
        if (uneven && !shape.empty()) {
          s.rows = SomeRows(size, true);
          for (size_t p = 0; p < size; ++p) shapes[p] = with(shape, s.dim, s.rows[p]);
        }
        for (size_t p = 0; p < size; ++p) {
          s.calls[p].in = {Operand(s.calls[p].rank, dtype, shapes[p])};
        }
        Dims all = shape.empty() ? Dims{0} : with(shape, s.dim, 0);
        for (const Dims& piece : shapes) {
          all[static_cast<size_t>(s.dim)] += piece.empty() ? 1 : piece[static_cast<size_t>(s.dim)];
        }
        for (size_t p = 0; p < size; ++p) {
          if (at_root && p != root) {
            absent(s.calls[p]);
          } else if (tensor) {
            result(s.calls[p], all);
          } else {
            for (const Dims& piece : shapes) result(s.calls[p], piece);
          }
        }
        break;
      }
      case Op::kScatter: {
        std::vector<Dims> shapes(size, shape);
        if (uneven && !shape.empty()) {
          for (Dims& piece : shapes) piece[0] = Between(0, 3);
        }
        for (const Dims& piece : shapes) {
          s.calls[root].in.push_back(Operand(s.calls[root].rank, dtype, piece));
        }
        for (size_t p = 0; p < size; ++p) result(s.calls[p], shapes[p]);
        break;
      }
      case Op::kScatterTensor:
      case Op::kReduceScatterTensor: {
        tensor_shape();
        if (!plain && Chance(0.3)) s.dim = Between(0, static_cast<int>(shape.size()) - 1);
        std::vector<int64_t> rows = SomeRows(size, uneven);
        int64_t sum = 0;
        for (const int64_t n : rows) sum += n;
        const Dims whole = with(shape, s.dim, sum);
        if (uneven) s.rows = rows;
        for (size_t p = 0; p < size; ++p) {
          if (s.op == Op::kScatterTensor && p != root) continue;
          s.calls[p].in = {Operand(s.calls[p].rank, dtype, whole)};
        }
        for (size_t p = 0; p < size; ++p) result(s.calls[p], with(shape, s.dim, rows[p]));
        break;
      }
      case Op::kReduceScatter: {
        std::vector<Dims> shapes(size, shape);
        if (uneven && !shape.empty()) {
          for (Dims& piece : shapes) piece[0] = Between(0, 3);
        }
        for (Call& call : s.calls) {
          for (const Dims& piece : shapes) call.in.push_back(Operand(call.rank, dtype, piece));
        }
        for (size_t p = 0; p < size; ++p) result(s.calls[p], shapes[p]);
        break;
      }
      case Op::kAllToAll:
      case Op::kAllToAllSingle: {
        if (s.op == Op::kAllToAllSingle) tensor_shape();
        const int64_t even = shape.empty() ? 1 : Between(0, 3);
        std::vector<int64_t> rows(size * size, even);
        if (uneven && !shape.empty()) {
          for (int64_t& n : rows) n = Between(0, 3);
          s.rows = rows;
        }
        for (size_t p = 0; p < size; ++p) {
          int64_t sum = 0;
          for (size_t to = 0; to < size; ++to) sum += rows[p * size + to];
          if (s.op == Op::kAllToAllSingle) {
            s.calls[p].in = {Operand(s.calls[p].rank, dtype, with(shape, 0, sum))};
            continue;
          }
          for (size_t to = 0; to < size; ++to) {
            s.calls[p].in.push_back(
                Operand(s.calls[p].rank, dtype,
                        shape.empty() ? shape : with(shape, 0, rows[p * size + to])));
          }
        }
        for (size_t p = 0; p < size; ++p) {
          int64_t sum = 0;
          for (size_t from = 0; from < size; ++from) {
            const int64_t n = rows[from * size + p];
            sum += n;
            if (s.op == Op::kAllToAll)
              result(s.calls[p], shape.empty() ? shape : with(shape, 0, n));
          }
          if (s.op == Op::kAllToAllSingle) result(s.calls[p], with(shape, 0, sum));
        }
        break;
      }
      case Op::kTransfer: {
        const int from = Between(0, static_cast<int>(size) - 1);
        const int to = (from + Between(1, static_cast<int>(size) - 1)) % static_cast<int>(size);
        s.ints = {from, to, Between(0, 1)};
        Call send = s.calls[static_cast<size_t>(from)];
        Call receive = s.calls[static_cast<size_t>(to)];
        if (plain) send.no_grad = receive.no_grad = false;
        send.in = {Operand(send.rank, dtype, shape)};
        absent(send);
        result(receive, shape);
        s.calls = {send, receive};
        s.root = -1;
        break;
      }
      case Op::kBarrier:
        for (Call& call : s.calls) absent(call);
        break;
      case Op::kAllToAllRagged:
      case Op::kReduceScatterRagged:
      case Op::kAllGatherRagged:
      case Op::kGatherRagged:
      case Op::kScatterRagged:
        if (!OneRagged(&s, dtype, shape.empty() ? Dims{1} : shape)) return false;
        break;
      default:
        return false;
    }
    return Try(std::move(s));
  }

  bool OneRagged(Statement* s, DType dtype, const Dims& shape) {
    const size_t size = s->calls.size();
    const auto root = static_cast<size_t>(s->root);
    const auto with = [&shape](int64_t rows) {
      Dims of = shape;
      of[0] = rows;
      return of;
    };
    // Rows from each member to each; the most that one gets.
    std::vector<int64_t> rows(size * size);
    for (int64_t& n : rows) n = Between(0, 2);
    if (s->op == Op::kReduceScatterRagged) {
      for (size_t i = size; i < rows.size(); ++i) rows[i] = rows[i % size];
    }
    int64_t most = 0;
    int64_t all = 0;
    for (size_t p = 0; p < size; ++p) {
      int64_t sum = 0;
      for (size_t from = 0; from < size; ++from) sum += rows[from * size + p];
      most = std::max(most, s->op == Op::kReduceScatterRagged || s->op == Op::kScatterRagged
                                ? *std::max_element(rows.begin(), rows.end())
                                : sum);
      all += rows[p];
    }
    const bool gather = s->op == Op::kAllGatherRagged || s->op == Op::kGatherRagged;
    const int64_t max_rows = (gather ? all : most) + Between(0, 2);
    s->number = static_cast<double>(max_rows);
    for (size_t p = 0; p < size; ++p) {
      Call& call = s->calls[p];
      if (s->op == Op::kScatterRagged && p != root) continue;
      std::vector<int64_t> counts;
      if (gather) {
        counts = {rows[p]};
      } else {
        counts.assign(rows.begin() + static_cast<std::ptrdiff_t>(p * size),
                      rows.begin() + static_cast<std::ptrdiff_t>((p + 1) * size));
      }
      int64_t sum = 0;
      for (const int64_t n : counts) sum += n;
      call.in = {Operand(call.rank, dtype, with(sum + Between(0, 1))), CountsOf(call.rank, counts)};
    }
    for (size_t p = 0; p < size; ++p) {
      Call& call = s->calls[p];
      const bool none = s->op == Op::kGatherRagged && p != root;
      const int64_t counts = s->op == Op::kScatterRagged || s->op == Op::kReduceScatterRagged
                                 ? 1
                                 : static_cast<int64_t>(size);
      // Each has room for what may come, not all for as much.
      const int64_t room = max_rows + (Chance(0.3) ? Between(0, 2) : 0);
      call.out = {p_.AddValue(call.rank, dtype, none ? Dims{} : with(room), none),
                  p_.AddValue(call.rank, DType::kI64, none ? Dims{} : Dims{counts}, none)};
    }
    return true;
  }

  bool OfDevices() {
    const int g = SomeGroup(true);
    const std::vector<int> ranks = p_.groups[static_cast<size_t>(g)].ranks;
    Statement like;
    like.op = AnyOf(
        {Op::kDevicesBroadcast, Op::kDevicesReduceAdd, Op::kDevicesScatter, Op::kDevicesGather});
    like.group = g;
    like.root = Between(0, static_cast<int>(ranks.size()) - 1);
    Call call;
    call.rank = ranks[0];
    call.no_grad = no_grads_ && Chance(0.1);
    like.calls = {call};
    const bool several = CanCoalesce(like.op) && Chance(0.3);
    bool any = false;
    for (int i = several ? Between(2, 3) : 1; i > 0; --i) {
      Value type = SomeType({ranks[static_cast<size_t>(like.root)]});
      if (type.dtype == DType::kBool) type.dtype = main_;
      Statement s = like;
      Dims shape = type.shape;
      Call& mine = s.calls[0];
      const int at_root = ranks[static_cast<size_t>(s.root)];
      const auto result = [&](int rank, const Dims& of) {
        mine.out.push_back(p_.AddValue(rank, type.dtype, of));
      };
      if (s.op == Op::kDevicesBroadcast) {
        mine.in = {Operand(at_root, type.dtype, shape)};
        for (const int rank : ranks) result(rank, shape);
      } else if (s.op == Op::kDevicesReduceAdd) {
        for (const int rank : ranks) mine.in.push_back(Operand(rank, type.dtype, shape));
        result(at_root, shape);
      } else if (s.op == Op::kDevicesScatter) {
        if (shape.empty()) shape = {Between(0, 4)};
        s.dim = Between(0, static_cast<int>(shape.size()) - 1);
        auto& rows = shape[static_cast<size_t>(s.dim)];
        const auto members = static_cast<int64_t>(ranks.size());
        std::vector<int64_t> sizes;
        if (Chance(0.5)) {
          rows = 0;
          for (size_t p = 0; p < ranks.size(); ++p) sizes.push_back(Between(0, 2));
          for (const int64_t n : sizes) rows += n;
          s.ints = sizes;
        } else if (rows == 0) {
          sizes.assign(ranks.size(), 0);
        } else {
          const int64_t chunk = (rows + members - 1) / members;
          for (int64_t at = 0; at < rows; at += chunk) sizes.push_back(std::min(chunk, rows - at));
        }
        mine.in = {Operand(at_root, type.dtype, shape)};
        for (size_t p = 0; p < sizes.size(); ++p) {
          Dims piece = shape;
          piece[static_cast<size_t>(s.dim)] = sizes[p];
          result(ranks[p], piece);
        }
      } else {
        if (shape.empty()) shape = {1};
        s.dim = Between(0, static_cast<int>(shape.size()) - 1);
        Dims all = shape;
        all[static_cast<size_t>(s.dim)] = 0;
        std::vector<int> from = Shuffled(ranks);
        from.resize(static_cast<size_t>(Between(1, static_cast<int>(from.size()))));
        for (const int rank : from) {
          Dims piece = shape;
          piece[static_cast<size_t>(s.dim)] = Between(0, 3);
          all[static_cast<size_t>(s.dim)] += piece[static_cast<size_t>(s.dim)];
          mine.in.push_back(Operand(rank, type.dtype, piece));
        }
        result(at_root, all);
      }
      // Where it is not known whether it is recorded, gradients are nobody's business.
      const std::vector<History> history = Histories(p_);
      for (const int v : mine.in) {
        if (history[static_cast<size_t>(v)] == History::kMaybe) mine.no_grad = true;
      }
      if (mine.no_grad != like.calls[0].no_grad && several) {
        for (const int out : mine.out) Orphan(static_cast<size_t>(out));
        return any;
      }
      if (!Try(std::move(s))) return any;
      if (any) Join();
      any = true;
    }
    return true;
  }

  // --- Gradients --------------------------------------------------------------------------------

  bool Gradients(bool create, bool retain) {
    const std::vector<History> history = Histories(p_);
    Statement s;
    s.op = Op::kGradient;
    s.create = create;
    s.retain = retain;
    s.backward = Chance(0.3);
    const auto first = static_cast<int>(p_.statements.size());
    const size_t values = p_.values.size();
    std::vector<Statement> seeds;
    for (int t = 0; t < p_.trainers(); ++t) {
      std::vector<int> roots;
      std::vector<int> wanted;
      for (int v = 0; v < static_cast<int>(values); ++v) {
        const Value& value = p_.value(v);
        if (value.rank < 0 || p_.trainer_of[static_cast<size_t>(value.rank)] != t) continue;
        if (history[static_cast<size_t>(v)] != History::kYes) continue;
        if (!IsLeaf(v) && Chance(value.absent ? 0.15 : 0.3)) roots.push_back(v);
        if (value.absent) continue;
        if (IsLeaf(v) ? Chance(0.85) : (!s.backward && Chance(0.05))) wanted.push_back(v);
      }
      Call call;
      call.rank = t;
      std::vector<int> with;
      for (const int root : roots) with.push_back(Seed(root, &seeds));
      if (roots.empty() && wanted.empty()) continue;
      call.in = roots;
      call.in.insert(call.in.end(), with.begin(), with.end());
      call.in.insert(call.in.end(), wanted.begin(), wanted.end());
      call.wanted = static_cast<int>(wanted.size());
      s.calls.push_back(call);
    }
    for (Statement& seed : seeds) p_.statements.push_back(std::move(seed));
    p_.statements.push_back(std::move(s));
    // Those without a root of their own may be needed all the same, which Complete finds out.
    const auto rootless = [](const Call& call) {
      return call.in.size() == static_cast<size_t>(call.wanted);
    };
    std::vector<Call> aside;
    {
      std::vector<Call>& calls = p_.statements.back().calls;
      for (size_t i = 0; i < calls.size();) {
        if (rootless(calls[i])) {
          aside.push_back(calls[i]);
          calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(i));
        } else {
          ++i;
        }
      }
    }
    bool good = !p_.statements.back().calls.empty();
    if (good) Complete(&p_, directly_);
    for (Call& call : p_.statements.back().calls) {
      for (const Call& other : aside) {
        if (other.rank != call.rank) continue;
        call.in.insert(call.in.end(), other.in.begin(), other.in.end());
        call.wanted = other.wanted;
      }
      const auto last = static_cast<int>(p_.statements.size()) - 1;
      const auto end = std::remove_if(call.in.end() - call.wanted, call.in.end(),
                                      [&](int v) { return MayBeAnother(p_, last, v); });
      call.wanted -= static_cast<int>(call.in.end() - end);
      call.in.erase(end, call.in.end());
      for (size_t i = call.in.size() - static_cast<size_t>(call.wanted); i < call.in.size(); ++i) {
        const Value value = p_.value(call.in[i]);
        call.out.push_back(p_.AddValue(value.rank, value.dtype, value.shape));
      }
    }
    if (!good) {
      p_.statements.resize(static_cast<size_t>(first));
      p_.values.resize(values);
      return false;
    }
    return Settle(first, kLargestGradient, Check(p_).ok());
  }

  int Seed(int root, std::vector<Statement>* seeds) {
    const Value value = p_.value(root);
    if (value.absent) return -1;
    if (Elements(value.shape) == 1 && Chance(0.5)) return -1;
    if (Chance(0.3)) {
      const int v = Existing(value.rank, [&](const Value& x) {
        return x.dtype == value.dtype && x.shape == value.shape;
      });
      if (v >= 0) return v;
    }
    Statement s;
    s.op = Op::kLeaf;
    s.data = SomeData(value.dtype, Elements(value.shape));
    s.captured = Chance(0.1);
    Call call;
    call.rank = value.rank;
    call.out = {p_.AddValue(value.rank, value.dtype, value.shape)};
    s.calls = {call};
    seeds->push_back(s);
    return call.out[0];
  }

  bool IsLeaf(int v) const {
    for (const Statement& s : p_.statements) {
      if (s.op == Op::kLeaf && s.calls[0].out[0] == v) return true;
    }
    return false;
  }

  // --- The end ----------------------------------------------------------------------------------

  void Finish() {
    // What nobody uses says nothing.
    std::vector<int> uses(p_.values.size(), 0);
    for (const Statement& s : p_.statements) {
      for (const Call& call : s.calls) {
        for (const int in : call.in) {
          if (in >= 0) ++uses[static_cast<size_t>(in)];
        }
      }
    }
    std::vector<Statement> kept;
    for (Statement& s : p_.statements) {
      if (s.op == Op::kLeaf && uses[static_cast<size_t>(s.calls[0].out[0])] == 0) continue;
      kept.push_back(std::move(s));
    }
    p_.statements = std::move(kept);
    const bool donating = Chance(0.6);
    for (const Statement& s : p_.statements) {
      for (const Call& call : s.calls) {
        for (const int out : call.out) {
          Value& value = p_.values[static_cast<size_t>(out)];
          if (value.absent) continue;
          if (s.op == Op::kLeaf) {
            const bool donated = donating && Chance(0.5);
            if (donated) p_.donated.push_back(out);
            value.observed = Chance(donated ? 0.15 : 0.04);
          } else {
            const bool unused = uses[static_cast<size_t>(out)] == 0;
            value.observed = Chance(s.op == Op::kGradient || unused ? 0.9 : 0.35);
          }
        }
      }
    }
    Compact(&p_);
  }

  const GeneratorOptions options_;
  std::mt19937_64 random_;
  Program p_;
  Evaluator e_;
  DType main_ = DType::kF32;
  int orders_ = 0;
  bool no_grads_ = false;
  bool some_without_ = false;
  bool coarse_ = false;
  bool directly_ = false;
  std::vector<bool> only_devices_;  // by trainer
  std::vector<bool> without_;
};

}  // namespace

Program Generate(uint64_t seed, const GeneratorOptions& options) {
  // Few are nothing at all: of one rank, with nothing that could be made of it.
  for (uint64_t attempt = 0;; ++attempt) {
    Program program = Generator(seed * 0x9e3779b97f4a7c15u + attempt, options).Make();
    program.seed = seed;
    bool observed = false;
    for (const Value& value : program.values) observed = observed || value.observed;
    if (observed && Check(program).ok() && Evaluate(program).ok()) return program;
  }
}

}  // namespace random_programs
}  // namespace chorus
