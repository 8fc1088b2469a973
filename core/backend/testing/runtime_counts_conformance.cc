// The part of the suite about pieces whose rows are only known when the call runs.
#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/backend/testing/backend_conformance.h"
#include "core/backend/testing/device_rig.h"
#include "core/backend/testing/naive_reduction.h"
#include "core/base/error.h"

namespace chorus {
namespace {

using Kind = CollectiveKind;
using Bytes = std::vector<uint8_t>;

constexpr Kind kKinds[] = {Kind::kAllGather, Kind::kGather, Kind::kReduceScatter, Kind::kScatter,
                           Kind::kAllToAll};

struct Case {
  Kind kind = Kind::kAllToAll;
  Reduction reduction = Reduction::kNone;
  DType dtype = DType::kF32;
  int size = 2;
  int root = 0;
  int64_t row = 3;                         // elements
  bool expect = false;                     // members pass `receives`
  bool shared = false;                     // one output for all of all_gather
  std::vector<bool> present;               // by member
  std::vector<std::vector<int64_t>> rows;  // [from][to]; of a missing member: what is expected

  bool HasInput(int m) const { return kind != Kind::kScatter || m == root; }
  bool HasOutput(int m) const { return kind != Kind::kGather || m == root; }
  std::string ToString() const {
    std::string text =
        absl::StrCat(CollectiveKindName(kind), " ", ReductionName(reduction), " ", DTypeName(dtype),
                     " size ", size, " root ", root, " row ", row, " expect ", expect, " rows");
    for (int m = 0; m < size; ++m) {
      absl::StrAppend(&text, present[m] ? " [" : " missing [");
      for (const int64_t n : rows[m]) absl::StrAppend(&text, n, " ");
      absl::StrAppend(&text, "]");
    }
    return text;
  }
};

Case RandomCase(Kind kind, int size, bool may_miss, std::mt19937_64* random) {
  Case c;
  c.kind = kind;
  c.size = size;
  c.root = static_cast<int>((*random)() % size);
  c.row = static_cast<int64_t>((*random)() % 40);
  c.expect = (*random)() % 2 == 0;
  for (int m = 0; m < size; ++m) c.present.push_back(!may_miss || (*random)() % 3 != 0);
  if (std::find(c.present.begin(), c.present.end(), true) == c.present.end()) c.present[0] = true;
  c.rows.assign(size, std::vector<int64_t>(size));
  for (int from = 0; from < size; ++from) {
    for (int to = 0; to < size; ++to) {
      int64_t rows = static_cast<int64_t>((*random)() % 6);
      if ((kind == Kind::kAllGather || kind == Kind::kGather) && to > 0) rows = c.rows[from][0];
      if (kind == Kind::kReduceScatter && from > 0) rows = c.rows[0][to];
      if (kind == Kind::kScatter && from != c.root) rows = 0;
      // Nothing is known of a missing member if it is not expected.
      const bool unknown = !c.present[from] && !c.expect && kind != Kind::kReduceScatter;
      c.rows[from][to] = unknown ? 0 : rows;
    }
  }
  return c;
}

// What member m must get, and what it passes.
class Model {
 public:
  Model(const Case& c, std::mt19937_64* random) : c_(c), row_bytes_(c.row * DTypeBytes(c.dtype)) {
    for (int m = 0; m < c.size; ++m) {
      input_rows_.push_back(c.HasInput(m) ? Sum(Sends(m)) + Random(random, 3) : 0);
      output_rows_.push_back(c.HasOutput(m) ? Sum(Receives(m)) + Random(random, 3) : 0);
      inputs_.push_back(RandomElements(c.dtype, input_rows_[m] * c.row, true, random));
      factors_.push_back(static_cast<float>(0.7 * (m + 1)));
    }
    if (c.shared) output_rows_.assign(c.size, output_rows_[0]);
  }

  std::vector<int64_t> Sends(int m) const {
    if (!c_.HasInput(m)) return {};
    if (c_.kind == Kind::kAllGather || c_.kind == Kind::kGather) return {c_.rows[m][0]};
    return c_.rows[m];
  }
  std::vector<int64_t> Receives(int m) const {
    if (!c_.HasOutput(m)) return {};
    if (c_.kind == Kind::kReduceScatter) return {c_.rows[m][m]};
    if (c_.kind == Kind::kScatter) return {c_.rows[c_.root][m]};
    std::vector<int64_t> rows;
    for (int from = 0; from < c_.size; ++from) rows.push_back(c_.rows[from][m]);
    return rows;
  }
  int64_t input_rows(int m) const { return input_rows_[m]; }
  int64_t output_rows(int m) const { return output_rows_[m]; }
  const Bytes& input(int m) const { return inputs_[m]; }
  double factor(int m) const { return factors_[m]; }

  // What `from` has for `to`.
  Bytes Piece(int from, int to) const {
    int64_t first = 0;
    const std::vector<int64_t> sends = Sends(from);
    if (sends.size() > 1) first = std::accumulate(sends.begin(), sends.begin() + to, int64_t{0});
    const int64_t rows = sends.size() > 1 ? sends[to] : sends[0];
    if (!c_.present[from]) return Bytes(rows * row_bytes_, 0);
    return Bytes(inputs_[from].begin() + first * row_bytes_,
                 inputs_[from].begin() + (first + rows) * row_bytes_);
  }
  Bytes Output(int m) const {
    Bytes output;
    if (c_.kind == Kind::kReduceScatter) {
      output = Reduced(m);
    } else if (c_.kind == Kind::kScatter) {
      output = Piece(c_.root, m);
    } else {
      for (int from = 0; from < c_.size; ++from) {
        const Bytes piece = Piece(from, m);
        output.insert(output.end(), piece.begin(), piece.end());
      }
    }
    output.resize(output_rows_[m] * row_bytes_, 0);
    return output;
  }
  Bytes FactorOf(int m, int from) const {
    Bytes factor = Piece(from, m);
    factor.resize(output_rows_[m] * row_bytes_, 0);
    return factor;
  }
  std::vector<float> Holders(int m) const {
    std::vector<float> holders;
    const int64_t element = DTypeBytes(c_.dtype);
    for (int to = 0; to < c_.size; ++to) {
      const Bytes result = Reduced(to);
      const std::vector<Bytes> pieces = Pieces(to);
      for (size_t i = 0; i < result.size(); i += element) {
        holders.push_back(NaiveHolders(c_.dtype, At(pieces, i), result.data() + i, m));
      }
    }
    holders.resize(input_rows_[m] * c_.row, 0);
    return holders;
  }

 private:
  static int64_t Sum(const std::vector<int64_t>& numbers) {
    return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
  }
  static int64_t Random(std::mt19937_64* random, int below) {
    return static_cast<int64_t>((*random)() % below);
  }
  // By member.
  std::vector<Bytes> Pieces(int to) const {
    std::vector<Bytes> pieces(c_.size);
    for (int m = 0; m < c_.size; ++m) {
      if (c_.present[m]) pieces[m] = Piece(m, to);
    }
    return pieces;
  }
  std::vector<const uint8_t*> At(const std::vector<Bytes>& pieces, size_t i) const {
    std::vector<const uint8_t*> operands;
    for (int m = 0; m < c_.size; ++m) {
      operands.push_back(c_.present[m] ? pieces[m].data() + i : nullptr);
    }
    return operands;
  }
  Bytes Reduced(int to) const {
    const std::vector<Bytes> pieces = Pieces(to);
    const bool scaled = c_.reduction == Reduction::kAvg || c_.reduction == Reduction::kPremulSum;
    const auto present = std::count(c_.present.begin(), c_.present.end(), true);
    const auto first = std::find(c_.present.begin(), c_.present.end(), true);
    const Bytes& one = pieces[first - c_.present.begin()];
    if (present == 1 && !scaled) return one;
    Bytes result(one.size());
    for (size_t i = 0; i < result.size(); i += DTypeBytes(c_.dtype)) {
      NaiveReduce(c_.reduction, c_.dtype, At(pieces, i), factors_, c_.size, result.data() + i);
    }
    return result;
  }

  const Case c_;
  const int64_t row_bytes_;
  std::vector<int64_t> input_rows_;
  std::vector<int64_t> output_rows_;
  std::vector<Bytes> inputs_;
  std::vector<double> factors_;
};

constexpr int64_t kBehind = 32;
constexpr uint8_t kFill = 0x5d;

Bytes Bordered(Bytes bytes) {
  bytes.resize(bytes.size() + kBehind, kFill);
  return bytes;
}

DeviceAddress Untouched(DeviceRig* rig, int device, int64_t bytes) {
  return rig->Upload(device, Bytes(bytes + kBehind, kFill));
}

std::vector<CollectiveCall> MakeCalls(const Case& c, const Model& model, DeviceRig* rig) {
  std::vector<CollectiveCall> calls(c.size);
  const int64_t row_bytes = c.row * DTypeBytes(c.dtype);
  DeviceAddress shared = 0;
  for (int m = 0; m < c.size; ++m) {
    if (!c.present[m]) continue;
    CollectiveCall& call = calls[m];
    call.kind = c.kind;
    call.reduction = c.reduction;
    call.dtype = c.dtype;
    call.root = c.root;
    for (int k = 0; k < c.size; ++k) {
      if (c.present[k]) call.present.push_back(k);
    }
    CollectiveCall::RuntimeCounts runtime;
    runtime.row_elements = c.row;
    runtime.input_rows = model.input_rows(m);
    runtime.output_rows = model.output_rows(m);
    if (c.HasInput(m)) {
      call.inputs.push_back(rig->Upload(m, model.input(m)));
      runtime.sends = rig->Upload(m, model.Sends(m));
    }
    if (c.HasOutput(m)) {
      const int64_t bytes = model.output_rows(m) * row_bytes;
      if (!c.shared || shared == 0) shared = Untouched(rig, m, bytes);
      call.outputs.push_back(shared);
      if (c.expect) {
        // What comes in the memory of what goes, where that begins so, as a plan may have it.
        const std::vector<int64_t> receives = model.Receives(m);
        const std::vector<int64_t> sends = model.Sends(m);
        const bool begins = receives.size() <= sends.size() &&
                            std::equal(receives.begin(), receives.end(), sends.begin());
        runtime.receives = begins ? runtime.sends : rig->Upload(m, receives);
      }
      runtime.received = Untouched(rig, m, 8 * static_cast<int64_t>(model.Receives(m).size()));
      if (c.reduction == Reduction::kProduct) {
        for (int k = 0; k < c.size; ++k) call.factors.push_back(Untouched(rig, m, bytes));
      }
    }
    if (c.reduction == Reduction::kMax) {
      call.holders = {Untouched(rig, m, model.input_rows(m) * c.row * 4)};
    }
    if (c.reduction == Reduction::kPremulSum) {
      call.factor = c.dtype == DType::kF64
                        ? rig->Upload(m, std::vector<double>{model.factor(m)})
                        : rig->Upload(m, std::vector<float>{static_cast<float>(model.factor(m))});
    }
    call.runtime = runtime;
  }
  return calls;
}

void RunCase(const Case& c, const std::vector<std::unique_ptr<Communicator>>& members,
             DeviceRig* rig, std::mt19937_64* random) {
  SCOPED_TRACE(c.ToString());
  const Model model(c, random);
  const std::vector<CollectiveCall> calls = MakeCalls(c, model, rig);
  for (int m = c.size - 1; m >= 0; --m) {
    if (!c.present[m]) continue;
    const absl::Status enqueued = members[m]->Enqueue(calls[m], rig->stream(m));
    ASSERT_TRUE(enqueued.ok()) << enqueued;
  }
  for (int m = 0; m < c.size; ++m) {
    if (!c.present[m]) continue;
    const absl::Status status = rig->Synchronize(m);
    ASSERT_TRUE(status.ok()) << "member " << m << ": " << status;
  }
  const auto check = [&](int m, DeviceAddress address, const Bytes& expected, const char* what) {
    const auto got = rig->Download<uint8_t>(m, address, static_cast<int64_t>(expected.size()));
    const auto differ = std::mismatch(got.begin(), got.end(), expected.begin());
    ASSERT_TRUE(got == expected) << "member " << m << "'s " << what << " of " << expected.size()
                                 << " bytes, first wrong at " << differ.first - got.begin();
  };
  for (int m = 0; m < c.size; ++m) {
    if (!c.present[m]) continue;
    const CollectiveCall& call = calls[m];
    if (c.HasOutput(m)) {
      check(m, call.outputs[0], Bordered(model.Output(m)), "output");
      const std::vector<int64_t> receives = model.Receives(m);
      EXPECT_EQ(
          rig->Download<int64_t>(m, call.runtime->received, static_cast<int64_t>(receives.size())),
          receives)
          << "member " << m;
    }
    for (size_t k = 0; k < call.factors.size(); ++k) {
      check(m, call.factors[k], Bordered(model.FactorOf(m, static_cast<int>(k))), "factor");
    }
    if (!call.holders.empty()) {
      const std::vector<float> expected = model.Holders(m);
      EXPECT_EQ(rig->Download<float>(m, call.holders[0], static_cast<int64_t>(expected.size())),
                expected)
          << "member " << m;
    }
    if (testing::Test::HasFailure()) return;
  }
  rig->FreeAll();
}

TEST_P(BackendConformance, PiecesMayBeKnownOnlyAtRunTime) {
  std::mt19937_64 random(TestSeed());
  constexpr std::pair<Reduction, DType> kReductions[] = {{Reduction::kSum, DType::kF32},
                                                         {Reduction::kMax, DType::kF16},
                                                         {Reduction::kProduct, DType::kF64},
                                                         {Reduction::kPremulSum, DType::kBF16},
                                                         {Reduction::kMax, DType::kF64}};
  constexpr DType kMoved[] = {DType::kF32, DType::kBool, DType::kI64};
  for (const int size : {1, 2, 3, 4, 5, 7, 9}) {
    DeviceRig rig(GetParam().open(size, &MakeTestKernel));
    auto members = rig.OpenAll(1);
    for (const Kind kind : kKinds) {
      for (int round = 0; round < 8; ++round) {
        const bool reduces = kind == Kind::kReduceScatter;
        const auto& type = kReductions[random() % std::size(kReductions)];
        const bool neutral = type.first == Reduction::kSum || type.first == Reduction::kPremulSum;
        Case c = RandomCase(kind, size, round % 2 == 1 && (neutral || !reduces), &random);
        c.dtype = reduces ? type.second : kMoved[random() % std::size(kMoved)];
        c.reduction = reduces ? type.first : Reduction::kNone;
        c.shared = kind == Kind::kAllGather && InOneDomain(*rig.backend());
        if (round == 0) c.row = 3001;  // for the pool
        RunCase(c, members, &rig, &random);
        if (HasFailure()) return;
      }
    }
  }
}

// Two members; what is changed makes the counts wrong, and the text must say how.
struct WrongCounts {
  const char* name;
  Kind kind;
  std::function<void(std::vector<int64_t>* sends, std::vector<int64_t>* receives,
                     CollectiveCall::RuntimeCounts*)>
      change;  // of member 1
  const char* text;
  Reason reason;
};

TEST_P(BackendConformance, RuntimeCountsThatAreWrongEndTheCallOnAllMembers) {
  using Counts = std::vector<int64_t>;
  using Runtime = CollectiveCall::RuntimeCounts;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  // Everybody sends 2 rows to everybody, of 4 rows that it has and may get.
  const std::vector<WrongCounts> cases = {
      {"negative", Kind::kAllToAll, [](Counts* s, Counts*, Runtime*) { (*s)[0] = -1; },
       "member 1 sends -1 rows to member 0, expected 0 to 4", Reason::kBadType},
      {"wraps", Kind::kAllToAll,
       [](Counts* s, Counts*, Runtime*) { (*s)[0] = kMost, (*s)[1] = kMost; },
       "member 1 sends 9223372036854775807 rows to member 0", Reason::kBadType},
      {"sum", Kind::kAllToAll, [](Counts* s, Counts*, Runtime*) { (*s)[1] = 3; },
       "member 1 sends 5 rows in all, expected at most the 4 of its input", Reason::kBadType},
      {"more than fits", Kind::kAllToAll, [](Counts*, Counts*, Runtime* r) { r->output_rows = 3; },
       "member 1 gets 4 rows, expected at most the 3 of its output", Reason::kBadType},
      {"unexpected", Kind::kAllToAll, [](Counts*, Counts* r, Runtime*) { (*r)[0] = 1; },
       "member 1 expected 1 rows from member 0, got 2", Reason::kMismatch},
      {"negative expectation", Kind::kAllToAll, [](Counts*, Counts* r, Runtime*) { (*r)[1] = -5; },
       "member 1 expects -5 rows from member 1", Reason::kBadType},
      {"too many", Kind::kAllGather, [](Counts* s, Counts*, Runtime*) { (*s)[0] = 5; },
       "member 1 sends 5 rows, expected 0 to 4", Reason::kBadType},
      {"unexpected", Kind::kAllGather, [](Counts* s, Counts*, Runtime*) { (*s)[0] = 1; },
       "member 0 expected 2 rows from member 1, got 1", Reason::kMismatch},
      {"unexpected", Kind::kGather, [](Counts* s, Counts*, Runtime*) { (*s)[0] = 1; },
       "member 0 expected 2 rows from member 1, got 1", Reason::kMismatch},
      {"disagree", Kind::kReduceScatter, [](Counts* s, Counts*, Runtime*) { (*s)[0] = 1; },
       "member 1 has 1 rows for member 0, expected 2 as member 0 has", Reason::kMismatch},
      {"too few members", Kind::kReduceScatter,
       [](Counts*, Counts*, Runtime* r) { r->output_rows = 1, r->receives = 0; },
       "member 1 gets 2 rows, expected at most the 1 of its output", Reason::kBadType},
      {"unexpected", Kind::kScatter, [](Counts*, Counts* r, Runtime*) { (*r)[0] = 0; },
       "member 1 expected 0 rows from member 0, got 2", Reason::kMismatch},
  };
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  uint64_t id = 10;
  for (const WrongCounts& wrong : cases) {
    SCOPED_TRACE(absl::StrCat(CollectiveKindName(wrong.kind), ": ", wrong.name));
    auto members = rig.OpenAll(++id);
    std::vector<CollectiveCall> calls(2);
    for (int m = 0; m < 2; ++m) {
      CollectiveCall& call = calls[m];
      call.kind = wrong.kind;
      call.reduction = Reduction::kSum;
      call.dtype = DType::kF32;
      call.root = 0;
      const bool root = m == 0;
      const bool one_send = wrong.kind == Kind::kAllGather || wrong.kind == Kind::kGather;
      const bool one_receive = wrong.kind == Kind::kReduceScatter || wrong.kind == Kind::kScatter;
      Counts sends(one_send ? 1 : 2, 2);
      Counts receives(one_receive ? 1 : 2, 2);
      Runtime runtime;
      runtime.row_elements = 1;
      runtime.input_rows = runtime.output_rows = 4;
      runtime.receives = 1;  // if it stays
      if (m == 1) wrong.change(&sends, &receives, &runtime);
      if (wrong.kind != Kind::kScatter || root) {
        call.inputs = {rig.Upload(m, std::vector<float>(4, 1))};
        runtime.sends = rig.Upload(m, sends);
      }
      const bool has_output = wrong.kind != Kind::kGather || root;
      if (has_output) call.outputs = {Untouched(&rig, m, 16)};
      if (has_output && runtime.receives != 0) runtime.receives = rig.Upload(m, receives);
      if (!has_output) runtime.receives = 0;
      if (has_output) runtime.received = Untouched(&rig, m, 16);
      call.runtime = runtime;
      const absl::Status enqueued = members[m]->Enqueue(call, rig.stream(m));
      ASSERT_TRUE(enqueued.ok()) << enqueued;
    }
    for (int m = 0; m < 2; ++m) {
      const absl::Status status = rig.Synchronize(m);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
      EXPECT_EQ(ErrorOf(status).reason, wrong.reason) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), wrong.text)) << status;
      for (const DeviceAddress output : calls[m].outputs) {
        EXPECT_EQ(rig.Download<uint8_t>(m, output, 16 + kBehind), Bytes(16 + kBehind, kFill));
      }
    }
  }
}

TEST_P(BackendConformance, CallsWithBadRuntimeCountsAreRefused) {
  DeviceRig rig(GetParam().open(2, &MakeTestKernel));
  auto members = rig.OpenAll(1);
  const DeviceAddress memory = rig.Upload(0, std::vector<int64_t>(8, 1));
  CollectiveCall good;
  good.kind = Kind::kAllToAll;
  good.dtype = DType::kF32;
  good.inputs = {memory};
  good.outputs = {memory + 32};
  good.runtime.emplace();
  good.runtime->sends = memory;
  good.runtime->row_elements = 2;
  good.runtime->input_rows = good.runtime->output_rows = 2;
  const auto changed = [&](const std::function<void(CollectiveCall*)>& change) {
    CollectiveCall call = good;
    change(&call);
    return members[0]->Enqueue(call, rig.stream(0)).code();
  };
  using Call = CollectiveCall;
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  EXPECT_EQ(changed([](Call* c) { c->kind = Kind::kBroadcast, c->root = 0; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->kind = Kind::kAllReduce, c->reduction = Reduction::kSum; }),
            kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->inputs.resize(2); }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->inputs = {0}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->outputs.resize(2); }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->input_counts = {4}; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->runtime->sends = 0; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->runtime->row_elements = -1; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->runtime->row_elements = int64_t{1} << 62; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->runtime->input_rows = -1; }), kInvalid);
  EXPECT_EQ(changed([](Call* c) { c->runtime->output_rows = int64_t{1} << 39; }), kInvalid);
  // A member that states sizes beforehand does not meet one that does not.
  CollectiveCall listed = good;
  listed.runtime.reset();
  const DeviceAddress others = rig.Upload(1, std::vector<int64_t>(8, 1));
  listed.inputs = {others, others};
  listed.outputs = {others + 32, others + 40};
  listed.count = 2;
  ASSERT_TRUE(members[0]->Enqueue(good, rig.stream(0)).ok());
  ASSERT_TRUE(members[1]->Enqueue(listed, rig.stream(1)).ok());
  for (int m = 0; m < 2; ++m) {
    EXPECT_EQ(rig.Synchronize(m).code(), absl::StatusCode::kInternal);
  }
}

}  // namespace
}  // namespace chorus
