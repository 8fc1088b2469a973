#include "tests/random/draft.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace chorus {
namespace random_programs {
namespace {

constexpr double kLargest = 50;

}  // namespace

Dims Draft::SomeShape() {
  Dims shape;
  const int rank = random_->AnyOf({0, 1, 1, 1, 2, 2, 3});
  for (int d = 0; d < rank; ++d) {
    shape.push_back(random_->Chance(0.03) ? 0 : random_->AnyOf({1, 2, 2, 3, 3, 4}));
  }
  while (Elements(shape) > (settings_->orders >= 2 ? 9 : 20))
    *std::max_element(shape.begin(), shape.end()) = 1;
  if (rank > 0 && settings_->orders <= 1 && random_->Chance(0.01))
    shape = {random_->Between(1000, 2100)};
  return shape;
}

std::vector<double> Draft::SomeData(DType dtype, int64_t n) {
  std::vector<double> data;
  const int profile = settings_->coarse ? random_->Between(0, 2) : random_->Between(0, 5);
  for (int64_t i = 0; i < n; ++i) {
    double x = 0;
    if (dtype == DType::kBool) {
      x = random_->Between(0, 1);
    } else if (!IsFloating(dtype)) {
      x = random_->Chance(0.05) ? random_->Between(-40, 100) : random_->Between(-3, 4);
      if (dtype == DType::kU8) x = std::fabs(x);
    } else if (profile == 0) {
      x = random_->Between(-3, 3);
    } else if (profile == 1) {
      x = random_->Between(-8, 8) / 4.0;
    } else if (profile == 2) {
      x = random_->Between(1, 6);
    } else if (profile == 3) {
      x = random_->AnyOf({0.0, 0.0, 1.0, 20.0, -15.0});  // far apart
    } else {
      x = (random_->Unit() - 0.4) * 3;
    }
    data.push_back(RoundTo(dtype, x));
  }
  return data;
}

int Draft::Leaf(int rank, DType dtype, const Dims& shape, bool may_have_gradient,
                std::vector<double> data) {
  Statement s;
  s.op = Op::kLeaf;
  s.data = data.empty() ? SomeData(dtype, Elements(shape)) : std::move(data);
  s.requires_grad =
      IsFloating(dtype) && may_have_gradient &&
      (!settings_->without.empty() && static_cast<size_t>(rank) < settings_->without.size() &&
               settings_->without[static_cast<size_t>(rank)]
           ? settings_->orders >= 2 && random_->Chance(0.2)
           : random_->Chance(0.85));
  s.captured = !s.requires_grad && random_->Chance(0.15);
  Call call;
  call.rank = rank;
  call.out = {program_->AddValue(rank, dtype, shape)};
  s.calls = {call};
  const int v = call.out[0];
  Try(std::move(s));
  return v;
}

int Draft::Indices(int rank, const Dims& shape, int64_t below) {
  std::vector<double> data;
  for (int64_t i = 0; i < Elements(shape); ++i) {
    data.push_back(static_cast<double>(random_->Below(static_cast<uint64_t>(below))));
  }
  const DType dtype = below > 100
                          ? DType::kI64
                          : random_->AnyOf({DType::kI64, DType::kI64, DType::kI32, DType::kU8});
  if (data.empty()) return Leaf(rank, dtype, shape, false);
  return Leaf(rank, dtype, shape, false, data);
}

int Draft::CountsOf(int rank, const std::vector<int64_t>& counts) {
  std::vector<double> data(counts.begin(), counts.end());
  return Leaf(rank, DType::kI64, {static_cast<int64_t>(counts.size())}, false, data);
}

int Draft::Existing(int rank, const std::function<bool(const Value&)>& fits) {
  std::vector<int> found;
  for (int v = 0; v < static_cast<int>(program_->values.size()); ++v) {
    const Value& value = program_->value(v);
    if (value.rank == rank && !value.absent && fits(value)) found.push_back(v);
  }
  if (found.empty()) return -1;
  if (random_->Chance(0.5))
    return found[found.size() - 1 - random_->Below(std::min<size_t>(3, found.size()))];
  return random_->Any(found);
}

int Draft::SomeFloat(int rank) {
  const int v = Existing(rank, [](const Value& x) { return IsFloating(x.dtype); });
  return v >= 0 ? v : Leaf(rank, settings_->dtype, SomeShape(), true);
}

int Draft::SomeNumbers(int rank) {
  if (random_->Chance(0.85)) return SomeFloat(rank);
  const int v = Existing(rank, [](const Value& x) { return x.dtype != DType::kBool; });
  return v >= 0 ? v : Leaf(rank, SomeDType(), SomeShape(), true);
}

DType Draft::SomeDType() {
  return random_->AnyOf({settings_->dtype, settings_->dtype, DType::kF32, DType::kF64, DType::kF16,
                         DType::kBF16, DType::kI64, DType::kI32, DType::kI16, DType::kI8,
                         DType::kU8});
}

int Draft::Operand(int rank, DType dtype, const Dims& shape) {
  if (random_->Chance(0.75)) {
    const int v =
        Existing(rank, [&](const Value& x) { return x.dtype == dtype && x.shape == shape; });
    if (v >= 0) return v;
  }
  if (random_->Chance(0.25)) {
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
  if (random_->Chance(0.15) && Elements(shape) > 0) {
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
  if (IsFloating(dtype) && random_->Chance(0.04)) {
    // Of nothing, and with a history all the same.
    Dims empty = shape;
    empty.push_back(0);
    const int v = Leaf(rank, dtype, empty, true);
    const Op op = random_->Chance(0.5) ? Op::kProduct : Op::kSum;
    Statement s = Of(op, rank, {v}, dtype, shape);
    s.ints = {static_cast<int64_t>(shape.size())};
    const int out = s.calls[0].out[0];
    if (Try(std::move(s))) return out;
  }
  return Leaf(rank, dtype, shape, true);
}

Statement Draft::Of(Op op, int rank, std::vector<int> in, DType dtype, const Dims& shape,
                    int out_rank) {
  Statement s;
  s.op = op;
  Call call;
  call.rank = rank;
  call.in = std::move(in);
  call.out = {program_->AddValue(out_rank < 0 ? rank : out_rank, dtype, shape)};
  call.no_grad = settings_->no_grads && random_->Chance(0.06);
  s.calls = {call};
  return s;
}

bool Draft::IsWanted(Op op) const {
  return settings_->unwanted.empty() ||
         std::string(OpName(op)).find(settings_->unwanted) == std::string::npos;
}

bool Draft::Try(Statement s) {
  if (!IsWanted(s.op)) {
    for (const Call& call : s.calls) {
      for (const int out : call.out) Orphan(static_cast<size_t>(out));
    }
    return false;
  }
  const int first = static_cast<int>(program_->statements.size());
  program_->statements.push_back(std::move(s));
  return Settle(first, kLargest, true);
}

bool Draft::Settle(int first, double largest, bool good) {
  const auto mark = evaluator_.Now();
  for (int i = first; good && i < static_cast<int>(program_->statements.size()); ++i) {
    // Leaves always go: callers name them without looking.
    const bool leaf = program_->statements[static_cast<size_t>(i)].op == Op::kLeaf;
    good = evaluator_.Add(*program_, i).ok() && (leaf || evaluator_.size() < 400000);
    if (!good) break;
    for (const Call& call : program_->statements[static_cast<size_t>(i)].calls) {
      for (const int out : call.out) good = good && Moderate(out, largest);
    }
  }
  if (!good) {
    evaluator_.Undo(mark);
    int least = static_cast<int>(program_->values.size());
    for (size_t i = static_cast<size_t>(first); i < program_->statements.size(); ++i) {
      for (const Call& call : program_->statements[i].calls) {
        for (const int out : call.out) least = std::min(least, out);
      }
    }
    program_->statements.resize(static_cast<size_t>(first));
    // Unless something else was added behind them.
    bool used = false;
    for (const Statement& s : program_->statements) {
      for (const Call& call : s.calls) {
        for (const int out : call.out) used = used || out >= least;
      }
    }
    if (!used) {
      program_->values.resize(static_cast<size_t>(least));
    } else {
      for (size_t v = static_cast<size_t>(least); v < program_->values.size(); ++v) Orphan(v);
    }
  }
  return good;
}

void Draft::Orphan(size_t v) {
  for (const Statement& s : program_->statements) {
    for (const Call& call : s.calls) {
      if (std::count(call.out.begin(), call.out.end(), static_cast<int>(v)) > 0) return;
    }
  }
  program_->values[v].absent = true;
  program_->values[v].rank = -1;
}

bool Draft::Moderate(int v, double largest) {
  const Value& value = program_->value(v);
  const Numbers numbers = evaluator_.Of(v);
  for (size_t i = 0; i < numbers.values.size(); ++i) {
    const double x = numbers.values[i];
    if (!IsFloating(value.dtype)) {
      if (std::fabs(x) > 9e15) return false;
      continue;
    }
    if (!(std::fabs(x) <= largest)) return false;
    if (!(numbers.errors[i] <= 0.05 * std::max(1.0, std::fabs(x))) && random_->Chance(0.8))
      return false;
  }
  return true;
}

}  // namespace random_programs
}  // namespace chorus
