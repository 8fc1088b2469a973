// P9: whether a product of cuBLASLt has the same bits, whoever asks for it.
//
// Two processes multiply the same operands in three ways: each with what its own heuristic gives;
// both with what the first one's heuristic gave first, passed on as the structure's 64 bytes, as
// the backend will do it; and both with an algorithm that each builds anew from its attributes.
#include <sys/types.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tools/gpu_probe/algorithm.h"
#include "tools/gpu_probe/assumptions.h"
#include "tools/gpu_probe/gpu.h"
#include "tools/gpu_probe/matmul.h"
#include "tools/gpu_probe/stages.h"

namespace chorus {
namespace probe {
namespace {

using cuda::BlasType;

constexpr uint32_t kOffsetBytes = 64;
constexpr int kRepeats = 3;

enum Way { kHeuristic, kPinned, kRebuilt };
constexpr Way kWays[] = {kHeuristic, kPinned, kRebuilt};

const std::vector<MatmulShape>& Shapes() {
  static const auto& all = *new std::vector<MatmulShape>([] {
    std::vector<MatmulShape> shapes;
    for (const BlasType type : {BlasType::kF32, BlasType::kBF16, BlasType::kF16, BlasType::kF64}) {
      // Layers of a small network, a square, something odd, and sums long enough to be cut into
      // parts.
      shapes.push_back({type, 256, 64, 784});
      shapes.push_back({type, 1024, 1024, 1024});
      shapes.push_back({type, 264, 136, 1000});
      shapes.push_back({type, 64, 64, 16384});
      // The gradients of the first of them: of its left operand, of its right one.
      shapes.push_back({type, 256, 784, 64, false, true});
      shapes.push_back({type, 784, 64, 256, true, false});
      // Where a side is 1.
      shapes.push_back({type, 1024, 1, 1024});
      shapes.push_back({type, 1, 1024, 1024});
      shapes.push_back({type, 256, 64, 1});
    }
    return shapes;
  }());
  return all;
}

// --- In the processes that multiply ---

uint64_t HashOf(const std::vector<char>& data) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](uint64_t word) { hash = (hash ^ word) * 0x100000001b3u; };
  size_t at = 0;
  for (; at + 8 <= data.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data.data() + at, 8);
    // What the product leaves of high bits is high bits only.
    add(word ^ word >> 32);
  }
  for (; at < data.size(); ++at) add(static_cast<unsigned char>(data[at]));
  return hash;
}

// The longest operands of each type, made once: shorter ones are their beginnings.
class Operands {
 public:
  using Values = std::vector<unsigned char>;

  const Values& a(BlasType type) { return Of(type).first; }
  const Values& b(BlasType type) { return Of(type).second; }

 private:
  const std::pair<Values, Values>& Of(BlasType type) {
    const auto [at, is_new] = values_.try_emplace(type);
    if (!is_new) return at->second;
    int64_t most_a = 0;
    int64_t most_b = 0;
    for (const MatmulShape& shape : Shapes()) {
      most_a = std::max(most_a, shape.m * shape.k);
      most_b = std::max(most_b, shape.k * shape.n);
    }
    at->second = {PatternMatrix(type, most_a, 91), PatternMatrix(type, most_b, 92)};
    return at->second;
  }

  std::map<BlasType, std::pair<Values, Values>> values_;
};

// The hashes of all results of one algorithm.
absl::StatusOr<std::set<std::string>> ResultsOf(Gpu* gpu, const Matmul& matmul, Operands* operands,
                                                const MatmulShape& shape,
                                                const cuda::BlasAlgorithm& algorithm,
                                                cuda::Stream stream) {
  const cuda::Api& api = gpu->api();
  const int64_t a_bytes = shape.m * shape.k * shape.element_bytes();
  const int64_t b_bytes = shape.k * shape.n * shape.element_bytes();
  std::vector<char> result(static_cast<size_t>(shape.m * shape.n * shape.element_bytes()));
  CHORUS_ASSIGN_OR_RETURN(const Memory a, gpu->Allocate(a_bytes + kOffsetBytes));
  CHORUS_ASSIGN_OR_RETURN(const Memory b, gpu->Allocate(b_bytes + kOffsetBytes));
  CHORUS_ASSIGN_OR_RETURN(const Memory d,
                          gpu->Allocate(static_cast<int64_t>(result.size()) + kOffsetBytes));
  const unsigned char* const a_values = operands->a(shape.type).data();
  const unsigned char* const b_values = operands->b(shape.type).data();
  std::set<std::string> hashes;
  for (const uint32_t offset : {uint32_t{0}, kOffsetBytes}) {
    CHORUS_CUDA(api, MemcpyHtoDAsync, a.get() + offset, a_values, a_bytes, stream);
    CHORUS_CUDA(api, MemcpyHtoDAsync, b.get() + offset, b_values, b_bytes, stream);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      CHORUS_CUDA(api, MemsetD8Async, d.get(), 0xff, d.bytes, stream);
      const absl::Status ran =
          matmul.Run(algorithm, a.get() + offset, b.get() + offset, d.get() + offset, stream);
      if (!ran.ok()) {
        // What is queued before it uses memory that goes now.
        CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream));
        return ran;
      }
      CHORUS_CUDA(api, MemcpyDtoHAsync, result.data(), d.get() + offset, result.size(), stream);
      CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream));
      hashes.insert(absl::StrFormat("%016x", HashOf(result)));
    }
  }
  return hashes;
}

// What a process is asked for: the number of a shape, a way and, but for the heuristic, an
// algorithm.
struct Request {
  size_t shape = 0;
  Way way = kHeuristic;
  Algorithm algorithm;

  std::string Line() const {
    return absl::StrCat(shape, "\t", static_cast<int>(way), "\t", AlgorithmLine(algorithm));
  }
  static absl::StatusOr<Request> Parse(const std::string& line) {
    const std::vector<std::string> parts = absl::StrSplit(line, '\t');
    Request request;
    int way = 0;
    if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &request.shape) ||
        request.shape >= Shapes().size() || !absl::SimpleAtoi(parts[1], &way) || way < kHeuristic ||
        way > kRebuilt) {
      return absl::InternalError("no request: " + line);
    }
    request.way = static_cast<Way>(way);
    CHORUS_ASSIGN_OR_RETURN(request.algorithm, ParseAlgorithm(parts[2]));
    return request;
  }
};

// What it answers: what it found, or why it could not.
struct Answer {
  std::set<std::string> results;
  // The algorithm that was used; for the heuristic also what it gives when asked again, behind the
  // runs, and what for the best alignment, 256 bytes.
  std::vector<Algorithm> algorithms;
  std::string failure;

  std::string Line() const {
    if (!failure.empty()) return "failed\t" + failure;
    std::vector<std::string> parts = {"ran", absl::StrJoin(results, " ")};
    for (const Algorithm& algorithm : algorithms) parts.push_back(AlgorithmLine(algorithm));
    return absl::StrJoin(parts, "\t");
  }
  static absl::StatusOr<Answer> Parse(const std::string& line, Way way) {
    const std::vector<std::string> parts = absl::StrSplit(line, '\t');
    Answer answer;
    if (parts[0] == "failed") {
      answer.failure = line.substr(parts[0].size() + 1);
      return answer;
    }
    const size_t algorithms = way == kHeuristic ? 3 : 1;
    if (parts[0] != "ran" || parts.size() != 2 + algorithms) return absl::InternalError(line);
    answer.results = absl::StrSplit(parts[1], ' ');
    for (size_t i = 0; i < algorithms; ++i) {
      CHORUS_ASSIGN_OR_RETURN(const Algorithm algorithm, ParseAlgorithm(parts[2 + i]));
      answer.algorithms.push_back(algorithm);
    }
    return answer;
  }
};

absl::StatusOr<Answer> RunShape(Gpu* gpu, Matmul* matmul, Operands* operands,
                                const Request& request, cuda::Stream stream) {
  const MatmulShape& shape = Shapes()[request.shape];
  CHORUS_RETURN_IF_ERROR(matmul->Set(shape));
  cuda::BlasAlgorithm algorithm = request.algorithm.structure;
  if (request.way == kHeuristic) {
    CHORUS_ASSIGN_OR_RETURN(algorithm, matmul->Choose(kOffsetBytes));
  } else if (request.way == kRebuilt) {
    CHORUS_ASSIGN_OR_RETURN(algorithm, matmul->Rebuild(request.algorithm));
  }
  Answer answer;
  answer.algorithms.push_back(matmul->Describe(algorithm));
  CHORUS_ASSIGN_OR_RETURN(answer.results,
                          ResultsOf(gpu, *matmul, operands, shape, algorithm, stream));
  if (request.way == kHeuristic) {
    for (const uint32_t alignment : {kOffsetBytes, uint32_t{256}}) {
      CHORUS_ASSIGN_OR_RETURN(const auto other, matmul->Choose(alignment));
      answer.algorithms.push_back(matmul->Describe(other));
    }
  }
  return answer;
}

// --- In the stage ---

// A structure that a heuristic gave, and to whom.
struct Chosen {
  Algorithm algorithm;
  std::vector<std::string> by;  // "first process, call 2 (alone)"
};

// All that was told of one shape.
struct Told {
  std::vector<Chosen> chosen;  // the first is what is pinned
  int calls[2] = {};           // of each process's heuristic
  bool moved = false;          // the heuristic gives something else for the best alignment
  std::array<std::set<std::string>, 3> results;   // by ways
  std::array<std::set<std::string>, 3> failures;  // by ways
  std::set<std::string> rebuilt_bytes;            // where they are not the pinned ones

  size_t algorithms() const {
    std::set<std::array<int64_t, Algorithm::kFields>> all;
    for (const Chosen& one : chosen) all.insert(one.algorithm.values);
    return all.size();
  }
};

void AddChoice(const Algorithm& algorithm, int process, const std::string& when, Told* told) {
  const std::string by = absl::StrCat(process == 0 ? "first" : "second", " process, call ",
                                      ++told->calls[process], " (", when, ")");
  for (Chosen& one : told->chosen) {
    if (SameStructure(one.algorithm.structure, algorithm.structure)) return one.by.push_back(by);
  }
  told->chosen.push_back({algorithm, {by}});
}

void Add(const Answer& answer, Way way, int process, const std::string& when, Told* told) {
  if (!answer.failure.empty()) {
    told->failures[way].insert(answer.failure);
    return;
  }
  told->results[way].insert(answer.results.begin(), answer.results.end());
  if (way == kHeuristic) {
    AddChoice(answer.algorithms[0], process, when, told);
    AddChoice(answer.algorithms[1], process, when, told);
    told->moved = told->moved || answer.algorithms[2].values != answer.algorithms[1].values;
  } else if (way == kRebuilt) {
    const std::string bytes =
        DifferingBytes(told->chosen[0].algorithm.structure, answer.algorithms[0].structure);
    if (!bytes.empty()) told->rebuilt_bytes.insert(bytes);
  }
}

class Comparison {
 public:
  Comparison(Helper first, Helper second)
      : helpers_{std::move(first), std::move(second)}, told_(Shapes().size()) {}

  // All shapes, by these of the processes at once.
  absl::Status Run(Way way, const std::vector<int>& processes, const std::string& when) {
    for (size_t shape = 0; shape < told_.size(); ++shape) {
      Told& told = told_[shape];
      Request request;
      request.shape = shape;
      request.way = way;
      if (way != kHeuristic) {
        if (told.chosen.empty()) continue;
        request.algorithm = told.chosen[0].algorithm;
      }
      for (const int process : processes) {
        CHORUS_RETURN_IF_ERROR(helpers_[process].channel.Send(request.Line()));
      }
      for (const int process : processes) {
        CHORUS_ASSIGN_OR_RETURN(const std::string line, helpers_[process].channel.Receive(20));
        CHORUS_ASSIGN_OR_RETURN(const Answer answer, Answer::Parse(line, way));
        Add(answer, way, process, when, &told);
      }
    }
    return absl::OkStatus();
  }

  void Tell(Recorder* recorder) const {
    std::vector<std::string> moved;
    std::vector<std::string> rebuilt;
    for (size_t i = 0; i < told_.size(); ++i) {
      const Told& told = told_[i];
      const std::string shape = Shapes()[i].Text();
      if (told.moved) moved.push_back(shape);
      if (!told.rebuilt_bytes.empty()) {
        rebuilt.push_back(
            absl::StrCat(shape, " (", absl::StrJoin(told.rebuilt_bytes, " or "), ")"));
      }
      if (told.chosen.empty()) {
        recorder->Fact(shape, "no algorithm: " + absl::StrJoin(told.failures[kHeuristic], "; "));
        continue;
      }
      recorder->Fact(
          shape,
          absl::StrCat(AlgorithmText(told.chosen[0].algorithm), "; results: by heuristic ",
                       told.results[kHeuristic].size(), ", pinned ", told.results[kPinned].size(),
                       ", rebuilt ", told.results[kRebuilt].size(),
                       "; algorithms: ", told.algorithms(), ", of ", told.chosen.size(),
                       told.chosen.size() == 1 ? " structure" : " structures"));
      if (told.chosen.size() > 1) TellStructures(shape, told, recorder);
    }
    recorder->Fact("the heuristic chooses otherwise for operands at 256 bytes than at 64",
                   moved.empty() ? "nowhere" : absl::StrJoin(moved, "; "));
    recorder->Fact(
        "rebuilt from its attributes, the pinned structure has other bytes (pinned, rebuilt)",
        rebuilt.empty() ? "nowhere" : absl::StrJoin(rebuilt, "; "));
  }

  Verdict Judged(Way way, const std::string& not_run) const {
    Judge judge;
    for (size_t i = 0; i < told_.size(); ++i) JudgeShape(way, Shapes()[i].Text(), told_[i], &judge);
    if (!not_run.empty()) judge.Unknown(not_run);
    Verdict verdict = judge.verdict();
    if (verdict.decision == Decision::kHolds) {
      verdict.why = absl::StrCat("one result", way == kHeuristic ? " and one algorithm" : "",
                                 " for each of ", told_.size(), " products",
                                 way == kRebuilt ? ", that of the pinned one" : "");
    }
    return verdict;
  }

 private:
  static void TellStructures(const std::string& shape, const Told& told, Recorder* recorder) {
    const Algorithm& first = told.chosen[0].algorithm;
    for (size_t n = 0; n < told.chosen.size(); ++n) {
      const Algorithm& algorithm = told.chosen[n].algorithm;
      std::string text = AlgorithmText(algorithm);
      if (n > 0) {
        absl::StrAppend(&text, algorithm.values == first.values ? ", the same as" : ", not that of",
                        " structure 1, whose bytes differ (its, these): ",
                        DifferingBytes(first.structure, algorithm.structure));
      }
      recorder->Fact(absl::StrCat(shape, ", structure ", n + 1, " of ", told.chosen.size()),
                     absl::StrCat(text, "; given to: ", absl::StrJoin(told.chosen[n].by, "; ")));
    }
  }

  static void JudgeShape(Way way, const std::string& shape, const Told& told, Judge* judge) {
    if (told.chosen.empty()) return judge->Unknown("there is no algorithm for " + shape);
    for (const std::string& failure : told.failures[way]) {
      judge->True(absl::StrCat(shape, " runs (", failure, ")"), false);
    }
    std::set<std::string> results = told.results[way];
    if (way == kRebuilt) results.insert(told.results[kPinned].begin(), told.results[kPinned].end());
    judge->AtMost("results of " + shape, static_cast<double>(results.size()), kMostResults);
    if (way == kHeuristic) {
      judge->AtMost("algorithms of " + shape, static_cast<double>(told.algorithms()),
                    kMostAlgorithms);
    }
  }

  std::array<Helper, 2> helpers_;
  std::vector<Told> told_;  // by shapes
};

const char* YesOrNo(Decision decision) {
  switch (decision) {
    case Decision::kHolds:
      return "yes";
    case Decision::kDoesNotHold:
      return "no";
    case Decision::kNotDecided:
      return "not decided";
  }
  return "?";
}

}  // namespace

absl::Status RunP9(StageContext* context) {
  Recorder* const recorder = context->recorder;
  CHORUS_ASSIGN_OR_RETURN(Helper first, context->Start("multiply"));
  CHORUS_ASSIGN_OR_RETURN(Helper second, context->Start("multiply"));
  for (const Helper* helper : {&first, &second}) {
    CHORUS_ASSIGN_OR_RETURN(const std::string ready, helper->channel.Receive(25));
    if (ready.rfind("cuBLASLt", 0) != 0) return absl::UnavailableError(ready);
    if (helper == &first) recorder->Fact("library", ready);
  }
  Comparison comparison(std::move(first), std::move(second));
  for (const Way way : kWays) {
    CHORUS_RETURN_IF_ERROR(comparison.Run(way, {0}, "alone"));
    CHORUS_RETURN_IF_ERROR(comparison.Run(way, {1}, "alone"));
    CHORUS_RETURN_IF_ERROR(comparison.Run(way, {0, 1}, "both"));
  }
  std::string not_loaded;
  {
    CHORUS_ASSIGN_OR_RETURN(const Helper load, context->Start("load"));
    const auto text = load.channel.Receive(15);
    if (!text.ok() || *text != "loading") {
      not_loaded = "not under load: " + (text.ok() ? *text : std::string(text.status().message()));
    } else {
      for (const Way way : kWays) CHORUS_RETURN_IF_ERROR(comparison.Run(way, {0, 1}, "load"));
    }
  }
  const std::string runs = absl::StrCat(
      kRepeats, " times at offsets 0 and 64, in two processes, alone and both at once, ",
      not_loaded.empty() ? "also under load of a third" : not_loaded);
  recorder->Fact("runs, in each way", runs);
  comparison.Tell(recorder);
  const auto told = [](const Verdict& verdict) {
    return absl::StrCat(YesOrNo(verdict.decision), ": ", verdict.why);
  };
  const std::string heuristic = told(comparison.Judged(kHeuristic, not_loaded));
  const std::string rebuilt = told(comparison.Judged(kRebuilt, not_loaded));
  Verdict verdict = comparison.Judged(kPinned, not_loaded);
  const std::string pinned = told(verdict);
  recorder->Fact("P9 holds by heuristics", heuristic);
  recorder->Fact("pinned by its 64 bytes: equal bits", pinned);
  recorder->Fact("pinned by its attributes: equal bits", rebuilt);
  // What the backend will do decides.
  verdict.why = absl::StrCat("pinned by its 64 bytes, equal bits: ", pinned, " (", runs,
                             "); pinned by its attributes, equal bits: ", rebuilt,
                             "; holds by heuristics: ", heuristic);
  recorder->Say("P9", verdict);
  return absl::OkStatus();
}

absl::Status Multiply(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const auto matmul, Matmul::Open(gpu.get(), context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  CHORUS_RETURN_IF_ERROR(context->channel.Send(matmul->VersionText()));
  Operands operands;
  while (true) {
    const auto line = context->channel.Receive(60);
    // Nobody asks any more.
    if (!line.ok()) return absl::OkStatus();
    CHORUS_ASSIGN_OR_RETURN(const Request request, Request::Parse(*line));
    auto answer = RunShape(gpu.get(), matmul.get(), &operands, request, stream.get());
    if (!answer.ok()) {
      const std::string why = ErrorOf(answer.status()).message;
      answer.emplace();
      answer->failure = why;
    }
    CHORUS_RETURN_IF_ERROR(context->channel.Send(answer->Line()));
  }
}

absl::Status LoadGpu(RoleContext* context) {
  CHORUS_ASSIGN_OR_RETURN(const auto gpu, Gpu::Open(context->libraries));
  CHORUS_ASSIGN_OR_RETURN(const OwnedStream stream, gpu->CreateStream());
  const int64_t bytes = std::min<int64_t>(256 << 20, gpu->most_bytes() / 4 / 16 * 16);
  CHORUS_ASSIGN_OR_RETURN(const Memory from, gpu->Allocate(bytes));
  CHORUS_ASSIGN_OR_RETURN(const Memory to, gpu->Allocate(bytes));
  CHORUS_RETURN_IF_ERROR(gpu->FillPattern(from.get(), bytes, 9, true, stream.get()));
  CopyArgs args;
  args.from = from.as<Pack>();
  args.to = to.as<Pack>();
  args.packs = bytes / 16;
  // It is killed when it is no longer wanted.
  const double end = NowSeconds() + 40;
  bool told = false;
  while (NowSeconds() < end) {
    for (int n = 0; n < 20; ++n) {
      CHORUS_RETURN_IF_ERROR(
          gpu->Launch(gpu->kernel("copy"), args, gpu->Wave("copy"), stream.get()));
    }
    CHORUS_RETURN_IF_ERROR(gpu->Synchronize(stream.get()));
    if (!told) CHORUS_RETURN_IF_ERROR(context->channel.Send("loading"));
    told = true;
  }
  return absl::OkStatus();
}

}  // namespace probe
}  // namespace chorus
