#include "benchmarks/memory_floor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "benchmarks/memory_traffic.h"
#include "benchmarks/pattern.h"
#include "benchmarks/timed_loop.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

class Memory {
 public:
  ~Memory() { Release(); }

  absl::Status Reserve(int inputs, int outputs, int64_t bytes) {
    const int64_t total = (inputs + outputs) * RoundUp(bytes);
    if (inputs == inputs_ && outputs == outputs_ && bytes == bytes_) return absl::OkStatus();
    Release();
    const UniqueFd fd(memfd_create("chorus-bench-floor", MFD_CLOEXEC));
    if (!fd.valid() || ftruncate(fd.get(), total) != 0) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory of ", total, " bytes"));
    }
    void* const data = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat("cannot map ", total, " bytes"));
    }
    data_ = static_cast<char*>(data);
    total_ = total;
    inputs_ = inputs;
    outputs_ = outputs;
    bytes_ = bytes;
    for (int k = 0; k < inputs; ++k) FillPattern(k, Part(k), bytes / sizeof(float));
    for (int k = 0; k < outputs; ++k) std::memset(Part(inputs + k), 0xff, bytes);
    return absl::OkStatus();
  }
  void Release() {
    if (data_ != nullptr) munmap(data_, total_);
    data_ = nullptr;
    inputs_ = outputs_ = 0;
    bytes_ = 0;
  }
  float* Part(int k) const { return reinterpret_cast<float*>(data_ + k * RoundUp(bytes_)); }
  Traffic AsTraffic() const {
    Traffic traffic;
    for (int k = 0; k < inputs_; ++k) traffic.inputs.push_back(Part(k));
    for (int k = 0; k < outputs_; ++k) traffic.outputs.push_back(Part(inputs_ + k));
    traffic.count = count();
    return traffic;
  }
  int64_t count() const { return bytes_ / static_cast<int64_t>(sizeof(float)); }

 private:
  static int64_t RoundUp(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

  char* data_ = nullptr;
  int64_t total_ = 0;
  int inputs_ = 0;
  int outputs_ = 0;
  int64_t bytes_ = 0;
};

Outcome Handle(const Task& task, Memory* memory) {
  Outcome outcome;
  if (task.op == "forget") {
    memory->Release();
    return outcome;
  }
  // number: inputs; text: outputs, threads, streaming, prefetch
  const std::vector<std::string> words = absl::StrSplit(task.text, ' ');
  if (task.op != "move" || words.size() != 4 || task.number > Traffic::kMostInputs) {
    outcome.status = absl::InvalidArgumentError(absl::StrCat("no memory floor of ", task.op));
    return outcome;
  }
  const int inputs = static_cast<int>(task.number);
  const int outputs = std::stoi(words[0]);
  const TrafficVariant variant{std::stoi(words[1]), words[2] == "1", words[3] == "1"};
  outcome.status = memory->Reserve(inputs, outputs, task.bytes);
  if (!outcome.status.ok()) return outcome;
  for (int k = 0; k < outputs; ++k) std::memset(memory->Part(inputs + k), 0xff, task.bytes);
  TrafficTeam team(memory->AsTraffic(), variant);
  outcome = TimedLoop(task, [&team] {
    team.Move();
    return absl::OkStatus();
  });
  for (int k = 0; k < outputs && outcome.status.ok(); ++k) {
    outcome.status = CheckPatternSum(inputs, memory->Part(inputs + k), memory->count());
  }
  return outcome;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryFloor>> MemoryFloor::Start(const ScratchDirectory& scratch) {
  auto floor = std::make_unique<MemoryFloor>();
  CHORUS_ASSIGN_OR_RETURN(floor->helper_, HelperGroup::Create(scratch, "memory", 1));
  CHORUS_ASSIGN_OR_RETURN(Process process,
                          Process::Start({"/proc/self/exe", "--helper=memory",
                                          absl::StrCat("--control=", floor->helper_->path())},
                                         {}));
  floor->helper_->Own(std::move(process));
  CHORUS_RETURN_IF_ERROR(floor->helper_->AwaitHellos());
  return floor;
}

Contender MemoryFloor::AsContender(int inputs, int outputs, int64_t bytes) const {
  Contender contender;
  contender.name = absl::StrCat(inputs, " reads + ", outputs, outputs == 1 ? " write" : " writes");
  contender.role = Role::kFloor;
  for (const TrafficVariant& variant : AllTrafficVariants()) {
    Task task;
    task.op = "move";
    task.bytes = bytes;
    task.warm_up = 2;
    task.number = inputs;
    task.text = absl::StrCat(outputs, " ", variant.threads, " ", variant.streaming ? 1 : 0, " ",
                             variant.prefetch ? 1 : 0);
    HelperGroup* const helper = helper_.get();
    contender.settings.push_back(
        {variant.Name(),
         [helper, task](int64_t iterations) mutable -> absl::StatusOr<std::vector<double>> {
           task.iterations = iterations;
           CHORUS_ASSIGN_OR_RETURN(std::vector<Outcome> outcomes, helper->Run(task));
           return GroupSamples(outcomes);
         }});
  }
  return contender;
}

absl::Status MemoryFloor::Forget() {
  Task task;
  task.op = "forget";
  return helper_->Run(task).status();
}

int RunMemoryFloorHelper(const std::string& control_path) {
  Memory memory;
  return RunHelper(control_path, 0, [&memory](const Task& task) { return Handle(task, &memory); });
}

}  // namespace bench
}  // namespace chorus
