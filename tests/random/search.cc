#include "tests/random/search.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/optional.h"
#include "core/tensor/half.h"
#include "tests/random/evaluate.h"

namespace chorus {
namespace random_programs {
namespace {

template <typename T>
double ElementAs(const std::string& bytes, size_t i) {
  T x;
  std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
  if constexpr (std::is_same_v<T, F16> || std::is_same_v<T, BF16>) {
    return static_cast<double>(static_cast<float>(x));
  } else {
    return static_cast<double>(x);
  }
}

double Element(DType dtype, const std::string& bytes, size_t i) {
  switch (dtype) {
    case DType::kF64:
      return ElementAs<double>(bytes, i);
    case DType::kF32:
      return ElementAs<float>(bytes, i);
    case DType::kF16:
      return ElementAs<F16>(bytes, i);
    case DType::kBF16:
      return ElementAs<BF16>(bytes, i);
    case DType::kI64:
      return ElementAs<int64_t>(bytes, i);
    case DType::kI32:
      return ElementAs<int32_t>(bytes, i);
    case DType::kI16:
      return ElementAs<int16_t>(bytes, i);
    case DType::kI8:
      return ElementAs<int8_t>(bytes, i);
    default:
      return ElementAs<uint8_t>(bytes, i);
  }
}

std::string Listed(DType dtype, const std::string& bytes) {
  std::string text = "[";
  const size_t n = bytes.size() / static_cast<size_t>(DTypeBytes(dtype));
  for (size_t i = 0; i < n && i < 12; ++i) {
    absl::StrAppend(&text, i > 0 ? ", " : "", Element(dtype, bytes, i));
  }
  return absl::StrCat(text, n > 12 ? ", ...]" : "]");
}
std::string Listed(const std::vector<double>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size() && i < 12; ++i) {
    absl::StrAppend(&text, i > 0 ? ", " : "", values[i]);
  }
  return absl::StrCat(text, values.size() > 12 ? ", ...]" : "]");
}

// The first element that differs in bits; its digits tell it from the other one.
std::string FirstDifference(DType dtype, const std::string& a, const std::string& b) {
  const auto size = static_cast<size_t>(DTypeBytes(dtype));
  size_t i = 0;
  while ((i + 1) * size < std::min(a.size(), b.size()) &&
         a.compare(i * size, size, b, i * size, size) == 0) {
    ++i;
  }
  return absl::StrFormat(" (element %d: %.17g, %.17g)", i, Element(dtype, a, i),
                         Element(dtype, b, i));
}

// Of what came first; and that is not only told of another rank.
bool SaysMore(const std::string& a, const std::string& b) {
  const auto weight = [](const std::string& text) {
    const size_t epoch = text.find(" epoch ");
    return (absl::StrContains(text, "ABORTED") ? 100 : 0) +
           (absl::StrContains(text, "in run 2") ? 50 : 0) +
           (epoch != std::string::npos && text.substr(epoch, 9) != " epoch 1 " ? 10 : 0);
  };
  return weight(a) != weight(b) ? weight(a) < weight(b) : a.size() > b.size();
}

// The error that says most, and what other ranks say; "": none.
std::string ErrorOf(const Program& program, const Outcomes& outcomes) {
  std::string error;
  for (const auto& [v, outcome] : outcomes) {
    if (outcome.status.ok()) continue;
    const std::string text =
        absl::StrCat("v", v, ": ", absl::StatusCodeToString(outcome.status.code()), ": ",
                     outcome.status.message());
    if (error.empty() || SaysMore(text, error)) error = text;
  }
  if (error.empty()) return error;
  std::map<int, std::string> others;
  for (const auto& [v, outcome] : outcomes) {
    const int rank = v < 0 ? v : program.value(v).rank;
    const std::string text = absl::StrCat(absl::StatusCodeToString(outcome.status.code()), ": ",
                                          outcome.status.message());
    if (outcome.status.ok() || absl::StrContains(error, text)) continue;
    others.emplace(rank, absl::StrCat("\n//   v", v, ": ", text));
  }
  for (const auto& [rank, text] : others) error += text;
  return error;
}

// The first value that was to be read and was not, or the other way round, or has another number of
// elements than the evaluator says; "": none.
std::string WrongOutcomes(const Program& program, const Outcomes& outcomes,
                          const std::vector<Numbers>& numbers) {
  for (int v = 0; v < static_cast<int>(program.values.size()); ++v) {
    const Value& value = program.value(v);
    const auto outcome = outcomes.find(v);
    const bool read = outcome != outcomes.end();
    if (read != (value.observed && !value.absent)) {
      return absl::StrCat("v", v, read ? " was read unasked" : " was not read");
    }
    if (!read) continue;
    const size_t size = numbers[static_cast<size_t>(v)].values.size() *
                        static_cast<size_t>(DTypeBytes(value.dtype));
    if (outcome->second.bytes.size() != size) {
      return absl::StrCat("v", v, " has ", outcome->second.bytes.size(), " bytes, right are ",
                          size);
    }
  }
  return "";
}

// The first value that is not what the evaluator says; "": none.
std::string WrongValue(const Program& program, const Outcomes& outcomes,
                       const std::vector<Numbers>& numbers, Counts* counts) {
  for (const auto& [v, outcome] : outcomes) {
    const DType dtype = program.value(v).dtype;
    const Numbers& right = numbers[static_cast<size_t>(v)];
    for (size_t i = 0; i < right.values.size(); ++i) {
      if (!(right.errors[i] < 1e300)) {
        ++counts->unknown;
        continue;
      }
      ++counts->numbers;
      const double got = Element(dtype, outcome.bytes, i);
      const double tolerance = IsFloating(dtype) ? kSlack * right.errors[i] : 0;
      if (std::fabs(got - right.values[i]) <= tolerance) continue;
      return absl::StrCat("v", v, " is ", Listed(dtype, outcome.bytes), ", right is ",
                          Listed(right.values),
                          absl::StrFormat(" (element %d: %.17g for %.17g, tolerance %g)", i, got,
                                          right.values[i], tolerance));
    }
  }
  return "";
}

// What comes of one way: of the first of its kind, with which the others of it are compared.
struct First {
  std::string way;
  Outcomes outcomes;
};

// Ways of one kind have equal bits: those on a GPU apart from the others, and those in which a rank
// has its own order, and so adds its gradients up in another one.
std::pair<bool, bool> KindOf(const Way& way) {
  return {way.host_bits, way.mode.shuffled && !way.mode.waits};
}

// The first value that has other bits than in another way, of those in `which`; "": none.
std::string OtherBits(const Program& program, const Outcomes& outcomes, const First& first,
                      const std::vector<bool>& which, const std::vector<Numbers>& numbers) {
  for (const auto& [v, outcome] : outcomes) {
    if (!which[static_cast<size_t>(v)]) continue;
    const std::string& other = first.outcomes.at(v).bytes;
    if (outcome.bytes == other) continue;
    const DType dtype = program.value(v).dtype;
    return absl::StrCat("v", v, " is ", Listed(dtype, outcome.bytes), ", in ", first.way, " ",
                        Listed(dtype, other), FirstDifference(dtype, outcome.bytes, other),
                        ", right is ", Listed(numbers[static_cast<size_t>(v)].values));
  }
  return "";
}

// The first result of a collective which all members get and not with the same bits; "": none.
std::string UnequalMembers(const Program& program, const Outcomes& outcomes) {
  for (const Statement& s : program.statements) {
    if (s.op != Op::kAllReduce && s.op != Op::kBroadcast && s.op != Op::kAllGather &&
        s.op != Op::kAllGatherIntoTensor) {
      continue;
    }
    std::map<size_t, int> firsts;  // by index among the results
    for (const Call& call : s.calls) {
      for (size_t i = 0; i < call.out.size(); ++i) {
        const auto mine = outcomes.find(call.out[i]);
        if (mine == outcomes.end()) continue;
        const int first = firsts.emplace(i, call.out[i]).first->second;
        const std::string& expected = outcomes.at(first).bytes;
        if (mine->second.bytes == expected) continue;
        const DType dtype = program.value(first).dtype;
        return absl::StrCat("v", call.out[i], " is ", Listed(dtype, mine->second.bytes),
                            ", on another member v", first, " ", Listed(dtype, expected),
                            FirstDifference(dtype, mine->second.bytes, expected));
      }
    }
  }
  return "";
}

// Whether results of a GPU have bits of their own. docs/gpu.md has the list.
bool RoundsItsOwnWay(Op op) {
  switch (op) {
    case Op::kSin:
    case Op::kCos:
    case Op::kExp:
    case Op::kLog:
    case Op::kLog1p:
    case Op::kExpm1:
    case Op::kSqrt:
    case Op::kRsqrt:
    case Op::kSigmoid:
    case Op::kTanh:
    case Op::kErf:
    case Op::kPow:
    case Op::kSum:
    case Op::kMean:
    case Op::kProduct:
    case Op::kMatMul:
    case Op::kSoftmax:
    case Op::kLogSoftmax:
    case Op::kCrossEntropy:
    case Op::kConv2d:
    case Op::kConvTranspose2d:
    case Op::kAvgPool2d:
    case Op::kAdaptiveAvgPool2d:
    case Op::kLinear:
    case Op::kLayerNorm:
    case Op::kGroupNorm:
    case Op::kBatchNorm:
    case Op::kDevicesLinear:
    case Op::kGradient:  // by way of sums, where its op's operand was stretched
      return true;
    default:
      return false;
  }
}

// The values, by number, that have the host's bits on a GPU as well: all that they come from does.
std::vector<bool> WithHostBits(const Program& program) {
  std::vector<bool> host_bits(program.values.size(), true);
  for (const Statement& s : program.statements) {
    bool all = true;
    for (const Call& call : s.calls) {
      for (const int in : call.in) all = all && (in < 0 || host_bits[static_cast<size_t>(in)]);
    }
    for (const Call& call : s.calls) {
      for (const int out : call.out) {
        const bool own = RoundsItsOwnWay(s.op) && IsFloating(program.value(out).dtype);
        host_bits[static_cast<size_t>(out)] = all && !own;
      }
    }
  }
  return host_bits;
}

int Orders(const Program& program) {
  int orders = 0;
  for (const Statement& s : program.statements) orders += s.op == Op::kGradient && !s.retain;
  return orders;
}

}  // namespace

std::string CountsText(const Counts& counts) {
  return absl::StrCat(counts.programs, " programs (", counts.gradients, " of first order, ",
                      counts.second, " of second, ", counts.third, " of third) in ", counts.runs,
                      " runs, ", counts.numbers, " numbers compared with the evaluator, ",
                      counts.unknown, " not known");
}

Finding Test(const Program& program, const std::vector<Way>& ways, Runner* runner, Counts* counts) {
  const auto numbers = Evaluate(program);
  Finding finding;
  if (!numbers.ok()) return finding;
  ++counts->programs;
  const int orders = Orders(program);
  counts->gradients += orders == 1;
  counts->second += orders == 2;
  counts->third += orders > 2;
  const std::vector<bool> all(program.values.size(), true);
  // The first of each kind has its values compared, the others their bits with those of the first.
  std::map<std::pair<bool, bool>, First> firsts;
  const auto found = [&](Finding::Kind kind, const Way& way, const std::string& text) {
    finding.kind = kind;
    finding.way = way.name;
    finding.text = text;
    return finding;
  };
  for (const Way& way : ways) {
    const Outcomes outcomes = runner->Run(program, way);
    ++counts->runs;
    const std::string error = ErrorOf(program, outcomes);
    if (!error.empty()) return found(Finding::kError, way, error);
    const std::string others = WrongOutcomes(program, outcomes, *numbers);
    if (!others.empty()) return found(Finding::kValue, way, others);
    First& first = firsts[KindOf(way)];
    if (!first.way.empty()) {
      const std::string other = OtherBits(program, outcomes, first, all, *numbers);
      if (!other.empty()) return found(Finding::kBits, way, other);
      continue;
    }
    first.way = way.name;
    first.outcomes = outcomes;
    const std::string wrong = WrongValue(program, outcomes, *numbers, counts);
    if (!wrong.empty()) return found(Finding::kValue, way, wrong);
    const std::string unequal = UnequalMembers(program, outcomes);
    if (!unequal.empty()) return found(Finding::kBits, way, unequal);
    if (way.host_bits) continue;
    const std::string other =
        OtherBits(program, outcomes, firsts[KindOf(ways.front())], WithHostBits(program), *numbers);
    if (!other.empty()) return found(Finding::kBits, way, other);
  }
  return finding;
}

std::vector<Way> WaysFor(const std::string& name) {
  const auto named = std::find_if(AllWays().begin(), AllWays().end(),
                                  [&](const Way& way) { return way.name == name; });
  std::vector<Way> ways;
  // The host's bits, for a way that shares some of them; the first of its kind; itself.
  if (!named->host_bits) ways.push_back(AllWays().front());
  const auto first = std::find_if(AllWays().begin(), named,
                                  [&](const Way& way) { return KindOf(way) == KindOf(*named); });
  if (first != named) ways.push_back(*first);
  ways.push_back(*named);
  return ways;
}

// --- Shrinking ----------------------------------------------------------------------------------

namespace {

class Shrinker {
 public:
  Shrinker(Program program, const Finding& finding, Runner* runner, int tries)
      : p_(std::move(program)), finding_(finding), runner_(runner), tries_(tries) {
    ways_ = WaysFor(finding.way);
  }

  Program Shrink() {
    bool changed = true;
    while (changed && tries_ > 0) {
      changed = false;
      changed = Observed() || changed;
      changed = Frame() || changed;
      changed = Statements() || changed;
      changed = Shortcuts() || changed;
      changed = Roots() || changed;
      changed = Members() || changed;
      changed = Ranks() || changed;
      changed = Data() || changed;
    }
    return p_;
  }

 private:
  bool Keeps(Program candidate) {
    Unused(&candidate);
    Compact(&candidate);
    if (tries_ <= 0 || candidate.values.empty()) return false;
    if (!Check(candidate).ok() || !Evaluate(candidate).ok()) return false;
    --tries_;
    Counts counts;
    const Finding found = Test(candidate, ways_, runner_, &counts);
    if (found.kind != finding_.kind || !Alike(found.text, finding_.text)) return false;
    // The way that fails may be the first one already.
    if (found.way != finding_.way) return false;
    p_ = std::move(candidate);
    return true;
  }
  // Errors of one cause begin alike, behind the value's name.
  bool Alike(const std::string& a, const std::string& b) const {
    if (finding_.kind != Finding::kError) return true;
    const auto begin = [](const std::string& text) {
      const size_t colon = text.find(": ");
      return text.substr(colon == std::string::npos ? 0 : colon + 2, 24);
    };
    return begin(a) == begin(b);
  }

  static void Unused(Program* program) {
    for (bool again = true; again;) {
      again = false;
      std::vector<bool> used(program->values.size(), false);
      for (const Statement& s : program->statements) {
        for (const Call& call : s.calls) {
          for (const int in : call.in) {
            if (in >= 0) used[static_cast<size_t>(in)] = true;
          }
        }
      }
      for (size_t i = 0; i < program->statements.size(); ++i) {
        const Statement& s = program->statements[i];
        if (s.op != Op::kLeaf && !IsLocal(s.op)) continue;
        const auto out = static_cast<size_t>(s.calls[0].out[0]);
        if (used[out] || program->values[out].observed) continue;
        program->statements.erase(program->statements.begin() + static_cast<std::ptrdiff_t>(i));
        again = true;
        break;
      }
    }
  }

  // The program whose statement `s` gives leaves instead, with the numbers that it gave.
  absl::optional<Program> AsLeaves(size_t s, bool with_gradient) const {
    const auto numbers = Evaluate(p_);
    if (!numbers.ok()) return absl::nullopt;
    Program candidate = p_;
    const Statement old = candidate.statements[s];
    std::vector<Statement> leaves;
    for (const Call& call : old.calls) {
      for (const int out : call.out) {
        const Value& value = p_.value(out);
        if (value.absent) {
          // Only a gradient can have it.
          for (Statement& gradient : candidate.statements) {
            if (gradient.op == Op::kGradient) DropRoot(out, &gradient);
          }
          continue;
        }
        candidate.values[static_cast<size_t>(out)].observed = false;
        Statement leaf;
        leaf.requires_grad = with_gradient && IsFloating(value.dtype);
        for (const double x : (*numbers)[static_cast<size_t>(out)].values) {
          const double coarse = std::round(x * 4) / 4;
          leaf.data.push_back(RoundTo(value.dtype, IsFloating(value.dtype) ? coarse : x));
        }
        Call made;
        made.rank = value.rank;
        made.out = {out};
        leaf.calls = {made};
        leaves.push_back(std::move(leaf));
      }
    }
    const auto at = candidate.statements.begin() + static_cast<std::ptrdiff_t>(s);
    const auto after = candidate.statements.erase(at);
    if (old.joined == false && after != candidate.statements.end()) {
      // It may have been the first of a block.
      after->joined = false;
    }
    candidate.statements.insert(candidate.statements.begin() + static_cast<std::ptrdiff_t>(s),
                                leaves.begin(), leaves.end());
    return candidate;
  }

  static void DropRoot(int v, Statement* gradient) {
    for (size_t c = 0; c < gradient->calls.size();) {
      Call& call = gradient->calls[c];
      for (size_t i = 0; i < (call.in.size() - static_cast<size_t>(call.wanted)) / 2;) {
        const size_t n = (call.in.size() - static_cast<size_t>(call.wanted)) / 2;
        if (call.in[i] != v) {
          ++i;
          continue;
        }
        call.in.erase(call.in.begin() + static_cast<std::ptrdiff_t>(n + i));
        call.in.erase(call.in.begin() + static_cast<std::ptrdiff_t>(i));
      }
      ++c;
    }
  }

  bool Statements() {
    bool changed = false;
    for (size_t s = p_.statements.size(); s-- > 0;) {
      if (s >= p_.statements.size()) continue;
      if (p_.statements[s].op == Op::kLeaf) continue;
      // Gone altogether, or leaves in its place.
      for (const bool with_gradient : {false, true}) {
        const auto candidate = AsLeaves(s, with_gradient);
        if (candidate.has_value() && Keeps(*candidate)) {
          changed = true;
          break;
        }
      }
    }
    return changed;
  }

  bool Observed() {
    bool changed = false;
    for (size_t v = 0; v < p_.values.size(); ++v) {
      if (!p_.values[v].observed) continue;
      Program candidate = p_;
      candidate.values[v].observed = false;
      const size_t before = p_.values.size();
      if (Keeps(std::move(candidate))) {
        changed = true;
        if (p_.values.size() != before) v = 0;
      }
    }
    return changed;
  }

  bool Frame() {
    bool changed = false;
    const auto attempt = [&](const std::function<bool(Program*)>& change) {
      Program candidate = p_;
      if (change(&candidate)) changed = Keeps(std::move(candidate)) || changed;
    };
    attempt([](Program* p) {
      const bool had = !p->donated.empty();
      p->donated.clear();
      return had;
    });
    for (size_t i = 0; i < p_.donated.size(); ++i) {
      attempt([i](Program* p) {
        if (i >= p->donated.size()) return false;
        p->donated.erase(p->donated.begin() + static_cast<std::ptrdiff_t>(i));
        return true;
      });
    }
    for (size_t t = 0; t < p_.shuffles.size(); ++t) {
      attempt([t](Program* p) { return std::exchange(p->shuffles[t], 0) != 0; });
    }
    for (size_t s = 0; s < p_.statements.size(); ++s) {
      const auto flag = [&](bool Statement::*member) {
        attempt([s, member](Program* p) {
          return s < p->statements.size() && std::exchange(p->statements[s].*member, false);
        });
      };
      flag(&Statement::joined);
      flag(&Statement::captured);
      flag(&Statement::requires_grad);
      flag(&Statement::retain);
      flag(&Statement::create);
      flag(&Statement::backward);
      attempt([s](Program* p) {
        bool had = false;
        if (s >= p->statements.size()) return false;
        for (Call& call : p->statements[s].calls) had = std::exchange(call.no_grad, false) || had;
        return had;
      });
      attempt([s](Program* p) {
        if (s >= p->statements.size() || p->statements[s].reduction == Reduction::kSum)
          return false;
        if (!IsCollective(p->statements[s].op)) return false;
        p->statements[s].reduction = Reduction::kSum;
        return true;
      });
      attempt([s](Program* p) {
        if (s >= p->statements.size() || p->statements[s].group <= 0) return false;
        if (!IsCollective(p->statements[s].op)) return false;
        const auto& ranks = p->groups[static_cast<size_t>(p->statements[s].group)].ranks;
        if (ranks != p->groups[0].ranks) return false;
        p->statements[s].group = 0;
        return true;
      });
    }
    // Groups that nobody uses.
    for (size_t g = p_.groups.size(); g-- > 1;) {
      attempt([g](Program* p) {
        for (Statement& s : p->statements) {
          if (s.group == static_cast<int>(g)) return false;
          if (s.group > static_cast<int>(g)) --s.group;
        }
        p->groups.erase(p->groups.begin() + static_cast<std::ptrdiff_t>(g));
        return true;
      });
    }
    // A trainer for each rank, where no devices are used.
    attempt([](Program* p) {
      for (const GroupOf& group : p->groups) {
        if (group.devices) return false;
      }
      if (p->trainers() == p->ranks()) return false;
      for (const Statement& s : p->statements) {
        if (s.op == Op::kGradient || s.op == Op::kCopyTo) return false;
      }
      for (int r = 0; r < p->ranks(); ++r) p->trainer_of[static_cast<size_t>(r)] = r;
      p->shuffles.assign(static_cast<size_t>(p->ranks()), 0);
      return true;
    });
    return changed;
  }

  // An op's operand of its result's type instead of the result.
  bool Shortcuts() {
    bool changed = false;
    for (size_t s = p_.statements.size(); s-- > 0;) {
      if (s >= p_.statements.size() || !IsLocal(p_.statements[s].op)) continue;
      const Call call = p_.statements[s].calls[0];
      const Value& out = p_.value(call.out[0]);
      for (const int in : call.in) {
        const Value& value = p_.value(in);
        if (value.rank != out.rank || value.dtype != out.dtype || value.shape != out.shape)
          continue;
        Program candidate = p_;
        candidate.statements.erase(candidate.statements.begin() + static_cast<std::ptrdiff_t>(s));
        for (Statement& statement : candidate.statements) {
          for (Call& other : statement.calls) {
            std::replace(other.in.begin(), other.in.end(), call.out[0], in);
          }
        }
        if (out.observed) candidate.values[static_cast<size_t>(in)].observed = true;
        if (Keeps(std::move(candidate))) {
          changed = true;
          break;
        }
      }
    }
    return changed;
  }

  // Of gradients: roots, seeds, what is asked for, whole calls.
  bool Roots() {
    bool changed = false;
    for (size_t s = 0; s < p_.statements.size(); ++s) {
      if (p_.statements[s].op != Op::kGradient) continue;
      for (size_t c = 0; s < p_.statements.size() && c < p_.statements[s].calls.size(); ++c) {
        for (size_t i = 0;; ++i) {
          if (s >= p_.statements.size() || p_.statements[s].op != Op::kGradient ||
              c >= p_.statements[s].calls.size()) {
            break;
          }
          const Call& call = p_.statements[s].calls[c];
          const size_t n = (call.in.size() - static_cast<size_t>(call.wanted)) / 2;
          if (i >= n) break;
          Program candidate = p_;
          DropRoot(call.in[i], &candidate.statements[s]);
          if (Keeps(std::move(candidate))) {
            changed = true;
            --i;
          }
        }
        for (size_t i = 0;; ++i) {
          if (s >= p_.statements.size() || p_.statements[s].op != Op::kGradient ||
              c >= p_.statements[s].calls.size()) {
            break;
          }
          const Call& call = p_.statements[s].calls[c];
          if (i >= static_cast<size_t>(call.wanted)) break;
          Program candidate = p_;
          Call& less = candidate.statements[s].calls[c];
          const size_t first = less.in.size() - static_cast<size_t>(less.wanted);
          const int out = less.out[i];
          less.in.erase(less.in.begin() + static_cast<std::ptrdiff_t>(first + i));
          less.out.erase(less.out.begin() + static_cast<std::ptrdiff_t>(i));
          --less.wanted;
          bool used = false;
          for (const Statement& other : candidate.statements) {
            for (const Call& reader : other.calls) {
              used = used || std::count(reader.in.begin(), reader.in.end(), out) > 0;
            }
          }
          if (!used && Keeps(std::move(candidate))) {
            changed = true;
            --i;
          }
        }
      }
    }
    return changed;
  }

  // Collectives of fewer ranks: where each gives one and gets one.
  bool Members() {
    bool changed = false;
    for (size_t s = 0; s < p_.statements.size(); ++s) {
      for (size_t c = 0; s < p_.statements.size() && c < p_.statements[s].calls.size(); ++c) {
        const Statement& statement = p_.statements[s];
        if (statement.op != Op::kAllReduce && statement.op != Op::kBroadcast &&
            statement.op != Op::kBarrier && statement.op != Op::kReduce) {
          break;
        }
        if (statement.calls.size() < 2 || statement.root == static_cast<int>(c)) continue;
        Program candidate = p_;
        Statement& less = candidate.statements[s];
        const Call gone = less.calls[c];
        less.calls.erase(less.calls.begin() + static_cast<std::ptrdiff_t>(c));
        if (less.root > static_cast<int>(c)) --less.root;
        GroupOf group;
        for (const Call& call : less.calls) group.ranks.push_back(call.rank);
        candidate.groups.push_back(group);
        less.group = static_cast<int>(candidate.groups.size()) - 1;
        for (const int out : gone.out) {
          // Its readers get the operand.
          if (p_.value(out).absent) {
            for (Statement& gradient : candidate.statements) {
              if (gradient.op == Op::kGradient) DropRoot(out, &gradient);
            }
            continue;
          }
          for (Statement& other : candidate.statements) {
            for (Call& reader : other.calls) {
              std::replace(reader.in.begin(), reader.in.end(), out, gone.in[0]);
            }
          }
        }
        if (Keeps(std::move(candidate))) changed = true;
      }
    }
    return changed;
  }

  // Ranks that do nothing any more.
  bool Ranks() {
    bool changed = false;
    for (int r = p_.ranks(); r-- > 0;) {
      if (p_.ranks() == 1) break;
      bool busy = false;
      for (const Statement& s : p_.statements) {
        for (const Call& call : s.calls) {
          busy = busy || (s.op != Op::kGradient && call.rank == r);
          for (const int out : call.out) busy = busy || p_.value(out).rank == r;
        }
        if (s.group >= 0) {
          const auto& ranks = p_.groups[static_cast<size_t>(s.group)].ranks;
          busy = busy || std::count(ranks.begin(), ranks.end(), r) > 0;
        }
      }
      const int trainer = p_.trainer_of[static_cast<size_t>(r)];
      const bool alone = p_.RanksOf(trainer).size() == 1;
      for (const Statement& s : p_.statements) {
        for (const Call& call : s.calls) {
          busy = busy || (alone && s.op == Op::kGradient && call.rank == trainer);
        }
      }
      if (busy) continue;
      Program candidate = p_;
      const auto renumber = [r](int* rank) {
        if (*rank > r) --*rank;
      };
      candidate.trainer_of.erase(candidate.trainer_of.begin() + r);
      for (GroupOf& group : candidate.groups) {
        group.ranks.erase(std::remove(group.ranks.begin(), group.ranks.end(), r),
                          group.ranks.end());
        for (int& rank : group.ranks) renumber(&rank);
      }
      for (Value& value : candidate.values) renumber(&value.rank);
      for (Statement& s : candidate.statements) {
        for (Call& call : s.calls) {
          if (s.op != Op::kGradient) renumber(&call.rank);
        }
      }
      if (alone) {
        for (int& t : candidate.trainer_of) {
          if (t > trainer) --t;
        }
        for (Statement& s : candidate.statements) {
          for (Call& call : s.calls) {
            if (s.op == Op::kGradient && call.rank > trainer) --call.rank;
          }
        }
        candidate.shuffles.erase(candidate.shuffles.begin() + trainer);
      }
      // A group without members that nobody uses can go.
      for (size_t g = candidate.groups.size(); g-- > 1;) {
        if (!candidate.groups[g].ranks.empty()) continue;
        candidate.groups.erase(candidate.groups.begin() + static_cast<std::ptrdiff_t>(g));
        for (Statement& s : candidate.statements) {
          if (s.group > static_cast<int>(g)) --s.group;
        }
      }
      changed = Keeps(std::move(candidate)) || changed;
    }
    return changed;
  }

  bool Data() {
    bool changed = false;
    for (size_t s = 0; s < p_.statements.size(); ++s) {
      const Statement& leaf = p_.statements[s];
      if (leaf.op != Op::kLeaf || !IsFloating(p_.value(leaf.calls[0].out[0]).dtype)) continue;
      std::vector<double> simple;
      for (size_t i = 0; i < leaf.data.size(); ++i) simple.push_back(static_cast<double>(i + 1));
      if (simple == leaf.data) continue;
      Program candidate = p_;
      candidate.statements[s].data = simple;
      changed = Keeps(std::move(candidate)) || changed;
    }
    return changed;
  }

  Program p_;
  const Finding finding_;
  Runner* const runner_;
  int tries_;
  std::vector<Way> ways_;
};

}  // namespace

Program Shrink(const Program& program, const Finding& finding, Runner* runner, int most_tries) {
  // Each try of one that waits takes that long.
  if (absl::StrContains(finding.text, "DEADLINE_EXCEEDED")) most_tries /= 16;
  return Shrinker(program, finding, runner, most_tries).Shrink();
}

}  // namespace random_programs
}  // namespace chorus
