#include "tests/random/generate.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tests/random/draft.h"
#include "tests/random/evaluate.h"
#include "tests/random/local_ops.h"
#include "tests/random/random.h"

namespace chorus {
namespace random_programs {
namespace {

constexpr double kLargestGradient = 1e5;

int DeviceGroups(const Program& program) {
  return static_cast<int>(std::count_if(program.groups.begin(), program.groups.end(),
                                        [](const GroupOf& g) { return g.devices; }));
}

bool IsLeaf(const Program& program, int v) {
  for (const Statement& s : program.statements) {
    if (s.op == Op::kLeaf && s.calls[0].out[0] == v) return true;
  }
  return false;
}

// Makes the last statement one with the block before it: with leaves and local ops between moved
// to where the block begins.
void Join(Program* program) {
  const auto last = static_cast<int>(program->statements.size()) - 1;
  int before = last - 1;
  const Op op = program->statements[static_cast<size_t>(last)].op;
  while (before >= 0 && program->statements[static_cast<size_t>(before)].op != op) --before;
  if (before < 0) return;
  int first = before;
  while (program->statements[static_cast<size_t>(first)].joined) --first;
  Program joined = *program;
  std::vector<Statement> between(joined.statements.begin() + before + 1,
                                 joined.statements.begin() + last);
  for (const Statement& s : between) {
    if (IsCollective(s.op) || IsOfDevices(s.op) || s.op == Op::kGradient) return;
  }
  joined.statements.erase(joined.statements.begin() + before + 1, joined.statements.begin() + last);
  joined.statements.insert(joined.statements.begin() + first, between.begin(), between.end());
  joined.statements.back().joined = true;
  // It may have come to read what the block gives.
  if (Check(joined).ok()) *program = std::move(joined);
}

// Makes one program: its ranks and groups, its statements (the collectives and gradients by
// itself), and last what is observed of it.
class Generator {
 public:
  Generator(uint64_t seed, const GeneratorOptions& options)
      : options_(options),
        random_(seed),
        draft_(&settings_, &random_, &p_),
        local_ops_(&settings_, &random_, &p_, &draft_) {
    p_.seed = seed;
    settings_.unwanted = options.without;
  }

  Program Make() {
    Plan();
    const int before = random_.Between(2, 7) + (random_.Chance(0.3) ? random_.Between(0, 10) : 0);
    Statements(before, 0.4);
    if (random_.Chance(0.2)) EveryReduction();
    for (int order = 0; order < settings_.orders; ++order) {
      const bool last = order + 1 == settings_.orders;
      if (order == 0 && random_.Chance(0.15) && Gradients(false, true))
        Statements(random_.Between(0, 2), 0.3);
      if (!Gradients(!last, false)) break;
      if (!last) Statements(random_.Between(0, 3), 0.25);
    }
    if (random_.Chance(0.3)) Statements(random_.Between(1, 3), 0.5);
    Finish();
    return std::move(p_);
  }

 private:
  // --- The frame --------------------------------------------------------------------------------

  void Plan() {
    const int ranks = random_.AnyOf({1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6});
    const int style = random_.Between(0, 9);
    for (int r = 0; r < ranks; ++r) {
      p_.trainer_of.push_back(style < 6 ? r : style < 8 ? 0 : random_.Between(0, r));
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
    const int more = random_.Chance(0.6) ? random_.Between(1, 3) : 0;
    for (int g = 0; g < more; ++g) {
      GroupOf group;
      if (random_.Chance(0.4)) {
        group.ranks = p_.groups.back().ranks;  // two of the same
      } else {
        const std::vector<int> all = random_.Shuffled(everybody.ranks);
        group.ranks.assign(all.begin(), all.begin() + random_.Between(1, ranks));
      }
      p_.groups.push_back(group);
    }
    for (int t = 0; t < p_.trainers(); ++t) {
      const std::vector<int> mine = p_.RanksOf(t);
      // What can be compiled has one world: that of the devices, or that of the job.
      only_devices_.push_back(mine.size() > 1 && random_.Chance(0.6));
      if (mine.size() < 2 || (!only_devices_.back() && random_.Chance(0.6))) continue;
      GroupOf devices;
      devices.devices = true;
      devices.ranks = random_.Chance(0.5) ? mine : random_.Shuffled(mine);
      if (random_.Chance(0.2))
        devices.ranks.resize(
            static_cast<size_t>(random_.Between(1, static_cast<int>(mine.size()))));
      p_.groups.push_back(devices);
    }
    settings_.dtype = random_.AnyOf({DType::kF32, DType::kF32, DType::kF32, DType::kF32,
                                     DType::kF64, DType::kF64, DType::kF16, DType::kBF16});
    settings_.orders = random_.AnyOf({0, 1, 1, 1, 2, 2, 2, 3});
    if (settings_.orders == 3 && ranks > 4) settings_.orders = 2;
    settings_.orders = std::min(settings_.orders, options_.orders);
    settings_.no_grads = random_.Chance(0.25);
    const bool some_without = random_.Chance(0.3);
    settings_.coarse = random_.Chance(0.5);
    directly_ = random_.Chance(0.3) || options_.directly;
    for (int r = 0; r < ranks; ++r) {
      settings_.without.push_back(some_without && random_.Chance(0.5));
      // In higher orders every trainer keeps a gradient of its own.
      if (settings_.orders >= 2 || !settings_.without.back())
        draft_.Leaf(r, settings_.dtype, draft_.SomeShape(), true);
    }
    for (int t = 0; t < p_.trainers(); ++t) p_.shuffles.push_back(0);
    if (random_.Chance(0.4)) {
      for (uint64_t& s : p_.shuffles) s = 1 + random_.Below(1000000);
    }
  }

  void Statements(int count, double collectives) {
    for (int i = 0; i < count; ++i) {
      if (random_.Chance(0.05)) local_ops_.Burst();
      for (int attempt = 0; attempt < 8; ++attempt) {
        const bool shared = random_.Chance(collectives);
        if (shared && random_.Chance(SomeGroup(false) < 0 ? 1 : 0.35) && DeviceGroups(p_) > 0) {
          if (OfDevices()) break;
        } else if (shared) {
          if (Collective()) break;
        } else if (local_ops_.Add()) {
          break;
        }
      }
    }
  }

  // --- Collectives ------------------------------------------------------------------------------

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
    return found.empty() ? -1 : random_.Any(found);
  }

  static std::vector<Reduction> ReductionsOf(DType dtype) {
    if (IsFloating(dtype)) {
      return {Reduction::kSum, Reduction::kAvg, Reduction::kProduct,
              Reduction::kMin, Reduction::kMax, Reduction::kPremulSum};
    }
    return {Reduction::kSum,  Reduction::kProduct, Reduction::kMin, Reduction::kMax,
            Reduction::kBand, Reduction::kBor,     Reduction::kBxor};
  }

  Reduction SomeReduction(DType dtype) {
    if (IsFloating(dtype) && random_.Chance(0.25)) return Reduction::kSum;
    return random_.Any(ReductionsOf(dtype));
  }

  // The type that the operands of a collective have: that of something that is there, or another.
  Value SomeType(const std::vector<int>& ranks) {
    const int rank = random_.Any(ranks);
    int v = -1;
    if (random_.Chance(0.7)) {
      v = draft_.Existing(rank, [&](const Value& x) {
        return (IsFloating(x.dtype) || random_.Chance(0.2)) && Elements(x.shape) <= 30;
      });
    }
    if (v >= 0) return p_.value(v);
    Value value;
    value.dtype = random_.Chance(0.8)   ? settings_.dtype
                  : random_.Chance(0.2) ? DType::kBool
                                        : draft_.SomeDType();
    value.shape = draft_.SomeShape();
    return value;
  }

  // A collective without a reduction, operands and results.
  Statement OfGroup(Op op, int group) {
    const std::vector<int>& ranks = p_.groups[static_cast<size_t>(group)].ranks;
    Statement s;
    s.op = op;
    s.group = group;
    s.root = random_.Between(0, static_cast<int>(ranks.size()) - 1);
    for (const int rank : ranks) {
      Call call;
      call.rank = rank;
      call.no_grad = settings_.no_grads && random_.Chance(0.1);
      call.factor = random_.AnyOf({1.0, 2.0, 0.5, -1.0});
      s.calls.push_back(call);
    }
    return s;
  }

  // One collective with each reduction that its numbers can have, in any order. Whole numbers, of
  // which the reductions seldom come up otherwise, more often than not.
  void EveryReduction() {
    const int g = SomeGroup(false);
    if (g < 0) return;
    Statement like = OfGroup(random_.AnyOf({Op::kAllReduce, Op::kReduce, Op::kReduceScatter,
                                            Op::kReduceScatterTensor, Op::kReduceScatterRagged}),
                             g);
    Value type;
    type.dtype = random_.Chance(0.4) ? settings_.dtype
                                     : random_.AnyOf({DType::kI64, DType::kI32, DType::kI16,
                                                      DType::kI8, DType::kU8, DType::kBool});
    for (const Reduction reduction : random_.Shuffled(ReductionsOf(type.dtype))) {
      like.reduction = reduction;
      type.shape = draft_.SomeShape();
      One(like, type, false);
    }
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
    Statement like = OfGroup(kOps[random_.Below(sizeof(kOps) / sizeof(kOps[0]))], g);
    if (like.op == Op::kTransfer && ranks.size() < 2) return false;
    Value type = SomeType(ranks);
    like.reduction = SomeReduction(type.dtype);
    const bool several = CanCoalesce(like.op) && random_.Chance(0.3);
    bool any = false;
    for (int i = several ? random_.Between(2, 3) : 1; i > 0; --i) {
      if (i > 1 || any) {
        type.shape = random_.Chance(0.5) ? type.shape : draft_.SomeShape();
      }
      if (!One(like, type, several)) return any;
      // It may have needed operands, which now stand between.
      if (any) Join(&p_);
      any = true;
    }
    return true;
  }

  std::vector<int64_t> SomeRows(size_t n, bool uneven) {
    std::vector<int64_t> rows(n, random_.Between(0, 3));
    for (int64_t& r : rows) {
      if (uneven) r = random_.Between(0, 3);
    }
    return rows;
  }

  // One collective as `like`; false: it does not go. `plain`: without rows and dims of its own.
  bool One(Statement s, const Value& type, bool plain) {
    const size_t size = s.calls.size();
    const auto root = static_cast<size_t>(s.root);
    const DType dtype = type.dtype;
    Dims shape = type.shape;
    const bool uneven = !plain && random_.Chance(0.5);
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
        for (Call& call : s.calls) call.in = {draft_.Operand(call.rank, dtype, shape)};
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
        if (tensor && !plain && !shape.empty() && random_.Chance(0.3)) {
          s.dim = random_.Between(0, static_cast<int>(shape.size()) - 1);
        }
        std::vector<Dims> shapes(size, shape);
        if (uneven && !shape.empty()) {
          s.rows = SomeRows(size, true);
          for (size_t p = 0; p < size; ++p) shapes[p] = with(shape, s.dim, s.rows[p]);
        }
        for (size_t p = 0; p < size; ++p) {
          s.calls[p].in = {draft_.Operand(s.calls[p].rank, dtype, shapes[p])};
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
          for (Dims& piece : shapes) piece[0] = random_.Between(0, 3);
        }
        for (const Dims& piece : shapes) {
          s.calls[root].in.push_back(draft_.Operand(s.calls[root].rank, dtype, piece));
        }
        for (size_t p = 0; p < size; ++p) result(s.calls[p], shapes[p]);
        break;
      }
      case Op::kScatterTensor:
      case Op::kReduceScatterTensor: {
        tensor_shape();
        if (!plain && random_.Chance(0.3))
          s.dim = random_.Between(0, static_cast<int>(shape.size()) - 1);
        std::vector<int64_t> rows = SomeRows(size, uneven);
        int64_t sum = 0;
        for (const int64_t n : rows) sum += n;
        const Dims whole = with(shape, s.dim, sum);
        if (uneven) s.rows = rows;
        for (size_t p = 0; p < size; ++p) {
          if (s.op == Op::kScatterTensor && p != root) continue;
          s.calls[p].in = {draft_.Operand(s.calls[p].rank, dtype, whole)};
        }
        for (size_t p = 0; p < size; ++p) result(s.calls[p], with(shape, s.dim, rows[p]));
        break;
      }
      case Op::kReduceScatter: {
        std::vector<Dims> shapes(size, shape);
        if (uneven && !shape.empty()) {
          for (Dims& piece : shapes) piece[0] = random_.Between(0, 3);
        }
        for (Call& call : s.calls) {
          for (const Dims& piece : shapes)
            call.in.push_back(draft_.Operand(call.rank, dtype, piece));
        }
        for (size_t p = 0; p < size; ++p) result(s.calls[p], shapes[p]);
        break;
      }
      case Op::kAllToAll:
      case Op::kAllToAllSingle: {
        if (s.op == Op::kAllToAllSingle) tensor_shape();
        const int64_t even = shape.empty() ? 1 : random_.Between(0, 3);
        std::vector<int64_t> rows(size * size, even);
        if (uneven && !shape.empty()) {
          for (int64_t& n : rows) n = random_.Between(0, 3);
          s.rows = rows;
        }
        for (size_t p = 0; p < size; ++p) {
          int64_t sum = 0;
          for (size_t to = 0; to < size; ++to) sum += rows[p * size + to];
          if (s.op == Op::kAllToAllSingle) {
            s.calls[p].in = {draft_.Operand(s.calls[p].rank, dtype, with(shape, 0, sum))};
            continue;
          }
          for (size_t to = 0; to < size; ++to) {
            s.calls[p].in.push_back(
                draft_.Operand(s.calls[p].rank, dtype,
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
        const int from = random_.Between(0, static_cast<int>(size) - 1);
        const int to =
            (from + random_.Between(1, static_cast<int>(size) - 1)) % static_cast<int>(size);
        s.ints = {from, to, random_.Between(0, 1)};
        Call send = s.calls[static_cast<size_t>(from)];
        Call receive = s.calls[static_cast<size_t>(to)];
        if (plain) send.no_grad = receive.no_grad = false;
        send.in = {draft_.Operand(send.rank, dtype, shape)};
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
    return draft_.Try(std::move(s));
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
    for (int64_t& n : rows) n = random_.Between(0, 2);
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
    const int64_t max_rows = (gather ? all : most) + random_.Between(0, 2);
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
      call.in = {draft_.Operand(call.rank, dtype, with(sum + random_.Between(0, 1))),
                 draft_.CountsOf(call.rank, counts)};
    }
    for (size_t p = 0; p < size; ++p) {
      Call& call = s->calls[p];
      const bool none = s->op == Op::kGatherRagged && p != root;
      const int64_t counts = s->op == Op::kScatterRagged || s->op == Op::kReduceScatterRagged
                                 ? 1
                                 : static_cast<int64_t>(size);
      // Each has room for what may come, not all for as much.
      const int64_t room = max_rows + (random_.Chance(0.3) ? random_.Between(0, 2) : 0);
      call.out = {p_.AddValue(call.rank, dtype, none ? Dims{} : with(room), none),
                  p_.AddValue(call.rank, DType::kI64, none ? Dims{} : Dims{counts}, none)};
    }
    return true;
  }

  bool OfDevices() {
    const int g = SomeGroup(true);
    const std::vector<int> ranks = p_.groups[static_cast<size_t>(g)].ranks;
    Statement like;
    like.op = random_.AnyOf({Op::kDevicesBroadcast, Op::kDevicesReduceAdd, Op::kDevicesScatter,
                             Op::kDevicesGather, Op::kDevicesLinear});
    like.group = g;
    like.root = random_.Between(0, static_cast<int>(ranks.size()) - 1);
    Call call;
    call.rank = ranks[0];
    call.no_grad = settings_.no_grads && random_.Chance(0.1);
    like.calls = {call};
    const bool several = CanCoalesce(like.op) && random_.Chance(0.3);
    bool any = false;
    for (int i = several ? random_.Between(2, 3) : 1; i > 0; --i) {
      Value type = SomeType({ranks[static_cast<size_t>(like.root)]});
      if (type.dtype == DType::kBool) type.dtype = settings_.dtype;
      Statement s = like;
      Dims shape = type.shape;
      Call& mine = s.calls[0];
      const int at_root = ranks[static_cast<size_t>(s.root)];
      const auto result = [&](int rank, const Dims& of) {
        mine.out.push_back(p_.AddValue(rank, type.dtype, of));
      };
      if (s.op == Op::kDevicesBroadcast) {
        mine.in = {draft_.Operand(at_root, type.dtype, shape)};
        for (const int rank : ranks) result(rank, shape);
      } else if (s.op == Op::kDevicesReduceAdd) {
        for (const int rank : ranks) mine.in.push_back(draft_.Operand(rank, type.dtype, shape));
        result(at_root, shape);
      } else if (s.op == Op::kDevicesScatter) {
        if (shape.empty()) shape = {random_.Between(0, 4)};
        s.dim = random_.Between(0, static_cast<int>(shape.size()) - 1);
        auto& rows = shape[static_cast<size_t>(s.dim)];
        const auto members = static_cast<int64_t>(ranks.size());
        std::vector<int64_t> sizes;
        if (random_.Chance(0.5)) {
          rows = 0;
          for (size_t p = 0; p < ranks.size(); ++p) sizes.push_back(random_.Between(0, 2));
          for (const int64_t n : sizes) rows += n;
          s.ints = sizes;
        } else if (rows == 0) {
          sizes.assign(ranks.size(), 0);
        } else {
          const int64_t chunk = (rows + members - 1) / members;
          for (int64_t at = 0; at < rows; at += chunk) sizes.push_back(std::min(chunk, rows - at));
        }
        mine.in = {draft_.Operand(at_root, type.dtype, shape)};
        for (size_t p = 0; p < sizes.size(); ++p) {
          Dims piece = shape;
          piece[static_cast<size_t>(s.dim)] = sizes[p];
          result(ranks[p], piece);
        }
      } else if (s.op == Op::kDevicesLinear) {
        s.root = 0;
        if (!IsFloating(type.dtype)) type.dtype = settings_.dtype;
        const int64_t rows = random_.Between(0, 5);
        const int64_t width = random_.Between(1, 3);
        const int64_t units = random_.Between(1, 3);
        for (const Dims& of : {Dims{rows, width}, Dims{units, width}, Dims{units}}) {
          mine.in.push_back(draft_.Operand(ranks[0], type.dtype, of));
        }
        result(ranks[0], {rows, units});
      } else {
        if (shape.empty()) shape = {1};
        s.dim = random_.Between(0, static_cast<int>(shape.size()) - 1);
        Dims all = shape;
        all[static_cast<size_t>(s.dim)] = 0;
        std::vector<int> from = random_.Shuffled(ranks);
        from.resize(static_cast<size_t>(random_.Between(1, static_cast<int>(from.size()))));
        for (const int rank : from) {
          Dims piece = shape;
          piece[static_cast<size_t>(s.dim)] = random_.Between(0, 3);
          all[static_cast<size_t>(s.dim)] += piece[static_cast<size_t>(s.dim)];
          mine.in.push_back(draft_.Operand(rank, type.dtype, piece));
        }
        result(at_root, all);
      }
      // Where it is not known whether it is recorded, gradients are nobody's business.
      const std::vector<History> history = Histories(p_);
      for (const int v : mine.in) {
        if (history[static_cast<size_t>(v)] == History::kMaybe) mine.no_grad = true;
      }
      if (mine.no_grad != like.calls[0].no_grad && several) {
        for (const int out : mine.out) draft_.Orphan(static_cast<size_t>(out));
        return any;
      }
      if (!draft_.Try(std::move(s))) return any;
      if (any) Join(&p_);
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
    s.backward = random_.Chance(0.3);
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
        if (!IsLeaf(p_, v) && random_.Chance(value.absent ? 0.15 : 0.3)) roots.push_back(v);
        if (value.absent) continue;
        if (IsLeaf(p_, v) ? random_.Chance(0.85) : (!s.backward && random_.Chance(0.05)))
          wanted.push_back(v);
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
    return draft_.Settle(first, kLargestGradient, Check(p_).ok());
  }

  int Seed(int root, std::vector<Statement>* seeds) {
    const Value value = p_.value(root);
    if (value.absent) return -1;
    if (Elements(value.shape) == 1 && random_.Chance(0.5)) return -1;
    if (random_.Chance(0.3)) {
      const int v = draft_.Existing(value.rank, [&](const Value& x) {
        return x.dtype == value.dtype && x.shape == value.shape;
      });
      if (v >= 0) return v;
    }
    Statement s;
    s.op = Op::kLeaf;
    s.data = draft_.SomeData(value.dtype, Elements(value.shape));
    s.captured = random_.Chance(0.1);
    Call call;
    call.rank = value.rank;
    call.out = {p_.AddValue(value.rank, value.dtype, value.shape)};
    s.calls = {call};
    seeds->push_back(s);
    return call.out[0];
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
    const bool donating = random_.Chance(0.6);
    for (const Statement& s : p_.statements) {
      for (const Call& call : s.calls) {
        for (const int out : call.out) {
          Value& value = p_.values[static_cast<size_t>(out)];
          if (value.absent) continue;
          if (s.op == Op::kLeaf) {
            const bool donated = donating && random_.Chance(0.5);
            if (donated) p_.donated.push_back(out);
            value.observed = random_.Chance(donated ? 0.15 : 0.04);
          } else {
            const bool unused = uses[static_cast<size_t>(out)] == 0;
            value.observed = random_.Chance(s.op == Op::kGradient || unused ? 0.9 : 0.35);
          }
        }
      }
    }
    Compact(&p_);
  }

  const GeneratorOptions options_;
  Random random_;
  Program p_;
  Settings settings_;
  Draft draft_;
  LocalOps local_ops_;
  bool directly_ = false;
  std::vector<bool> only_devices_;  // by trainer
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
