#include "tests/vectors/check.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace chorus {
namespace vectors {
namespace {

// Whether two numbers are near enough; an infinite one is near itself alone.
bool Near(double got, double want, double tolerance) {
  if (got == want || (std::isnan(got) && std::isnan(want))) return true;
  return std::abs(got - want) <= tolerance;
}

class Checker {
 public:
  Checker(const Vector& v, const Tolerance& tolerance) : v_(v), tolerance_(tolerance) {}

  std::vector<std::string> TakeFailures() { return std::move(failures_); }

  void CheckOutputs(const std::vector<RankResults>& got) {
    for (int r = 0; r < v_.size(); ++r) {
      const std::vector<Array>& want = v_.outputs[static_cast<size_t>(r)];
      const std::vector<Array>& y = got[static_cast<size_t>(r)].y;
      if (y.size() != want.size()) {
        Fail(absl::StrCat("y rank ", r),
             absl::StrCat("got ", y.size(), " tensors, want ", want.size()));
        continue;
      }
      for (size_t k = 0; k < want.size(); ++k) {
        CheckArray("y", r, k, y[k], want[k], v_.exact_y, Limit(want[k].dtype, Of(&Scale::y)));
      }
    }
    if (EqualEverywhere()) {
      for (int r = 1; r < v_.size(); ++r) {
        CheckBits("y", " as on rank 0", r, got[static_cast<size_t>(r)].y, got[0].y);
      }
    }
  }

  void CheckAgain(const std::vector<RankResults>& got) {
    for (int r = 0; r < v_.size(); ++r) {
      const RankResults& mine = got[static_cast<size_t>(r)];
      CheckBits("y", " as before", r, mine.y_again, mine.y);
    }
  }

  void CheckGradients(const char* name, int rank, const absl::optional<Row>& got, const Row& want,
                      bool exact, double second_factor, double Scale::*scale) {
    if (!got.has_value()) {
      Fail(absl::StrCat(name, " rank ", rank), "got none");
      return;
    }
    for (size_t k = 0; k < want.size(); ++k) {
      if (!want[k].has_value()) continue;
      if (k >= got->size() || !(*got)[k].has_value()) {
        Fail(absl::StrCat(name, " rank ", rank, " tensor ", k), "got none");
        continue;
      }
      const DType dtype = want[k]->dtype;
      const double limit = second_factor == 0
                               ? Limit(dtype, Of(scale))
                               : second_factor * tolerance_.eps.at(dtype) * Of(scale);
      CheckArray(name, rank, k, *(*got)[k], *want[k], exact, limit);
    }
  }

  void CheckS(double got) {
    const double limit = tolerance_.second_factor * tolerance_.eps.at(v_.dtype) * Of(&Scale::S);
    if (Near(got, v_.second->S, limit)) return;
    Fail("S", absl::StrFormat("got %.17g, want %.17g, tolerance %.3g", got, v_.second->S, limit));
  }

 private:
  double Of(double Scale::*part) const { return v_.scale.has_value() ? (*v_.scale).*part : 0; }

  double Limit(DType dtype, double scale) const {
    if (!IsFloating(dtype)) return 0;
    return tolerance_.factor.at(dtype) * tolerance_.eps.at(dtype) * scale;
  }

  // One result, which all ranks get: then the bits are the same.
  bool EqualEverywhere() const {
    switch (v_.op) {
      case Op::kBroadcast:
      case Op::kAllReduce:
      case Op::kAllGather:
      case Op::kAllGatherIntoTensor:
      case Op::kBroadcastCoalesced:
        return true;
      default:
        return false;
    }
  }

  void CheckArray(const char* name, int rank, size_t k, const Array& got, const Array& want,
                  bool exact, double limit) {
    const std::string where = absl::StrCat(name, " rank ", rank, " tensor ", k);
    if (got.dtype != want.dtype || got.shape != want.shape) {
      Fail(where, absl::StrCat("got ", got.TypeText(), ", want ", want.TypeText()));
      return;
    }
    exact = exact || !want.floating();
    for (int64_t i = 0; i < want.size(); ++i) {
      if (SameValue(got, want, i)) continue;
      if (!exact && Near(FloatAt(got, i), FloatAt(want, i), limit)) continue;
      Fail(absl::StrCat(where, " element ", i),
           absl::StrCat("got ", TextAt(got, i), ", want ", TextAt(want, i),
                        exact ? ", exact" : absl::StrFormat(", tolerance %.3g", limit)));
    }
  }

  void CheckBits(const char* name, const char* as, int rank, const std::vector<Array>& got,
                 const std::vector<Array>& want) {
    if (got.size() != want.size()) {
      Fail(absl::StrCat(name, " rank ", rank),
           absl::StrCat("got ", got.size(), " tensors, not ", want.size(), as));
      return;
    }
    for (size_t k = 0; k < got.size(); ++k) {
      const std::string where = absl::StrCat(name, " rank ", rank, " tensor ", k);
      if (got[k].dtype != want[k].dtype || got[k].shape != want[k].shape) {
        Fail(where, absl::StrCat("got ", got[k].TypeText(), ", not ", want[k].TypeText(), as));
        continue;
      }
      for (int64_t i = 0; i < got[k].size(); ++i) {
        if (got[k].element(i) == want[k].element(i)) continue;
        Fail(absl::StrCat(where, " element ", i),
             absl::StrCat("got ", TextAt(got[k], i), ", other bits than ", TextAt(want[k], i), as));
      }
    }
  }

  void Fail(absl::string_view where, absl::string_view what) {
    failures_.push_back(absl::StrCat(where, ": ", what));
  }

  const Vector& v_;
  const Tolerance& tolerance_;
  std::vector<std::string> failures_;
};

bool Skips(const Rows& rows) {
  for (const absl::optional<Row>& row : rows) {
    if (!row.has_value()) return true;
  }
  return false;
}

bool Asks(const Vector& v, const Rows& upstream, size_t rank, Pass pass) {
  if (pass == Pass::kAllJoin) return true;
  if (!v.one_process()) return upstream[rank].has_value();
  for (const absl::optional<Row>& row : upstream) {
    if (row.has_value() && !row->empty()) return true;
  }
  return false;
}

}  // namespace

bool NeedsAllJoin(const Vector& v) {
  return (v.first.has_value() && Skips(v.first->g)) || (v.second.has_value() && Skips(v.second->w));
}

bool AsksFirst(const Vector& v, size_t rank, Pass pass) {
  return v.first.has_value() && Asks(v, v.first->g, rank, pass);
}

bool AsksSecond(const Vector& v, size_t rank, Pass pass) {
  return v.second.has_value() && Asks(v, v.second->w, rank, pass);
}

std::vector<std::string> Check(const Vector& v, const Tolerance& tolerance, Pass pass,
                               const std::vector<RankResults>& got) {
  Checker checker(v, tolerance);
  checker.CheckOutputs(got);
  for (int r = 0; r < v.size(); ++r) {
    if (!AsksFirst(v, r, pass)) continue;
    const auto rank = static_cast<size_t>(r);
    if (!v.first->xbar[rank].has_value()) continue;
    checker.CheckGradients("xbar", r, got[rank].xbar, *v.first->xbar[rank], v.exact_xbar, 0,
                           &Scale::xbar);
  }
  if (!v.second.has_value()) return checker.TakeFailures();
  checker.CheckAgain(got);
  double S = 0;
  bool asked = false;
  for (int r = 0; r < v.size(); ++r) {
    S += got[static_cast<size_t>(r)].S;
    asked = asked || AsksSecond(v, r, pass);
  }
  for (int r = 0; r < v.size(); ++r) {
    const auto rank = static_cast<size_t>(r);
    if (!AsksSecond(v, r, pass) || !v.second->G[rank].has_value()) continue;
    checker.CheckGradients("G", r, got[rank].G, *v.second->G[rank], false, tolerance.second_factor,
                           &Scale::G);
  }
  if (asked) checker.CheckS(S);
  for (int r = 0; r < v.size(); ++r) {
    const auto rank = static_cast<size_t>(r);
    if (!AsksSecond(v, r, pass) || !v.second->dS[rank].has_value()) continue;
    checker.CheckGradients("dS", r, got[rank].dS, *v.second->dS[rank], false,
                           tolerance.second_factor, &Scale::dS);
  }
  return checker.TakeFailures();
}

}  // namespace vectors
}  // namespace chorus
