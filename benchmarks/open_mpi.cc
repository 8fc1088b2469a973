#include "benchmarks/open_mpi.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "benchmarks/pattern.h"
#include "benchmarks/timed_loop.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

constexpr char kLibrary[] = "libmpi.so.40";  // Open MPI 2 to 4

// What Open MPI's binary interface calls its handles: addresses of objects in the library.
class Library {
 public:
  static absl::StatusOr<Library> Load() {
    Library library;
    // Its components are libraries that look for its symbols.
    void* const handle = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) return absl::NotFoundError(dlerror());
    absl::Status status;
    const auto find = [handle, &status](const char* name, auto* to) {
      void* const symbol = dlsym(handle, name);
      if (symbol == nullptr && status.ok()) {
        status = absl::NotFoundError(absl::StrCat(kLibrary, " has no ", name));
      }
      *to = reinterpret_cast<std::remove_reference_t<decltype(*to)>>(symbol);
    };
    find("MPI_Init", &library.init);
    find("MPI_Finalize", &library.finalize);
    find("MPI_Comm_rank", &library.comm_rank);
    find("MPI_Comm_size", &library.comm_size);
    find("MPI_Get_library_version", &library.get_version);
    find("MPI_Allreduce", &library.all_reduce);
    find("MPI_Allgather", &library.all_gather);
    find("MPI_Bcast", &library.broadcast);
    find("ompi_mpi_comm_world", &library.world);
    find("ompi_mpi_float", &library.f32);
    find("ompi_mpi_op_sum", &library.sum);
    if (!status.ok()) return status;
    return library;
  }

  int (*init)(int*, char***);
  int (*finalize)();
  int (*comm_rank)(void* comm, int*);
  int (*comm_size)(void* comm, int*);
  int (*get_version)(char*, int*);
  int (*all_reduce)(const void*, void*, int count, void* type, void* op, void* comm);
  int (*all_gather)(const void*, int, void* type, void*, int, void* to_type, void* comm);
  int (*broadcast)(void*, int count, void* type, int root, void* comm);
  void* world;
  void* f32;
  void* sum;
};

class Rank {
 public:
  Rank(const Library& library, int rank, int size) : mpi_(library), rank_(rank), size_(size) {}

  Outcome Handle(const Task& task) {
    Outcome outcome;
    if (task.op == "version") {
      char text[256] = {};
      int length = 0;
      mpi_.get_version(text, &length);
      outcome.text = std::string(text, strcspn(text, ","));
      return outcome;
    }
    const int64_t count = task.bytes / static_cast<int64_t>(sizeof(float));
    if (count > INT_MAX) {
      outcome.status = absl::InvalidArgumentError("more elements than MPI counts");
      return outcome;
    }
    const int n = static_cast<int>(count);
    Prepare(task.op, count);
    const bool reads = task.op != "compute" && task.number == 1;
    const auto step = [&]() -> absl::Status {
      int code = 0;
      if (task.op == "all_reduce" || task.op == "compute") {
        if (task.op == "compute") Compute(task.number);
        if (n > 0)
          code = mpi_.all_reduce(in_.data(), out_.data(), n, mpi_.f32, mpi_.sum, mpi_.world);
      } else if (task.op == "all_gather") {
        code = mpi_.all_gather(in_.data(), n, mpi_.f32, out_.data(), n, mpi_.f32, mpi_.world);
      } else if (task.op == "broadcast") {
        code = mpi_.broadcast(out_.data(), n, mpi_.f32, 0, mpi_.world);
      } else {
        return absl::InvalidArgumentError(absl::StrCat("no task ", task.op));
      }
      if (code != 0) return absl::InternalError(absl::StrCat("MPI returned ", code));
      if (reads) read_ ^= ReadAll(out_.data(), out_.size() * sizeof(float));
      return absl::OkStatus();
    };
    outcome = TimedLoop(task, step);
    if (outcome.status.ok()) outcome.status = Check(task.op, count);
    return outcome;
  }

 private:
  void Prepare(const std::string& op, int64_t count) {
    const int64_t out_count = op == "all_gather" ? count * size_ : count;
    if (static_cast<int64_t>(in_.size()) != count) {
      in_ = std::vector<float>(count);
      FillPattern(rank_, in_.data(), count);
    }
    if (static_cast<int64_t>(out_.size()) != out_count) out_ = std::vector<float>(out_count);
    std::memset(out_.data(), 0xff, out_.size() * sizeof(float));
    if (op == "broadcast" && rank_ == 0) FillPattern(0, out_.data(), count);
  }
  absl::Status Check(const std::string& op, int64_t count) const {
    if (op == "broadcast") return CheckPattern(0, out_.data(), count);
    if (op != "all_gather") return CheckPatternSum(size_, out_.data(), count);
    for (int k = 0; k < size_; ++k) {
      CHORUS_RETURN_IF_ERROR(CheckPattern(k, out_.data() + k * count, count));
    }
    return absl::OkStatus();
  }

  const Library mpi_;
  const int rank_;
  const int size_;
  std::vector<float> in_;
  std::vector<float> out_;
  uint64_t read_ = 0;
};

std::string OwnPath() {
  char path[PATH_MAX] = {};
  return readlink("/proc/self/exe", path, sizeof(path) - 1) > 0 ? path : "";
}

absl::StatusOr<std::unique_ptr<HelperGroup>> StartJob(const ScratchDirectory& scratch, int ranks,
                                                      int yield) {
  CHORUS_ASSIGN_OR_RETURN(
      std::unique_ptr<HelperGroup> job,
      HelperGroup::Create(scratch, absl::StrCat("mpi", ranks, "-", yield), ranks));
  Process::Options options;
  options.log = absl::StrCat(job->path(), ".log");
  // Debian's mpirun refuses root twice. A home is not always there.
  options.env = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                 absl::StrCat("TMPDIR=", scratch.path())};
  CHORUS_ASSIGN_OR_RETURN(
      Process process,
      Process::Start(
          {"mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np",
           absl::StrCat(ranks), "--mca", "mpi_yield_when_idle", absl::StrCat(yield), "--mca", "btl",
           "vader,self", OwnPath(), "--helper=open_mpi", absl::StrCat("--control=", job->path())},
          options));
  job->Own(std::move(process));
  const absl::Status started = job->AwaitHellos();
  if (!started.ok()) {
    return absl::UnavailableError(absl::StrCat(started.message(), "\n", FileText(options.log)));
  }
  return job;
}

}  // namespace

absl::StatusOr<std::unique_ptr<OpenMpi>> OpenMpi::Start(const ScratchDirectory& scratch,
                                                        int ranks) {
  CHORUS_RETURN_IF_ERROR(Library::Load().status());
  auto mpi = std::make_unique<OpenMpi>();
  for (const int yield : {0, 1}) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<HelperGroup> job, StartJob(scratch, ranks, yield));
    mpi->settings_.push_back({absl::StrCat("mpi_yield_when_idle ", yield), std::move(job), false});
  }
  Task task;
  task.op = "version";
  CHORUS_ASSIGN_OR_RETURN(std::vector<Outcome> outcomes, mpi->settings_.front().job->Run(task));
  mpi->version_ = outcomes.front().text;
  return mpi;
}

int RunOpenMpiHelper(const std::string& control_path) {
  absl::StatusOr<Library> mpi = Library::Load();
  if (!mpi.ok() || mpi->init(nullptr, nullptr) != 0) {
    std::fprintf(stderr, "Open MPI: %s\n", mpi.status().ToString().c_str());
    return 1;
  }
  int rank = 0;
  int size = 0;
  mpi->comm_rank(mpi->world, &rank);
  mpi->comm_size(mpi->world, &size);
  Rank self(*mpi, rank, size);
  const int status =
      RunHelper(control_path, rank, [&self](const Task& task) { return self.Handle(task); });
  mpi->finalize();
  return status;
}

}  // namespace bench
}  // namespace chorus
