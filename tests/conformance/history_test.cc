// Random chains of all_reduce and local ops, other losses on each rank, to third order, against an
// evaluator that knows nothing of tapes: every number is a polynomial of all ranks' inputs, and a
// gradient is the derivative of the sum of all ranks' losses, whatever the way it takes.
// --programs=N and --first_seed=S choose the programs.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/optional.h"
#include "chorus/chorus.h"
#include "core/base/error.h"
#include "gtest/gtest.h"
#include "tests/conformance/conformance.h"
#include "tests/conformance/direct_cluster.h"
#include "tests/conformance/job.h"

namespace chorus {
namespace conformance {
namespace {

uint64_t first_seed = 1;
int programs = 200;

// --- Polynomials --------------------------------------------------------------------------------

// Sums of c * x_0^e_0 * x_1^e_1 ...: each rank has two variables.
class Polynomial {
 public:
  using Powers = std::vector<int>;

  static Polynomial Constant(double value) {
    Polynomial p;
    if (value != 0) p.terms_[{}] = value;
    return p;
  }
  static Polynomial Variable(int v) {
    Powers powers(static_cast<size_t>(v) + 1, 0);
    powers.back() = 1;
    Polynomial p;
    p.terms_[powers] = 1;
    return p;
  }
  Polynomial operator+(const Polynomial& other) const {
    Polynomial sum = *this;
    for (const auto& term : other.terms_) sum.terms_[term.first] += term.second;
    return sum;
  }
  Polynomial operator*(const Polynomial& other) const {
    Polynomial product;
    for (const auto& a : terms_) {
      for (const auto& b : other.terms_) {
        Powers powers = a.first.size() > b.first.size() ? a.first : b.first;
        const Powers& shorter = a.first.size() > b.first.size() ? b.first : a.first;
        for (size_t i = 0; i < shorter.size(); ++i) powers[i] += shorter[i];
        product.terms_[powers] += a.second * b.second;
      }
    }
    return product;
  }
  Polynomial Derivative(int v) const {
    const size_t at = static_cast<size_t>(v);
    Polynomial derivative;
    for (const auto& term : terms_) {
      if (term.first.size() <= at || term.first[at] == 0) continue;
      Powers powers = term.first;
      --powers[at];
      while (!powers.empty() && powers.back() == 0) powers.pop_back();
      derivative.terms_[powers] += term.second * term.first[at];
    }
    return derivative;
  }
  // The sum, and how much its terms are together: what rounding is measured by.
  std::pair<double, double> At(const std::vector<double>& x) const {
    std::pair<double, double> sums(0, 0);
    for (const auto& term : terms_) {
      double value = term.second;
      for (size_t i = 0; i < term.first.size(); ++i) value *= std::pow(x[i], term.first[i]);
      sums.first += value;
      sums.second += std::abs(value);
    }
    return sums;
  }
  size_t size() const { return terms_.size(); }

 private:
  std::map<Powers, double> terms_;
};

// --- Programs -----------------------------------------------------------------------------------

// A value of one rank: an input or the result of a step before.
struct Step {
  enum class Kind { kAdd, kMul, kScale, kAllReduce } kind = Kind::kAdd;
  std::vector<int> a;  // by rank: operands, indices in the rank's list of values
  std::vector<int> b;
  std::vector<double> factor;
};

// A loss: a sum of factor * value, or factor * value^2.
struct Term {
  int value = 0;
  double factor = 1;
  bool square = false;
};
using Loss = std::vector<Term>;

struct Program {
  int ranks = 2;
  std::vector<double> inputs;  // two of each rank
  std::vector<bool> wanted;    // of the first of each rank; the second's gradient always is
  std::vector<Step> steps;
  std::vector<Loss> first;  // by rank, of its values
  // Of the gradient that the order before gave for the second input (value 0), and of what the rank
  // computed (1 + its index).
  std::vector<Loss> second;
  std::vector<Loss> third;
  bool dropped = false;   // handles of what is not needed any more go before gradients are read
  bool complete = false;  // every rank's losses have every result of all_reduce, and gradient
  bool compiled = false;
};

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  Program Make() {
    Program p;
    p.ranks = 2 + Pick(2);
    p.dropped = Pick(2) == 0;
    p.complete = Pick(3) != 0;
    p.compiled = p.complete && Pick(3) == 0;
    // A rank that leaves results out while it holds them is late, which takes its time.
    if (!p.complete) p.dropped = true;
    for (int i = 0; i < 2 * p.ranks; ++i) p.inputs.push_back(Factor());
    for (int r = 0; r < p.ranks; ++r) p.wanted.push_back(Pick(4) != 0);
    std::vector<int> reduced;
    int values = 2;
    const int reductions = 1 + Pick(3);
    while (static_cast<int>(reduced.size()) < reductions) {
      Step step;
      const int kind = Pick(5);
      step.kind = kind == 0   ? Step::Kind::kAdd
                  : kind == 1 ? Step::Kind::kMul
                  : kind == 2 ? Step::Kind::kScale
                              : Step::Kind::kAllReduce;
      // At most a few squares: degrees double.
      if (step.kind == Step::Kind::kMul && ++products_ > 2) step.kind = Step::Kind::kAdd;
      for (int r = 0; r < p.ranks; ++r) {
        // What came last, most often: chains.
        step.a.push_back(Pick(2) == 0 ? values - 1 : Pick(values));
        step.b.push_back(Pick(values));
        step.factor.push_back(Factor());
      }
      if (step.kind == Step::Kind::kAllReduce) reduced.push_back(values);
      p.steps.push_back(step);
      ++values;
    }
    const auto losses = [&](int order) {
      std::vector<Loss> losses;
      for (int r = 0; r < p.ranks; ++r) {
        Loss loss;
        const int shift = order == 1 ? 0 : 1;
        if (order > 1 && (p.complete || Pick(2) == 0)) loss.push_back(TermOf(0));
        for (const int value : reduced) {
          // The gradient has them for history. A rank that left one out and asks for it later would
          // meet the others' earlier loss there: gradients of one result meet by their number.
          if (order == 1 ? p.complete || Pick(2) == 0 : p.complete && Pick(3) == 0) {
            loss.push_back(TermOf(value + shift));
          }
        }
        if (loss.empty()) loss.push_back(TermOf(1 + shift));
        losses.push_back(loss);
      }
      return losses;
    };
    p.first = losses(1);
    p.second = losses(2);
    p.third = losses(3);
    return p;
  }

 private:
  int Pick(int n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }
  double Factor() { return (Pick(2) == 0 ? -1 : 1) * (1 + Pick(3)); }
  Term TermOf(int value) { return {value, Factor(), Pick(3) == 0}; }

  std::mt19937_64 random_;
  int products_ = 0;
};

std::string Text(const Program& p) {
  std::string text = absl::StrCat(p.ranks, " ranks", p.dropped ? ", dropped" : ", held",
                                  p.complete ? ", complete" : "", p.compiled ? ", compiled" : "",
                                  "\n  x: ", absl::StrJoin(p.inputs, " "));
  const auto list = [](const std::vector<int>& indices) { return absl::StrJoin(indices, "/"); };
  for (size_t i = 0; i < p.steps.size(); ++i) {
    const Step& s = p.steps[i];
    absl::StrAppend(&text, "\n  v", i + 2, " = ");
    switch (s.kind) {
      case Step::Kind::kAdd:
        absl::StrAppend(&text, "v", list(s.a), " + v", list(s.b));
        break;
      case Step::Kind::kMul:
        absl::StrAppend(&text, "v", list(s.a), " * v", list(s.b));
        break;
      case Step::Kind::kScale:
        absl::StrAppend(&text, "v", list(s.a), " * ", absl::StrJoin(s.factor, "/"));
        break;
      case Step::Kind::kAllReduce:
        absl::StrAppend(&text, "AllReduce(v", list(s.a), ")");
        break;
    }
  }
  for (const auto* losses : {&p.first, &p.second, &p.third}) {
    absl::StrAppend(&text, "\n  loss");
    for (const Loss& loss : *losses) {
      absl::StrAppend(&text, " |");
      for (const Term& t : loss) {
        absl::StrAppend(&text, " ", t.factor, " v", t.value, t.square ? "^2" : "");
      }
    }
  }
  return text;
}

// --- What is right ------------------------------------------------------------------------------

struct Right {
  // By order, rank and input (the first's is empty where it is not wanted).
  std::vector<std::vector<std::vector<std::pair<double, double>>>> gradients;
  bool too_long = false;  // more terms than are worth the time
};

Right Evaluate(const Program& p) {
  constexpr size_t kMostTerms = 3000;
  Right right;
  std::vector<std::vector<Polynomial>> values(static_cast<size_t>(p.ranks));
  for (int r = 0; r < p.ranks; ++r) {
    values[static_cast<size_t>(r)] = {Polynomial::Variable(2 * r), Polynomial::Variable(2 * r + 1)};
  }
  for (const Step& step : p.steps) {
    Polynomial sum;
    for (size_t r = 0; r < values.size(); ++r) {
      const Polynomial& a = values[r][static_cast<size_t>(step.a[r])];
      const Polynomial& b = values[r][static_cast<size_t>(step.b[r])];
      switch (step.kind) {
        case Step::Kind::kAdd:
          values[r].push_back(a + b);
          break;
        case Step::Kind::kMul:
          values[r].push_back(a * b);
          break;
        case Step::Kind::kScale:
          values[r].push_back(a * Polynomial::Constant(step.factor[r]));
          break;
        case Step::Kind::kAllReduce:
          sum = sum + a;
          break;
      }
      if (values[r].back().size() > kMostTerms) right.too_long = true;
    }
    if (right.too_long) return right;
    if (step.kind != Step::Kind::kAllReduce) continue;
    for (auto& own : values) own.push_back(sum);
  }
  std::vector<Polynomial> before(values.size());
  for (const auto* losses : {&p.first, &p.second, &p.third}) {
    Polynomial total;
    for (size_t r = 0; r < values.size(); ++r) {
      std::vector<Polynomial> own = values[r];
      if (losses != &p.first) own.insert(own.begin(), before[r]);
      for (const Term& term : (*losses)[r]) {
        const Polynomial& v = own[static_cast<size_t>(term.value)];
        total = total + (term.square ? v * v : v) * Polynomial::Constant(term.factor);
      }
      if (total.size() > kMostTerms) {
        right.too_long = true;
        return right;
      }
    }
    right.gradients.emplace_back();
    for (int r = 0; r < p.ranks; ++r) {
      right.gradients.back().emplace_back();
      for (int i = 0; i < 2; ++i) {
        const Polynomial gradient = total.Derivative(2 * r + i);
        right.gradients.back().back().push_back(gradient.At(p.inputs));
        if (i == 1) before[static_cast<size_t>(r)] = gradient;
      }
    }
  }
  return right;
}

// --- What the system says -----------------------------------------------------------------------

// An all_reduce's line is its index among the steps, from 1.
constexpr char kFile[] = "chain.cc";
CallSite Site(int64_t step) { return CallSite{kFile, static_cast<int>(step) + 1}; }

Tensor LossOf(const Loss& loss, const std::vector<Tensor>& values) {
  Tensor sum;
  for (const Term& term : loss) {
    const Tensor& v = values[static_cast<size_t>(term.value)];
    const Tensor part = (term.square ? v * v : v) * term.factor;
    sum = sum.defined() ? sum + part : part;
  }
  return Sum(sum);
}

// The gradients of all orders, of the inputs that want one.
absl::StatusOr<std::vector<Tensor>> Differentiate(const Program& p, int rank, const World& world,
                                                  const std::vector<Tensor>& inputs,
                                                  std::vector<Tensor>* held) {
  const size_t r = static_cast<size_t>(rank);
  std::vector<Tensor> values = inputs;
  for (const Step& step : p.steps) {
    const Tensor& a = values[static_cast<size_t>(step.a[r])];
    const Tensor& b = values[static_cast<size_t>(step.b[r])];
    switch (step.kind) {
      case Step::Kind::kAdd:
        values.push_back(a + b);
        break;
      case Step::Kind::kMul:
        values.push_back(a * b);
        break;
      case Step::Kind::kScale:
        values.push_back(a * step.factor[r]);
        break;
      case Step::Kind::kAllReduce:
        values.push_back(AllReduce(a, world, Reduction::kSum, Site(&step - p.steps.data())));
        break;
    }
  }
  std::vector<Tensor> wanted = inputs;
  if (!p.wanted[r]) wanted.erase(wanted.begin());
  BackwardOptions create;
  create.create_graph = true;
  std::vector<Tensor> results;
  std::vector<Tensor> loss = {LossOf(p.first[r], values)};
  for (int order = 1; order <= 3; ++order) {
    if (p.dropped) {
      // Only what later losses use is left.
      for (size_t v = 0; v < values.size(); ++v) {
        bool used = false;
        for (const auto* losses : {&p.second, &p.third}) {
          for (const Term& term : (*losses)[r]) {
            used = used || term.value == static_cast<int>(v) + 1;
          }
        }
        if (!used) values[v] = Tensor();
      }
    }
    std::vector<Tensor> gradients;
    // A rank without any history is in nobody's way.
    if (loss[0].requires_grad()) {
      CHORUS_ASSIGN_OR_RETURN(gradients, Grad(loss, wanted, create));
    } else {
      for (size_t i = 0; i < wanted.size(); ++i) {
        gradients.push_back(Zeros(world, DType::kF64, {1}));
      }
    }
    for (const Tensor& g : gradients) results.push_back(g);
    if (order == 3) break;
    std::vector<Tensor> own = values;
    own.insert(own.begin(), gradients.back());
    loss[0] = LossOf(order == 1 ? p.second[r] : p.third[r], own);
  }
  if (!p.dropped) held->insert(held->end(), values.begin(), values.end());
  for (Tensor& result : results) {
    if (!p.dropped) held->push_back(result);
    result = result.Detach();
  }
  return results;
}

// --- Who is named -------------------------------------------------------------------------------

// A rank and a step.
using Part = std::pair<int, int>;

// What each order's loss of a rank leads to: which steps' all_reduces; and which inputs an operand
// is computed from.
class Ways {
 public:
  explicit Ways(const Program& p) {
    std::vector<std::vector<std::set<std::pair<int, int>>>> from(static_cast<size_t>(p.ranks));
    for (int r = 0; r < p.ranks; ++r) from[static_cast<size_t>(r)] = {{{r, 0}}, {{r, 1}}};
    for (size_t s = 0; s < p.steps.size(); ++s) {
      const Step& step = p.steps[s];
      std::set<std::pair<int, int>> sum;
      for (int r = 0; r < p.ranks; ++r) {
        const auto own = static_cast<size_t>(r);
        std::set<std::pair<int, int>> of = from[own][static_cast<size_t>(step.a[own])];
        if (step.kind == Step::Kind::kAdd || step.kind == Step::Kind::kMul) {
          const auto& b = from[own][static_cast<size_t>(step.b[own])];
          of.insert(b.begin(), b.end());
        }
        if (step.kind == Step::Kind::kAllReduce) everything_[{r, static_cast<int>(s)}] = of;
        sum.insert(of.begin(), of.end());
        from[own].push_back(of);
      }
      if (step.kind != Step::Kind::kAllReduce) continue;
      for (auto& own : from) own.back() = sum;
    }
    for (int r = 0; r < p.ranks; ++r) {
      std::vector<std::set<int>> steps(2);
      std::vector<std::set<int>> inputs = {{0}, {1}};
      for (size_t s = 0; s < p.steps.size(); ++s) {
        const Step& step = p.steps[s];
        const auto a = static_cast<size_t>(step.a[static_cast<size_t>(r)]);
        const auto b = static_cast<size_t>(step.b[static_cast<size_t>(r)]);
        const bool two = step.kind == Step::Kind::kAdd || step.kind == Step::Kind::kMul;
        std::set<int> leads = steps[a];
        std::set<int> from = inputs[a];
        if (two) leads.insert(steps[b].begin(), steps[b].end());
        if (two) from.insert(inputs[b].begin(), inputs[b].end());
        if (step.kind == Step::Kind::kAllReduce) {
          operands_[{r, static_cast<int>(s)}] = from;
          leads.insert(static_cast<int>(s));
          from.clear();
        }
        steps.push_back(leads);
        inputs.push_back(from);
      }
      std::set<int> before;
      for (const auto* losses : {&p.first, &p.second, &p.third}) {
        std::set<int> leads;
        for (const Term& term : (*losses)[static_cast<size_t>(r)]) {
          const bool gradient = losses != &p.first && term.value == 0;
          const int shift = losses == &p.first ? 0 : 1;
          const std::set<int>& of =
              gradient ? before : steps[static_cast<size_t>(term.value - shift)];
          leads.insert(of.begin(), of.end());
        }
        leads_[r].push_back(leads);
        before = leads;
      }
    }
  }
  // The first order from which on the rank's losses leave that all_reduce out; 0: none does.
  int LeftOut(const Part& part) const {
    if (operands_.count(part) == 0) return 0;
    const std::vector<std::set<int>>& leads = leads_.at(part.first);
    for (size_t order = 0; order < leads.size(); ++order) {
      if (leads[order].count(part.second) == 0) return static_cast<int>(order) + 1;
    }
    return 0;
  }
  // Whether a loss of that rank, of that order or a lower one, leads to the all_reduce.
  bool IsAsked(int step, int rank, int order) const {
    const std::vector<std::set<int>>& leads = leads_.at(rank);
    return std::any_of(leads.begin(), leads.begin() + order,
                       [step](const std::set<int>& of) { return of.count(step) > 0; });
  }
  std::vector<Part> PartsOf(int rank) const {
    std::vector<Part> parts;
    for (const auto& part : operands_) {
      if (part.first.first == rank) parts.push_back(part.first);
    }
    return parts;
  }
  bool AnyLeftOut() const {
    return std::any_of(operands_.begin(), operands_.end(),
                       [this](const auto& part) { return LeftOut(part.first) > 0; });
  }
  // Whether the part's operand is computed from this input, by local ops of its rank.
  bool ComesFrom(const Part& part, int rank, int input) const {
    return part.first == rank && operands_.at(part).count(input) > 0;
  }
  // Or on any way.
  bool ComesFromAnyWay(const Part& part, int rank, int input) const {
    return everything_.at(part).count({rank, input}) > 0;
  }

 private:
  std::map<Part, std::set<int>> operands_;
  std::map<Part, std::set<std::pair<int, int>>> everything_;  // ranks and inputs
  std::map<int, std::vector<std::set<int>>> leads_;           // by rank; by order
};

// The part in a text that begins with its rank: "rank 1 (...) ... at chain.cc:3".
absl::optional<Part> PartOf(const std::string& text, int rank) {
  const std::string begin = absl::StrCat(kFile, ":");
  const size_t at = text.find(begin);
  if (rank < 0 || at == std::string::npos) return absl::nullopt;
  return Part(rank, std::atoi(text.c_str() + at + begin.size()) - 1);
}

// --- One program --------------------------------------------------------------------------------

struct Wrong {
  int rank = 0;
  int order = 0;
  int input = 0;
  std::string text;
};

struct Outcome {
  int right = 0;
  int refused = 0;
  int explained = 0;  // numbers without a part that was counted as given up
  std::string wrong;
  std::string text;
  std::vector<Wrong> numbers;                // that are not the whole gradient
  std::set<Part> lost;                       // that errors name
  std::set<std::pair<int, int>> refused_at;  // rank and order
  bool only_passed = false;                  // no error names a part
  int unnamed = 0;  // errors that name no part: of others that were refused
};

void Refused(const absl::Status& status, const std::string& where, Outcome* outcome) {
  ++outcome->refused;
  absl::StrAppend(&outcome->text, "\n  ", where, ": ",
                  std::string(status.message()).substr(0, 300));
  const Error error = ErrorOf(status);
  const absl::optional<Part> part = error.reason == Reason::kGradientLost
                                        ? PartOf(error.source, error.culprit.rank)
                                        : absl::nullopt;
  if (part.has_value()) {
    outcome->lost.insert(*part);
  } else {
    ++outcome->unnamed;
  }
}

// Each error names a part as lost, which its rank has left out indeed, or comes of one; and each
// number that is not the whole gradient lacks a part that is counted as given up (the rank's own in
// front of that input, or one of a lower order through whose gradients it comes) or lost (with the
// input behind it), or its rank left out what only refused ones asked for.
void Explain(const Program& p, const ClusterCounts& counts, Outcome* all) {
  const Ways ways(p);
  const auto red = [all](const std::string& what) { absl::StrAppend(&all->wrong, "\n  ", what); };
  const auto name = [](const Part& part) {
    return absl::StrCat("rank ", part.first, "'s part of step ", part.second);
  };
  std::set<Part> given_up;
  for (const std::string& text : counts.given_up) {
    int rank = -1;
    if (std::sscanf(text.c_str(), "rank %d gave up", &rank) != 1) rank = -1;
    const absl::optional<Part> part = PartOf(text, rank);
    if (!part.has_value()) {
      red(absl::StrCat("names no part: ", text));
      continue;
    }
    given_up.insert(*part);
  }
  if ((counts.gradients_given_up > 0) != !given_up.empty()) red("counted, and not named");
  for (const auto* parts : {&given_up, &all->lost}) {
    for (const Part& part : *parts) {
      absl::StrAppend(&all->text, "\n  ", parts == &given_up ? "given up: " : "lost: ", name(part));
      if (ways.LeftOut(part) == 0)
        red(absl::StrCat(name(part), " is named, and was left out by nobody"));
    }
  }
  // A rank that was refused alone has passed what the others wait for: where all are, each may have
  // heard of another one only.
  if (all->unnamed > 0 && all->lost.empty()) {
    all->only_passed = true;
    if (!ways.AnyLeftOut()) red("refused, and nobody has left anything out");
  }
  std::set<std::pair<int, int>> smaller;  // rank and order
  for (const Wrong& number : all->numbers) {
    bool explained = false;
    const auto left_out = [&](const Part& part) {
      const int order = ways.LeftOut(part);
      return order > 0 && order <= number.order;
    };
    for (const Part& part : given_up) {
      bool before = false;
      for (int o = 1; o < number.order; ++o) before = before || smaller.count({part.first, o}) > 0;
      const bool own = part.first == number.rank &&
                       (number.order > 1 || ways.ComesFrom(part, number.rank, number.input));
      explained = explained || (left_out(part) && (own || before));
    }
    for (const Part& part : all->lost) {
      explained = explained ||
                  (left_out(part) &&
                   (number.order > 1 || ways.ComesFromAnyWay(part, number.rank, number.input)));
    }
    // What was asked for by none but those that were refused was never counted. (An epoch that
    // ends by another request takes theirs with it, whatever they would have been told.)
    for (int r = 0; r < p.ranks; ++r) {
      for (const Part& part : ways.PartsOf(r)) {
        if (!left_out(part)) continue;
        if (number.order == 1 && !ways.ComesFromAnyWay(part, number.rank, number.input)) continue;
        for (const auto& refused : all->refused_at) {
          explained = explained || (refused.second <= number.order &&
                                    ways.IsAsked(part.second, refused.first, refused.second));
        }
      }
    }
    if (!explained) red(number.text);
    all->explained += explained ? 1 : 0;
    absl::StrAppend(&all->text, "\n  ", number.text);
    smaller.insert({number.rank, number.order});
  }
}

Outcome RunProgram(const Program& p, const Right& right) {
  const ConformanceParam param{"Host", DirectCluster("host")};
  JobOptions options;
  options.ranks = p.ranks;
  options.agree_timeout = std::chrono::seconds(20);
  Job job(param, options);
  std::vector<Outcome> outcomes(static_cast<size_t>(p.ranks));
  std::vector<std::vector<Tensor>> held(static_cast<size_t>(p.ranks));
  job.Run([&](int rank, World& world) {
    const size_t r = static_cast<size_t>(rank);
    Outcome& outcome = outcomes[r];
    std::vector<Tensor> inputs;
    for (int i = 0; i < 2; ++i) {
      inputs.push_back(Upload<double>(world, {p.inputs[2 * r + static_cast<size_t>(i)]}));
      if (i == 1 || p.wanted[r]) inputs.back().RequireGrad();
    }
    absl::StatusOr<std::vector<Tensor>> got;
    absl::Status traced;
    if (p.compiled) {
      const Compiled function = Compile([&](const std::vector<Tensor>& in) {
        std::vector<Tensor> none;
        absl::StatusOr<std::vector<Tensor>> results = Differentiate(p, rank, world, in, &none);
        traced = results.status();
        return results.ok() ? *results : std::vector<Tensor>{Tensor()};
      });
      got = function.Run(inputs);
    } else {
      got = Differentiate(p, rank, world, inputs, &held[r]);
    }
    if (!got.ok() || !traced.ok()) {
      Refused(traced.ok() ? got.status() : traced, absl::StrCat("rank ", rank), &outcome);
      for (int order = 1; order <= 3; ++order) outcome.refused_at.insert({rank, order});
      got = std::vector<Tensor>();
    }
    const size_t each = got->size() / 3;
    for (size_t i = 0; i < got->size(); ++i) {
      const size_t input = each == 2 ? i % 2 : 1;
      const std::pair<double, double> expected = right.gradients[i / each][r][input];
      const absl::StatusOr<std::vector<double>> value = (*got)[i].Read<double>();
      const std::string where = absl::StrCat("rank ", rank, ", order ", i / each + 1);
      if (!value.ok()) {
        Refused(value.status(), where, &outcome);
        outcome.refused_at.insert({rank, static_cast<int>(i / each) + 1});
      } else if (std::abs((*value)[0] - expected.first) <= 1e-9 * (1 + expected.second)) {
        ++outcome.right;
      } else {
        outcome.numbers.push_back({rank, static_cast<int>(i / each) + 1, static_cast<int>(input),
                                   absl::StrCat(where, ", input ", input, ": ", (*value)[0],
                                                ", right is ", expected.first)});
      }
    }
    // A refusal of what this rank has not read is heard at its next call. A rank that has heard of
    // one, or was refused alone, makes it too: others may wait for it.
    const NoGrad no_grad;
    const absl::Status last = AllReduce(Upload<double>(world, {1}), world).Wait();
    if (last.ok() || outcome.refused > 0) return;
    Refused(last, absl::StrCat("rank ", rank, ", afterwards"), &outcome);
  });
  Outcome all;
  for (const Outcome& outcome : outcomes) {
    all.right += outcome.right;
    all.refused += outcome.refused;
    all.text += outcome.text;
    all.numbers.insert(all.numbers.end(), outcome.numbers.begin(), outcome.numbers.end());
    all.refused_at.insert(outcome.refused_at.begin(), outcome.refused_at.end());
    all.lost.insert(outcome.lost.begin(), outcome.lost.end());
    all.unnamed += outcome.unnamed;
  }
  std::sort(all.numbers.begin(), all.numbers.end(),
            [](const Wrong& a, const Wrong& b) { return a.order < b.order; });
  Explain(p, job.cluster().Counts(), &all);
  return all;
}

TEST(HistoryTest, RandomChainsHaveTheGradientsOfTheSumOfAllLosses) {
  int right = 0;
  int complete = 0;
  int refused_programs = 0;
  int64_t results = 0;
  int64_t smaller = 0;
  int only_passed = 0;
  int made = 0;
  for (uint64_t seed = first_seed; made < programs; ++seed) {
    const Program p = Generator(seed).Make();
    const Right expected = Evaluate(p);
    if (expected.too_long) continue;
    ++made;
    const Outcome outcome = RunProgram(p, expected);
    ASSERT_EQ(outcome.wrong, "") << "seed " << seed << ": " << Text(p) << outcome.text;
    if (p.complete) {
      ++complete;
      ASSERT_EQ(outcome.refused + outcome.explained, 0)
          << "seed " << seed << ": " << Text(p) << outcome.text;
    }
    const bool whole = outcome.refused + outcome.explained == 0;
    right += whole ? 1 : 0;
    refused_programs += outcome.refused > 0 ? 1 : 0;
    smaller += outcome.explained;
    only_passed += outcome.only_passed ? 1 : 0;
    results += outcome.right;
  }
  std::cout << made << " programs from seed " << first_seed << ": " << right << " right, of them "
            << complete << " with every result in every loss; " << refused_programs
            << " with parts that are named as lost (in " << only_passed
            << " by those who passed others alone); " << results << " right results, " << smaller
            << " without a part that is named as given up\n";
  EXPECT_GT(complete, 0);
  EXPECT_GT(right, complete);
  EXPECT_GT(refused_programs, 0);
  EXPECT_GT(smaller, 0);
  EXPECT_EQ(only_passed, 0);
}

}  // namespace
}  // namespace conformance
}  // namespace chorus

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--programs=", 11) == 0) {
      chorus::conformance::programs = std::atoi(argv[i] + 11);
    }
    if (std::strncmp(argv[i], "--first_seed=", 13) == 0) {
      chorus::conformance::first_seed = std::strtoull(argv[i] + 13, nullptr, 10);
    }
  }
  return RUN_ALL_TESTS();
}
