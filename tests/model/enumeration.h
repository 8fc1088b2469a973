// Visits every state that a small world's sequencer can reach, and judges each step by the oracle.
#ifndef CHORUS_TESTS_MODEL_ENUMERATION_H_
#define CHORUS_TESTS_MODEL_ENUMERATION_H_

#include <cstdint>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

// One vote of a step, as a program writes it.
struct ModelPart {
  enum class Kind : uint8_t { kAllReduce, kSend, kRecv, kGradient, kGradientHere };
  Kind kind = Kind::kAllReduce;
  int32_t group = 0;    // into ModelConfig::groups
  int32_t peer = 0;     // kSend, kRecv: world rank of the other end
  int32_t of_step = 0;  // kGradient: of the first part of this earlier step of the same rank
  int32_t of_part = 0;  // kGradientHere: of this earlier part of the same step
  bool tape = false;    // it keeps a tape entry
  bool leads_to_collective = false;
  bool leads_to_leaf = false;
  bool other_shape = false;
  int32_t part = 0;  // of a coalesced call
  std::vector<int32_t> after;
};

// What a rank does next: a run with `parts` (none: a local run), or dropping a tape entry.
struct ModelStep {
  std::vector<ModelPart> parts;
  std::vector<int32_t> producers;  // earlier steps of the same rank
  bool externally_blocked = false;
  int32_t drops = -1;  // >= 0: no run; drops the entry of this step's first part
  bool consumed = false;
  int64_t begins = -1;   // >= 0: the rank begins this step of its program first (World::Step)
  bool goes_on = false;  // the next run for the group has the next part of this one's call
};

struct ModelConfig {
  std::string name;
  std::vector<std::vector<int32_t>> groups;      // world ranks; groups[0] is the world
  std::vector<std::vector<ModelStep>> programs;  // by rank
  bool cancel = true;
  bool death = true;
  bool leave = false;
  bool expiry = true;
  bool exec_failure = false;
  bool finish = true;  // gangs finish in any order; else at once
  bool may_mismatch = false;
  bool may_circle = false;
  // How many runs, over all ranks, cannot be made: the rank says so, with or without knowing what
  // it would have called, or says nothing; or it leaves the step early.
  int faults = 0;
  bool silent_faults = true;  // also those of which nothing is said
  bool lost_faults = true;    // also those of which it is not known what would have been called
  // Every rank makes the same calls: where all faults are told, nobody is left waiting at the end.
  bool in_line = false;
  // Slices have no time left when they begin: what can wait for another one does, and whatever can
  // happen happens in between.
  bool busy = false;
  bool points = true;     // the k-th call of a group is the same call of every rank's program
  bool may_lose = false;  // a part of a gradient that led to another collective is given up
};

struct ModelResult {
  int64_t states = 0;
  int64_t transitions = 0;
  int64_t all_published = 0;  // states in which every run of every rank was published
  int64_t failed_alone = 0;   // transitions in which runs failed without ending the epoch
  std::string fault;          // empty, or the promise broken and the events that lead there
  // (where a rank stands in its run, what happened to it there): the named failpoints.
  std::set<std::pair<std::string, std::string>> points;
};

ModelResult Enumerate(const ModelConfig& config);

// For test output.
inline void PrintTo(const ModelConfig& config, std::ostream* out) { *out << config.name; }

// The configurations that the test enumerates.
std::vector<ModelConfig> ModelConfigs();

}  // namespace chorus

#endif  // CHORUS_TESTS_MODEL_ENUMERATION_H_
