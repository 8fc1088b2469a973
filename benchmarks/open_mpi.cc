#include "benchmarks/open_mpi.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "benchmarks/collective_case.h"
#include "benchmarks/gradients.h"
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
    find("MPI_Alltoall", &library.all_to_all);
    find("MPI_Bcast", &library.broadcast);
    find("MPI_Gather", &library.gather);
    find("MPI_Reduce", &library.reduce);
    find("MPI_Reduce_scatter_block", &library.reduce_scatter);
    find("MPI_Scatter", &library.scatter);
    find("MPI_Sendrecv", &library.send_recv);
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
  int (*all_to_all)(const void*, int, void* type, void*, int, void* to_type, void* comm);
  int (*broadcast)(void*, int count, void* type, int root, void* comm);
  int (*gather)(const void*, int, void* type, void*, int, void* to_type, int root, void* comm);
  int (*reduce)(const void*, void*, int count, void* type, void* op, int root, void* comm);
  int (*reduce_scatter)(const void*, void*, int count, void* type, void* op, void* comm);
  int (*scatter)(const void*, int, void* type, void*, int, void* to_type, int root, void* comm);
  int (*send_recv)(const void*, int, void* type, int to, int tag, void*, int, void* to_type,
                   int from, int with_tag, void* comm, void* status);
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
    if (task.op == "forget") {
      Forget();
      return outcome;
    }
    if (task.op == "gradients") return GradientAllReduces(task);
    const bool computes = task.op == "compute";
    absl::StatusOr<CollectiveCase> c =
        CollectiveCase::Of(computes ? "all_reduce" : task.op, size_, task.bytes);
    if (c.ok() && c->count > INT_MAX) {
      c = absl::InvalidArgumentError("more elements than MPI counts");
    }
    if (!c.ok()) {
      outcome.status = c.status();
      return outcome;
    }
    Prepare(*c);
    const bool reads = !computes && task.number == 1;
    const auto step = [&]() -> absl::Status {
      if (computes) Compute(task.number);
      const int code = c->count == 0 ? 0 : Call(*c);
      if (code != 0) return absl::InternalError(absl::StrCat("MPI returned ", code));
      if (reads) read_ ^= ReadAll(out_.data(), out_.size() * sizeof(float));
      return absl::OkStatus();
    };
    outcome = TimedLoop(task, step);
    if (outcome.status.ok()) outcome.status = c->Check(rank_, out_.data());
    return outcome;
  }

 private:
  void Prepare(const CollectiveCase& c) {
    if (c.op != op_ || c.count != count_) {
      Forget();
      op_ = c.op;
      count_ = c.count;
      in_.resize(static_cast<size_t>(c.InputPieces(rank_) * c.count));
      out_.resize(static_cast<size_t>(c.OutputPieces(rank_) * c.count));
      c.Fill(rank_, in_.data());
    }
    std::fill(out_.begin(), out_.end(), std::numeric_limits<float>::quiet_NaN());
    // A broadcast has one buffer.
    if (c.op == "broadcast" && rank_ == 0) out_ = in_;
  }

  // The sums: that is where MPI's reductions end. One call after the other, as a trainer would.
  Outcome GradientAllReduces(const Task& task) {
    Outcome outcome;
    const absl::StatusOr<Gradients> gradients = Gradients::Decode(task.text);
    if (!gradients.ok()) {
      outcome.status = gradients.status();
      return outcome;
    }
    const int64_t total = gradients->total();
    if (task.op != op_ || total != count_) {
      Forget();
      op_ = task.op;
      count_ = total;
      in_.resize(static_cast<size_t>(total));
      FillPattern(rank_, in_.data(), total);
    }
    out_.assign(in_.size(), -1.0f);
    outcome = TimedLoop(task, [&]() -> absl::Status {
      const float* in = in_.data();
      float* out = out_.data();
      for (size_t k = 0; k < gradients->shapes.size(); ++k) {
        const int n = static_cast<int>(gradients->count(k));
        const int code = mpi_.all_reduce(in, out, n, mpi_.f32, mpi_.sum, mpi_.world);
        if (code != 0) return absl::InternalError(absl::StrCat("MPI returned ", code));
        in += n;
        out += n;
      }
      if (task.number == 1) read_ ^= ReadAll(out_.data(), gradients->bytes());
      return absl::OkStatus();
    });
    if (outcome.status.ok()) outcome.status = CheckPatternSum(size_, out_.data(), total);
    return outcome;
  }

  void Forget() {
    count_ = -1;
    in_ = std::vector<float>();
    out_ = std::vector<float>();
  }

  int Call(const CollectiveCase& c) {
    const std::string& op = c.op;
    const int n = static_cast<int>(c.count);
    const float* const in = in_.data();
    float* const out = out_.data();
    void* const f32 = mpi_.f32;
    void* const world = mpi_.world;
    if (op == "all_reduce") return mpi_.all_reduce(in, out, n, f32, mpi_.sum, world);
    if (op == "broadcast") return mpi_.broadcast(out, n, f32, 0, world);
    if (op == "reduce") return mpi_.reduce(in, out, n, f32, mpi_.sum, 0, world);
    if (op == "gather") return mpi_.gather(in, n, f32, out, n, f32, 0, world);
    if (op == "scatter") return mpi_.scatter(in, n, f32, out, n, f32, 0, world);
    // All of a rank's pieces lie one after the other, as in the single-tensor forms.
    if (op == "all_gather" || op == "all_gather_into_tensor") {
      return mpi_.all_gather(in, n, f32, out, n, f32, world);
    }
    if (op == "reduce_scatter" || op == "reduce_scatter_tensor") {
      return mpi_.reduce_scatter(in, out, n, f32, mpi_.sum, world);
    }
    if (op == "all_to_all" || op == "all_to_all_single") {
      return mpi_.all_to_all(in, n, f32, out, n, f32, world);
    }
    const int other = c.Neighbour(rank_);
    if (other < 0) return 0;
    return mpi_.send_recv(in, n, f32, other, 0, out, n, f32, other, 0, world, nullptr);
  }

  const Library mpi_;
  const int rank_;
  const int size_;
  std::string op_;
  int64_t count_ = -1;
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
