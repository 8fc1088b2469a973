#include "core/node/storage.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "core/backend/host/host_backend.h"
#include "core/base/counting_heap.h"
#include "core/base/error.h"
#include "core/base/shared_file.h"
#include "core/base/thread_pool.h"
#include "core/base/unique_fd.h"
#include "core/ops/host_kernels.h"
#include "core/runtime/devices.h"
#include "core/runtime/held_files.h"
#include "core/runtime/memory.h"
#include "core/worker/worker_devices.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::node {
namespace {

using ::testing::HasSubstr;

class StorageTest : public ::testing::Test {
 protected:
  StorageTest() : StorageTest(nullptr) {}
  // Null: the host's.
  explicit StorageTest(std::unique_ptr<Devices> devices) : devices_(std::move(devices)) {
    options_.max_staging_arenas = 2;
    options_.max_staging_bytes = 18 << 20;
    if (devices_ == nullptr) {
      HostBackendOptions host;
      host.devices = 1;
      host.pool = &pool_;
      host.make_kernel = MakeHostKernel;
      backend_ = CreateHostBackend(host);
      devices_ = DevicesOf(backend_.get());
    }
    background_ = std::make_unique<Background>(
        [this](std::function<void()> closure) { launcher_->Post(std::move(closure)); });
    launcher_ = std::make_unique<Launcher>(devices_.get(), background_.get(), [] {});
    storage_ = std::make_unique<Storage>(&options_, budget_, devices_.get(), launcher_.get(),
                                         background_.get(), &clock_, &timers_, &paths_,
                                         [this] { ++asked_; });
    OpenSessionRequest open;
    open.tenant = "uid:1";
    Budget::Limits own;
    own.downloads = 2;
    session_ = std::make_shared<Session>(SessionId(1), open, storage_->TenantNamed("uid:1"),
                                         CommandLog::Shared{&timers_, &errors_, absl::Seconds(1)},
                                         Names::Limits{8, 8}, own, &news_);
  }
  ~StorageTest() override {
    background_->Stop();
    session_.reset();
  }

  // Of memory that is there.
  absl::StatusOr<StagingArena> CreateStaging(int64_t bytes) {
    absl::StatusOr<StagingArena> staging = absl::UnknownError("it is awaited");
    storage_->CreateStaging(session_, bytes,
                            [&](absl::StatusOr<StagingArena> made) { staging = std::move(made); });
    return staging;
  }

  static Binding Inline(const std::string& bytes) {
    InlineData data;
    data.bytes.assign(bytes.begin(), bytes.end());
    return data;
  }
  static Binding Staged(ArenaId arena, int64_t offset, std::vector<int64_t> strides = {}) {
    ExternalRange range;
    range.arena = arena;
    range.offset = offset;
    range.strides = std::move(strides);
    return range;
  }
  absl::StatusOr<Storage::Bound> Bind(const Binding& binding, const TensorType& type, bool stable) {
    absl::StatusOr<Storage::Bound> bound =
        storage_->Bind(*session_, binding, type, DeviceIndex(0), stable, nullptr);
    if (bound.ok()) {
      EXPECT_EQ(bound->arrival, Storage::Arrival::kThere);
    }
    return bound;
  }

  NodeOptions options_;
  BudgetRef budget_ = Budget::OfNode(int64_t{64} << 20);
  ThreadPool pool_{1};
  int asked_ = 0;
  Clock clock_;
  TimerQueue timers_;
  ErrorStore errors_{4};
  News news_;
  PathCounters paths_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Devices> devices_;
  std::unique_ptr<Background> background_;
  std::unique_ptr<Storage> storage_;
  std::shared_ptr<Session> session_;
  std::unique_ptr<Launcher> launcher_;
};

TEST_F(StorageTest, ASessionHasSoMuchStaging) {
  const absl::StatusOr<StagingArena> first = CreateStaging(1 << 20);
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status large = CreateStaging(18 << 20).status();
  EXPECT_EQ(ErrorOf(large).reason, Reason::kQuota);
  EXPECT_THAT(ErrorOf(large).message, HasSubstr("it has 1 of 1048576 and asks for 18874368 more"));
  ASSERT_TRUE(CreateStaging(1).ok());
  EXPECT_EQ(ErrorOf(CreateStaging(1).status()).reason, Reason::kQuota);
  const int64_t used = storage_->budget().used();
  ASSERT_TRUE(storage_->ReleaseStaging(session_.get(), first->arena).ok());
  EXPECT_EQ(storage_->budget().used(), used - (1 << 20));
  EXPECT_FALSE(storage_->ReleaseStaging(session_.get(), first->arena).ok());
  EXPECT_EQ(ErrorOf(CreateStaging(0).status()).reason, Reason::kMalformed);
}

TEST_F(StorageTest, WritesStayInsideTheirArena) {
  const absl::StatusOr<StagingArena> staging = CreateStaging(4096);
  ASSERT_TRUE(staging.ok()) << staging.status();
  const auto write = [&](int64_t offset, const std::string& bytes) {
    return storage_->WriteStaging(*session_, staging->arena, offset, bytes);
  };
  EXPECT_TRUE(write(4092, "abcd").ok());
  EXPECT_FALSE(write(4093, "abcd").ok());
  EXPECT_FALSE(write(-1, "a").ok());
  EXPECT_FALSE(write(int64_t{1} << 62, "a").ok());
  EXPECT_EQ(paths_.streamed_bytes, 4);
  ExternalRange range;
  range.arena = staging->arena;
  range.offset = 4092;
  EXPECT_EQ(std::string((*storage_->FindStaged(*session_, range, 4))->host(), 4), "abcd");
  EXPECT_FALSE(storage_->FindStaged(*session_, range, 5).ok());
}

TEST_F(StorageTest, WhatMayChangeIsReadInPlaceAndWhatMayNotIsCopied) {
  const absl::StatusOr<StagingArena> staging = CreateStaging(4096);
  ASSERT_TRUE(staging.ok()) << staging.status();
  ASSERT_TRUE(storage_->WriteStaging(*session_, staging->arena, 8, "abcdefgh").ok());
  const TensorType two(DType::kF32, {2});
  const auto read = [](const Storage::Bound& bound) {
    return std::string(bound.buffer->host(), static_cast<size_t>(bound.buffer->bytes()));
  };
  const auto in_place = Bind(Staged(staging->arena, 8), two, /*stable=*/false);
  ASSERT_TRUE(in_place.ok()) << in_place.status();
  const auto copied = Bind(Staged(staging->arena, 8), two, /*stable=*/true);
  ASSERT_TRUE(copied.ok()) << copied.status();
  // In the other order of its elements it is no range of memory.
  const auto strided = Bind(Staged(staging->arena, 8, {0}), two, /*stable=*/false);
  ASSERT_TRUE(strided.ok()) << strided.status();
  ASSERT_TRUE(storage_->WriteStaging(*session_, staging->arena, 8, "ABCDEFGH").ok());
  EXPECT_EQ(read(*in_place), "ABCDEFGH");
  EXPECT_EQ(read(*copied), "abcdefgh");
  EXPECT_EQ(read(*strided), "abcdabcd");
  EXPECT_EQ(paths_.copied_bytes, 16);
}

TEST_F(StorageTest, MuchThatIsStridedIsCopiedBesideTheNodeThread) {
  // Every element twice, more than one part of it.
  constexpr int64_t kElements = 9 << 20;
  const absl::StatusOr<StagingArena> staging = CreateStaging(2 * kElements);
  ASSERT_TRUE(staging.ok()) << staging.status();
  for (int64_t i = 0; i < kElements; i += 1 << 20) {
    std::string bytes(2 << 20, static_cast<char>(1 + (i >> 20)));
    ASSERT_TRUE(storage_->WriteStaging(*session_, staging->arena, 2 * i, bytes).ok());
  }
  absl::optional<absl::Status> outcome;
  const TensorType type(DType::kF16, {kElements, 2});
  const absl::StatusOr<Storage::Bound> bound = storage_->Bind(
      *session_, Staged(staging->arena, 0, {1, 0}), type, DeviceIndex(0),
      /*stable=*/true, [&](Storage::Arrival, const absl::Status& status) { outcome = status; });
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(bound->arrival, Storage::Arrival::kLater);
  EXPECT_FALSE(outcome.has_value());
  // It goes on without the client.
  ASSERT_TRUE(storage_->ReleaseStaging(session_.get(), staging->arena).ok());
  while (!outcome.has_value()) {
    if (!launcher_->Drain([](const CompletionMessage&) {})) std::this_thread::yield();
  }
  EXPECT_TRUE(outcome->ok());
  const char* const bytes = bound->buffer->host();
  for (int64_t i = 0; i < 4 * kElements; ++i) {
    ASSERT_EQ(bytes[i], 1 + (i >> 22)) << i;
  }
}

// Few bytes, each of which stands in a page of its own, that may have to be made first.
TEST_F(StorageTest, WhatIsFarApartIsCopiedBesideTheNodeThread) {
  constexpr int64_t kPages = 1024;
  constexpr int64_t kPage = 4096;
  const absl::StatusOr<StagingArena> staging = CreateStaging(kPages * kPage);
  ASSERT_TRUE(staging.ok()) << staging.status();
  std::string expected(kPages, '\0');
  for (int64_t i = 0; i < kPages; i += 7) {
    expected[static_cast<size_t>(i)] = static_cast<char>(1 + i % 100);
    ASSERT_TRUE(storage_
                    ->WriteStaging(*session_, staging->arena, i * kPage,
                                   absl::string_view(&expected[static_cast<size_t>(i)], 1))
                    .ok());
  }
  absl::optional<absl::Status> outcome;
  const absl::StatusOr<Storage::Bound> bound =
      storage_->Bind(*session_, Staged(staging->arena, 0, {kPage}),
                     TensorType(DType::kU8, {kPages}), DeviceIndex(0), /*stable=*/true,
                     [&](Storage::Arrival, const absl::Status& status) { outcome = status; });
  ASSERT_TRUE(bound.ok()) << bound.status();
  ASSERT_EQ(bound->arrival, Storage::Arrival::kLater);
  while (!outcome.has_value()) {
    if (!launcher_->Drain([](const CompletionMessage&) {})) std::this_thread::yield();
  }
  EXPECT_EQ(std::string(bound->buffer->host(), kPages), expected);
}

TEST_F(StorageTest, InlineBytesAreAsManyAsTheTypeSays) {
  const TensorType two(DType::kF32, {2});
  const auto bound = Bind(Inline("abcdefgh"), two, /*stable=*/true);
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_EQ(std::memcmp(bound->buffer->host(), "abcdefgh", 8), 0);
  EXPECT_FALSE(Bind(Inline("abcdefg"), two, /*stable=*/true).ok());
  EXPECT_FALSE(Bind(Staged(ArenaId(99), 0), two, /*stable=*/true).ok());
}

TEST_F(StorageTest, ATenantsArenasAreItsOwn) {
  const absl::StatusOr<BufferRef> buffer =
      storage_->Allocate(session_->tenant.get(), DeviceIndex(0), 100);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  EXPECT_TRUE(storage_->ResultArenaFd(*session_, (*buffer)->arena()).ok());
  OpenSessionRequest open;
  open.tenant = "uid:2";
  const Session other(SessionId(2), open, storage_->TenantNamed("uid:2"),
                      {&timers_, &errors_, absl::Seconds(1)}, {8, 8}, {}, &news_);
  EXPECT_EQ(ErrorOf(storage_->ResultArenaFd(other, (*buffer)->arena()).status()).reason,
            Reason::kUnknownName);
  EXPECT_EQ(storage_->TenantNamed("uid:1"), session_->tenant);
}

// A thread that touches a page while its client takes it out waits for the client.
TEST_F(StorageTest, WhatAClientMayTakePagesOutOfIsNotTouched) {
  const absl::StatusOr<StagingArena> staging = CreateStaging(4096);
  ASSERT_TRUE(staging.ok()) << staging.status();
  const Binding source = Staged(staging->arena, 0);
  const TensorType two(DType::kF32, {2});
  EXPECT_TRUE(Bind(source, two, /*stable=*/true).ok()) << "no client has it";
  const std::shared_ptr<Arena> arena = *storage_->FindStaging(*session_, staging->arena);
  const int fd = *arena->ClientFd();
  const auto refused = [&] {
    const ExternalRange range = absl::get<ExternalRange>(source);
    return std::vector<Reason>{
        ErrorOf(Bind(source, two, /*stable=*/true).status()).reason,
        ErrorOf(storage_->FindStaged(*session_, range, 8).status()).reason,
        ErrorOf(storage_->FindTarget(session_.get(), range, two).status()).reason};
  };
  EXPECT_THAT(refused(), ::testing::Each(Reason::kWrongState));
  void* const mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  ASSERT_TRUE(SealMapped(fd));
  ASSERT_TRUE(arena->ConfirmMapped().ok());
  EXPECT_THAT(refused(), ::testing::Each(Reason::kUnspecified));
  // What a client has no call writes, sealed or not: the client writes its own mapping.
  EXPECT_EQ(ErrorOf(storage_->WriteStaging(*session_, staging->arena, 0, "x")).reason,
            Reason::kWrongState);
  munmap(mapped, 4096);
}

// Its sessions may come and go: what they have left in clients' hands is the tenant's.
TEST_F(StorageTest, PagesThatClientsKeepAreTheirTenantsUntilTheyLetGo) {
  const absl::StatusOr<StagingArena> staging = CreateStaging(1 << 20);
  ASSERT_TRUE(staging.ok()) << staging.status();
  const int client_fd = dup(*(*storage_->FindStaging(*session_, staging->arena))->ClientFd());
  ASSERT_TRUE(storage_->ReleaseStaging(session_.get(), staging->arena).ok());
  session_.reset();
  std::shared_ptr<Tenant> tenant = storage_->TenantNamed("uid:1");
  EXPECT_EQ(asked_, 1) << "its client to let go";
  EXPECT_EQ(tenant->budget->used(), 1 << 20);
  EXPECT_EQ(storage_->TenantNamed("uid:2")->budget->used(), 0);
  const absl::Time due = timers_.Next();
  ASSERT_LT(due, absl::InfiniteFuture()) << "somebody looks";
  timers_.Fire(due);
  EXPECT_EQ(tenant->budget->used(), 1 << 20);
  close(client_fd);
  timers_.Fire(timers_.Next());
  EXPECT_EQ(tenant->budget->used(), 0);
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture()) << "nothing is left to look at";
}

// As long as there are any; then those that the fewest have.
TEST_F(StorageTest, EachTenantHasALaneOfItsOwn) {
  std::vector<std::shared_ptr<Tenant>> tenants = {session_->tenant};
  std::set<int32_t> lanes = {session_->tenant->lane};
  while (tenants.size() < kMaxLanes) {
    tenants.push_back(storage_->TenantNamed(absl::StrCat("uid:", 10 + tenants.size())));
    EXPECT_TRUE(lanes.insert(tenants.back()->lane).second) << tenants.back()->lane;
  }
  EXPECT_EQ(*lanes.begin(), 0);
  EXPECT_EQ(*lanes.rbegin(), kMaxLanes - 1);
  const int32_t free_lane = tenants[5]->lane;
  tenants[5].reset();
  EXPECT_EQ((tenants[5] = storage_->TenantNamed("uid:5"))->lane, free_lane);
  lanes.clear();
  for (int more = 0; more < kMaxLanes; ++more) {
    tenants.push_back(storage_->TenantNamed(absl::StrCat("uid:", 100 + more)));
    EXPECT_TRUE(lanes.insert(tenants.back()->lane).second) << tenants.back()->lane;
  }
}

// What is given back after this is not unmapped until it is opened.
class Gate {
 public:
  Gate(HeldFiles* held, const BudgetRef& budget) {
    const UniqueFd memory(memfd_create("chorus-test", MFD_CLOEXEC));
    UniqueFd client = OpenAgain(memory.get(), O_RDWR);
    auto opened = std::make_shared<std::future<void>>(opened_.get_future());
    std::shared_ptr<const UniqueFd> file(new UniqueFd(OpenAgain(memory.get(), O_RDWR)),
                                         [opened](const UniqueFd* fd) {
                                           opened->wait();
                                           delete fd;
                                         });
    Charge bytes = *budget->Charge(Domain::kHost, Resource::kResultBytes, 1);
    Charge descriptors;
    held->Add(file, nullptr, &bytes, &descriptors);
    file.reset();
    client.Reset();
    held->Look(1);
    EXPECT_EQ(held->size(), 0u) << "it goes";
  }
  void Open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

TEST_F(StorageTest, StagingWaitsForMemoryThatIsOnItsWay) {
  Tenant* const tenant = session_->tenant.get();
  Gate gate(storage_->held(), budget_);
  ASSERT_TRUE(storage_->Allocate(tenant, DeviceIndex(0), 48 << 20).ok());  // and gives it back
  std::vector<absl::Status> made;
  storage_->CreateStaging(session_, 16 << 20, [&](const absl::StatusOr<StagingArena>& staging) {
    made.push_back(staging.status());
  });
  EXPECT_EQ(session_->budget->held(Resource::kWaits), 1);
  // Nobody waits for ever, but as long as nothing comes.
  const absl::Time start = clock_.now;
  for (clock_.now = timers_.Next(); clock_.now < start + Patience::kLongest / 2;
       clock_.now = timers_.Next()) {
    timers_.Fire(clock_.now);
  }
  EXPECT_TRUE(made.empty());
  gate.Open();
  const auto all = [&] {
    return tenant->budget->Charge(Domain::kHost, Resource::kResultBytes, tenant->budget->limit());
  };
  while (!all().ok()) std::this_thread::yield();
  clock_.now = timers_.Next();
  timers_.Fire(clock_.now);
  ASSERT_EQ(made.size(), 1u);
  EXPECT_TRUE(made[0].ok()) << made[0];
  EXPECT_EQ(session_->budget->held(Resource::kWaits), 0);
  EXPECT_EQ(tenant->budget->used(), 16 << 20);
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture());
}

TEST_F(StorageTest, ASessionThatEndsMeanwhileGetsNoStaging) {
  Gate gate(storage_->held(), budget_);
  ASSERT_TRUE(storage_->Allocate(session_->tenant.get(), DeviceIndex(0), 48 << 20).ok());
  absl::Status made;
  storage_->CreateStaging(session_, 16 << 20, [&](const absl::StatusOr<StagingArena>& staging) {
    made = staging.status();
  });
  session_->state = SessionState::kDead;
  gate.Open();
  while (made.ok()) {
    clock_.now = timers_.Next();
    timers_.Fire(clock_.now);
  }
  EXPECT_EQ(ErrorOf(made).reason, Reason::kSessionLost);
}

TEST_F(StorageTest, AtTheEndWhoWaitsForMemoryIsAnsweredAtOnce) {
  Gate gate(storage_->held(), budget_);
  ASSERT_TRUE(storage_->Allocate(session_->tenant.get(), DeviceIndex(0), 48 << 20).ok());
  std::vector<Reason> made;
  const auto note = [&](const absl::StatusOr<StagingArena>& staging) {
    made.push_back(ErrorOf(staging.status()).reason);
  };
  storage_->CreateStaging(session_, 16 << 20, note);
  EXPECT_TRUE(made.empty());
  storage_->StopWaiting();
  timers_.Fire(timers_.Next());
  EXPECT_THAT(made, ::testing::ElementsAre(Reason::kDraining));
  storage_->CreateStaging(session_, 16 << 20, note);
  EXPECT_THAT(made, ::testing::ElementsAre(Reason::kDraining, Reason::kDraining));
  storage_->CreateStaging(session_, 19 << 20, note);
  EXPECT_EQ(made.back(), Reason::kQuota) << "that would never be there";
  EXPECT_EQ(session_->budget->held(Resource::kWaits), 0);
  gate.Open();
}

TEST_F(StorageTest, ATensorIsReadWhenItIsThere) {
  const auto cell = std::make_shared<Cell>();
  cell->type = std::make_shared<TensorType>(TensorType(DType::kF32, {1}));
  TensorId id;
  id.slot = 1;
  id.generation = 1;
  session_->names.NameTensor(id, cell);
  std::vector<std::string> read;
  const auto note = [&read](const absl::StatusOr<ReadableTensor>& tensor) {
    read.push_back(tensor.ok() ? std::string(tensor->data, static_cast<size_t>(tensor->bytes))
                               : std::string(ReasonName(ErrorOf(tensor.status()).reason)));
  };
  const absl::Time start = absl::FromUnixSeconds(1000);
  storage_->ReadTensor(*session_, id, start + absl::Seconds(1), note);
  storage_->ReadTensor(*session_, id, start + absl::Seconds(9), note);
  timers_.Fire(start + absl::Seconds(1));
  EXPECT_THAT(read, ::testing::ElementsAre("TRANSPORT_TIMEOUT"));
  const TimerQueue::Id third = storage_->ReadTensor(*session_, id, start + absl::Seconds(9), note);
  timers_.Expire(third, start);
  timers_.Expire(third, start);
  EXPECT_THAT(read, ::testing::ElementsAre("TRANSPORT_TIMEOUT", "TRANSPORT_TIMEOUT"));
  cell->buffer = *storage_->Allocate(session_->tenant.get(), DeviceIndex(0), 4);
  std::memcpy(cell->buffer->host(), "abcd", 4);
  cell->bytes = 4;
  cell->state = Cell::State::kReady;
  cell->on_settled.Call(cell);
  EXPECT_THAT(read, ::testing::ElementsAre("TRANSPORT_TIMEOUT", "TRANSPORT_TIMEOUT", "abcd"));
  EXPECT_EQ(timers_.Next(), absl::InfiniteFuture());
}

// A reader has the tensor's bytes until it has done with them: so many at a time.
TEST_F(StorageTest, AReadIsGivenBackWithWhatWasReadOrByItsDeadline) {
  const auto there = std::make_shared<Cell>();
  there->type = std::make_shared<TensorType>(TensorType(DType::kF32, {1}));
  there->buffer = *storage_->Allocate(session_->tenant.get(), DeviceIndex(0), 4);
  there->bytes = 4;
  there->state = Cell::State::kReady;
  const auto late = std::make_shared<Cell>();
  session_->names.NameTensor({1, 1}, there);
  session_->names.NameTensor({2, 1}, late);
  const absl::Time start = absl::FromUnixSeconds(1000);
  std::vector<ReadableTensor> held;
  const auto read = [&](int32_t slot, absl::Duration patience) {
    const auto status = std::make_shared<absl::Status>();
    storage_->ReadTensor(*session_, {slot, 1}, start + patience,
                         [&held, status](absl::StatusOr<ReadableTensor> tensor) {
                           *status = tensor.status();
                           if (tensor.ok()) held.push_back(*std::move(tensor));
                         });
    return *status;
  };
  EXPECT_TRUE(read(1, absl::Hours(1)).ok());
  EXPECT_TRUE(read(2, absl::Seconds(5)).ok()) << "it waits";
  ASSERT_EQ(held.size(), 1u);
  const absl::Status refused = read(1, absl::Hours(1));
  EXPECT_EQ(ErrorOf(refused).reason, Reason::kQuota);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("holds 2 downloads of 2"));
  timers_.Fire(start + absl::Seconds(5));
  EXPECT_TRUE(read(1, absl::Hours(1)).ok());
  EXPECT_FALSE(read(1, absl::Hours(1)).ok());
  held.clear();
  EXPECT_TRUE(read(1, absl::Hours(1)).ok());
  EXPECT_EQ(budget_->held(Resource::kDownloads), 1);
  ASSERT_EQ(held.size(), 1u);
  EXPECT_EQ(budget_->held(Resource::kTransferBytes), 2 * held[0].bytes);
}

// Of devices that another process has.
class FarStorageTest : public StorageTest {
 protected:
  FarStorageTest() : StorageTest(Start()) {
    far_ = static_cast<worker::WorkerDevices*>(devices_.get());
    options_.max_staging_bytes = budget_->limit();
  }
  // It may have been stopped.
  ~FarStorageTest() override { KillWorker(); }

  static std::unique_ptr<Devices> Start() {
    worker::WorkerOptions options;
    options.command = {"core/worker/testing/sim_worker"};
    options.kill_timeout = absl::Seconds(60);
    auto devices = worker::WorkerDevices::Start(std::move(options));
    EXPECT_TRUE(devices.ok()) << devices.status();
    return *std::move(devices);
  }
  // The first bytes of the staging arena as a tensor.
  void Upload(int64_t bytes) {
    // As much as Commands::Create keeps until its tensor is there.
    const std::array<int64_t, 6> kept = {};
    const auto arrived = [this, kept](Storage::Arrival, const absl::Status& status) {
      static_cast<void>(kept);
      ++(status.ok() ? arrived_ : failed_);
    };
    absl::StatusOr<Storage::Bound> bound =
        storage_->Bind(*session_, Staged(arena_, 0), TensorType(DType::kU8, {bytes}),
                       DeviceIndex(0), /*stable=*/true, arrived);
    ASSERT_TRUE(bound.ok()) << bound.status();
    EXPECT_EQ(bound->arrival, Storage::Arrival::kInOrder);
    bounds_.push_back(*std::move(bound));
  }
  // The worker takes nothing more, and what is sent to it waits behind an upload.
  void Stall() {
    const absl::StatusOr<StagingArena> staging = CreateStaging(kStagedBytes);
    ASSERT_TRUE(staging.ok()) << staging.status();
    arena_ = staging->arena;
    ASSERT_EQ(kill(far_->pid(), SIGSTOP), 0);
    siginfo_t stopped = {};
    ASSERT_EQ(waitid(P_PID, static_cast<id_t>(far_->pid()), &stopped, WSTOPPED | WNOWAIT), 0);
    Upload(kStagedBytes);
  }
  void KillWorker() {
    const pid_t pid = far_->pid();
    if (pid > 0) kill(pid, SIGKILL);
  }
  void AwaitUploads(int count) {
    while (arrived_ + failed_ < count) {
      if (!launcher_->Drain([](const CompletionMessage&) {})) std::this_thread::yield();
    }
  }

  static constexpr int64_t kStagedBytes = int64_t{9} << 20;  // more than the worker's window has
  worker::WorkerDevices* far_ = nullptr;
  ArenaId arena_;
  std::vector<Storage::Bound> bounds_;
  int arrived_ = 0;
  int failed_ = 0;
};

TEST_F(FarStorageTest, AnUploadThatWaitsTakesNoMoreThanItsBufferIsChargedFor) {
  constexpr int kUploads = 10000;
  constexpr int64_t kBlock = 16;  // of each, for the allocator
  bounds_.reserve(1 + kUploads);
  const int64_t before = budget_->used();
  Stall();
  const int64_t used = budget_->used();
  const HeapUse heap;
  int64_t bytes = 0;
  for (int i = 0; i < kUploads; ++i) {
    Upload(4);
    bytes = heap.bytes() + kBlock * heap.blocks();
    ASSERT_LE(bytes, budget_->used() - used) << i;
  }
  RecordProperty("bytes_of_upload", std::to_string(bytes / kUploads));
  const int64_t charged = budget_->used();
  ASSERT_EQ(kill(far_->pid(), SIGCONT), 0);
  AwaitUploads(1 + kUploads);
  EXPECT_EQ(failed_, 0);
  EXPECT_EQ(budget_->used(), charged) << "as long as the tensors are there";
  KillWorker();  // nothing is freed there behind copies, of which ThreadSanitizer sees no end
  bounds_.clear();
  EXPECT_EQ(budget_->used(), before + kStagedBytes);
}

TEST_F(FarStorageTest, UploadsThatEndWithTheWorkerAreNotChargedAnyMore) {
  constexpr int kUploads = 1000;
  Stall();
  const int64_t used = budget_->used();
  for (int i = 0; i < kUploads; ++i) Upload(4);
  KillWorker();
  AwaitUploads(1 + kUploads);
  EXPECT_EQ(failed_, 1 + kUploads);
  bounds_.resize(1);
  EXPECT_EQ(budget_->used(), used);
  EXPECT_EQ(budget_->leaving(), 0) << "nobody is told that they have gone";
}

// Their rows wait for the worker, and whoever wants their place waits for them.
TEST_F(FarStorageTest, BuffersLeaveUntilTheWorkerHasBeenToldThatTheyHaveGone) {
  constexpr int kBuffers = 20000;
  std::vector<BufferRef> buffers;
  for (int i = 0; i < kBuffers; ++i) {
    buffers.push_back(*storage_->Allocate(session_->tenant.get(), DeviceIndex(0), 4));
  }
  Stall();
  const int64_t used = budget_->used();
  buffers.clear();
  constexpr int64_t kRows = kBuffers * DeviceSet::kBytesPerBuffer;
  EXPECT_EQ(budget_->used(), used - kRows - kBuffers * 4);
  EXPECT_EQ(budget_->leaving(), kRows);
  absl::optional<absl::Status> status;
  // Nearly all that is free.
  const int64_t free_bytes = session_->tenant->budget->limit() - budget_->used() - (1 << 20);
  storage_->CreateStaging(session_, free_bytes, [&](const absl::StatusOr<StagingArena>& made) {
    status = made.status();
  });
  const auto ask_again = [this] {
    clock_.now = timers_.Next();
    timers_.Fire(clock_.now);
  };
  ask_again();
  EXPECT_FALSE(status.has_value());
  ASSERT_EQ(kill(far_->pid(), SIGCONT), 0);
  while (far_->freed() < kBuffers) std::this_thread::yield();
  ask_again();
  ASSERT_TRUE(status.has_value());
  EXPECT_TRUE(status->ok()) << *status;
  EXPECT_EQ(budget_->leaving(), 0);
  AwaitUploads(1);
}

}  // namespace
}  // namespace chorus::node
