#include "core/runtime/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/mutex.h"
#include "core/runtime/size_class.h"

namespace chorus {
namespace {

// Linux 5.14; older C libraries do not name it.
constexpr int kPopulateWrite = 23;
// Touching stops between pieces when nobody else needs the memory any more.
constexpr int64_t kTouchBytes = int64_t{4} << 20;
constexpr int64_t kLargestBytes = SizeClass::kLargestBytes;

int64_t PageBytes() {
  static const int64_t bytes = sysconf(_SC_PAGESIZE);
  return bytes;
}

int64_t RoundUp(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

absl::Status OutOfMemory(absl::string_view what, int64_t bytes, int error) {
  return MakeError(Reason::kOutOfMemory, absl::StrCat("the kernel gives no arena of ", bytes,
                                                      " bytes: ", what, ": ", strerror(error)));
}

// Arenas are named once for the process, so that an id alone tells a client what to map.
ArenaIds& IdsOfArenas() {
  static auto* const ids = new ArenaIds();
  return *ids;
}

// Another descriptor of the same file, which counts as an opener of its own.
UniqueFd Reopen(int fd, int flags) {
  return UniqueFd(open(absl::StrCat("/proc/self/fd/", fd).c_str(), flags | O_CLOEXEC));
}

}  // namespace

// --- ArenaIds ---

ArenaId ArenaIds::Take() {
  MutexLock lock(&mutex_);
  do {
    last_ = last_ == most_ ? 1 : last_ + 1;
  } while (!taken_.insert(last_).second);
  return ArenaId(last_);
}

void ArenaIds::Free(ArenaId id) {
  MutexLock lock(&mutex_);
  taken_.erase(id.value());
}

// --- Arena ---

ArenaMemory::~ArenaMemory() { munmap(data_, static_cast<size_t>(bytes_)); }

void ArenaMemory::Touch(int64_t offset, int64_t bytes) const {
  if (madvise(data_ + offset, static_cast<size_t>(bytes), kPopulateWrite) == 0) return;
  // An older kernel: this gives the file its pages, and leaves only the cheap faults.
  while (fallocate(fd_.get(), 0, offset, bytes) != 0 && errno == EINTR) {
  }
}

bool ArenaMemory::IsHeldByOthers() const {
  // An opener that comes while we have the lease would break it, with a signal whose default is to
  // end the process. SIGURG's is to be ignored.
  fcntl(fd_.get(), F_SETSIG, SIGURG);
  if (fcntl(fd_.get(), F_SETLEASE, F_WRLCK) != 0) return errno == EAGAIN;
  fcntl(fd_.get(), F_SETLEASE, F_UNLCK);
  return false;
}

Arena::Arena(Charge bytes, Charge descriptor, const ArenaHelpers& helpers, Kind kind,
             std::shared_ptr<const ArenaMemory> memory)
    : charged_bytes_(std::move(bytes)),
      charged_descriptor_(std::move(descriptor)),
      helpers_(helpers),
      kind_(kind),
      id_(IdsOfArenas().Take()),
      memory_(std::move(memory)) {}

Arena::~Arena() {
  IdsOfArenas().Free(id_);
  const bool handed_out = client_fd_.valid();
  client_fd_.Reset();
  if (handed_out && helpers_.held != nullptr && memory_->IsHeldByOthers()) {
    helpers_.held->Add(std::move(memory_), std::move(charged_bytes_),
                       std::move(charged_descriptor_), helpers_.thread);
  } else if (helpers_.thread != nullptr) {
    helpers_.thread->Dispose(std::move(memory_));
  }
}

absl::StatusOr<int> Arena::ClientFd() {
  if (!client_fd_.valid()) {
    client_fd_ = Reopen(fd(), kind_ == Kind::kStaging ? O_RDWR : O_RDONLY);
    if (!client_fd_.valid()) {
      return MakeError(Reason::kQuota, absl::StrCat("no descriptor for arena ", id_.value(), ": ",
                                                    strerror(errno)));
    }
  }
  return client_fd_.get();
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::Create(const BudgetRef& budget, int64_t bytes,
                                                     const ArenaHelpers& helpers, Kind kind) {
  if (bytes <= 0 || bytes > kLargestBytes) {
    return Malformed(absl::StrCat("an arena has 1 to ", kLargestBytes, " bytes, not ", bytes));
  }
  bytes = RoundUp(bytes, PageBytes());
  const Resource resource =
      kind == Kind::kStaging ? Resource::kStagingBytes : Resource::kResultBytes;
  CHORUS_ASSIGN_OR_RETURN(Charge charged, budget->Charge(Domain::kHost, resource, bytes));
  // The arena's own, and its clients'.
  CHORUS_ASSIGN_OR_RETURN(Charge descriptors,
                          budget->Charge(Domain::kHost, Resource::kDescriptors, 2));
  const char* const name = kind == Kind::kStaging ? "chorus-staging" : "chorus-result";
  const UniqueFd made(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.valid()) return OutOfMemory("memfd_create", bytes, errno);
  if (ftruncate(made.get(), bytes) != 0) return OutOfMemory("ftruncate", bytes, errno);
  UniqueFd fd = Reopen(made.get(), O_RDWR);
  if (!fd.valid()) return OutOfMemory("open(/proc/self/fd)", bytes, errno);
  // Mapped before it is sealed: FUTURE_WRITE forbids writable mappings from then on.
  const int protection = kind == Kind::kStaging ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const data = mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return OutOfMemory("mmap", bytes, errno);
  const int file = fd.get();
  auto memory = std::make_shared<const ArenaMemory>(std::move(fd), static_cast<char*>(data), bytes);
  const int seals = kind == Kind::kStaging
                        ? F_SEAL_SHRINK | F_SEAL_GROW
                        : F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (fcntl(file, F_ADD_SEALS, seals) != 0) {
    return OutOfMemory("fcntl(F_ADD_SEALS)", bytes, errno);
  }
  return std::shared_ptr<Arena>(
      new Arena(std::move(charged), std::move(descriptors), helpers, kind, std::move(memory)));
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::CreateStaging(const BudgetRef& budget, int64_t bytes,
                                                            const ArenaHelpers& helpers) {
  return Create(budget, bytes, helpers, Kind::kStaging);
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::CreateResult(const BudgetRef& budget, int64_t bytes,
                                                           const ArenaHelpers& helpers) {
  return Create(budget, bytes, helpers, Kind::kResult);
}

absl::Status Arena::ConfirmMapped() {
  if (kind_ != Kind::kStaging || confirmed_) return absl::OkStatus();
  if (fcntl(fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0) {
    return Malformed(absl::StrCat("staging arena ", id_.value(), " cannot be sealed: ",
                                  strerror(errno), "; its client has sealed it otherwise"));
  }
  confirmed_ = true;
  return absl::OkStatus();
}

// --- HeldArenas ---

void HeldArenas::Add(std::shared_ptr<const ArenaMemory> memory, Charge bytes, Charge descriptor,
                     MemoryThread* thread) {
  bytes_ += bytes.amount();
  held_.push_back({std::move(memory), std::move(bytes), std::move(descriptor), thread});
  if (added_ != nullptr) added_();
}

void HeldArenas::Look(size_t count) {
  for (count = std::min(count, held_.size()); count > 0; --count) {
    Held next = std::move(held_.front());
    held_.pop_front();
    if (next.memory->IsHeldByOthers()) {
      held_.push_back(std::move(next));
      continue;
    }
    bytes_ -= next.bytes.amount();
    if (next.thread != nullptr) next.thread->Dispose(std::move(next.memory));
  }
}

// --- Buffer ---

// The home of ranges of staging arenas: each is made for one use and deleted after it.
class StagingHome final : public BufferHome {
 public:
  static StagingHome* Get() {
    static StagingHome home;
    return &home;
  }
  BufferRef Make(std::shared_ptr<Arena> arena, int64_t offset, int64_t bytes,
                 BufferRef (*adopt)(Buffer*)) {
    auto* const buffer = new Buffer;
    buffer->home_ = this;
    buffer->address_ = reinterpret_cast<DeviceAddress>(arena->data() + offset);
    buffer->offset_ = offset;
    buffer->bytes_ = bytes;
    buffer->references_ = 1;
    buffer->arena_ = arena->id();
    buffer->state_ = Buffer::State::kStaging;
    buffer->keep_ = std::move(arena);
    return adopt(buffer);
  }
  void Return(Buffer* buffer) override { delete buffer; }
};

absl::StatusOr<BufferRef> Buffer::OfStaging(std::shared_ptr<Arena> arena, int64_t offset,
                                            int64_t bytes) {
  if (arena->kind() != Arena::Kind::kStaging) {
    return Malformed(absl::StrCat("arena ", arena->id().value(), " is not a staging arena"));
  }
  if (offset < 0 || bytes < 0 || bytes > arena->bytes() || offset > arena->bytes() - bytes) {
    return Malformed(absl::StrCat("staging arena ", arena->id().value(), " has ", arena->bytes(),
                                  " bytes; the range of ", bytes, " at ", offset,
                                  " is not inside it"));
  }
  return StagingHome::Get()->Make(std::move(arena), offset, bytes, [](Buffer* buffer) {
    return BufferRef(buffer, BufferRef::Adopt());
  });
}

// --- ArenaSet ---

ArenaSet::Ptr ArenaSet::Create(BudgetRef budget, const ArenaSetOptions& options) {
  return Ptr(new ArenaSet(std::move(budget), options));
}

ArenaSet::ArenaSet(BudgetRef budget, const ArenaSetOptions& options)
    : budget_(std::move(budget)), options_(options) {
  budget_->Reclaim(this, [this] { Trim(); });
}

ArenaSet::~ArenaSet() { budget_->Forget(this); }

void ArenaSet::Leave() {
  orphaned_ = true;
  if (live_ == 0) {
    delete this;
  } else {
    Trim();
  }
}

absl::StatusOr<BufferRef> ArenaSet::Allocate(int64_t bytes) {
  if (bytes < 0 || bytes > kLargestBytes) {
    return Malformed(absl::StrCat("a buffer has 0 to ", kLargestBytes, " bytes, not ", bytes));
  }
  const SizeClass size_class = SizeClass::Of(bytes);
  Buffer* buffer = free_[size_class.index];
  if (buffer != nullptr) {
    free_[size_class.index] = buffer->next_free_;
    buffer->next_free_ = nullptr;
  } else {
    CHORUS_ASSIGN_OR_RETURN(buffer, Grow(size_class.index, size_class.bytes));
  }
  buffer->bytes_ = bytes;
  buffer->references_ = 1;
  buffer->state_ = Buffer::State::kResult;
  ++static_cast<Block*>(buffer->owner_)->live;
  ++live_;
  return BufferRef(buffer, BufferRef::Adopt());
}

absl::StatusOr<Buffer*> ArenaSet::Grow(int size_class, int64_t class_bytes) {
  const int64_t alignment = class_bytes >= 8 * PageBytes() ? PageBytes() : 64;
  const auto fits = [&](const Block* block) {
    return block != nullptr &&
           RoundUp(block->used, alignment) + class_bytes <= block->arena->bytes();
  };
  if (!fits(current_) && fits(spare_)) current_ = std::exchange(spare_, nullptr);
  if (!fits(current_)) {
    const int64_t next = NextArenaBytes();
    if (class_bytes > next / 4) {
      CHORUS_ASSIGN_OR_RETURN(Block * own, AddBlock(class_bytes, false));
      return Cut(own, size_class, class_bytes);
    }
    absl::StatusOr<Block*> added = AddBlock(next, true);
    // Where a generous arena does not fit any more, one for this buffer alone may.
    if (!added.ok()) {
      CHORUS_ASSIGN_OR_RETURN(Block * own, AddBlock(class_bytes, false));
      return Cut(own, size_class, class_bytes);
    }
    current_ = *added;
  }
  Buffer* const buffer = Cut(current_, size_class, class_bytes);
  // The next arena is made while this one is in use, so that it has been touched when its turn
  // comes. Without a thread that would only be early, and a full budget is not for guesses.
  if (options_.helpers.thread != nullptr && spare_ == nullptr &&
      current_->used > current_->arena->bytes() / 2) {
    const int64_t next = NextArenaBytes();
    if (next <= (budget_->limit() - budget_->used()) / 2) {
      absl::StatusOr<Block*> spare = AddBlock(next, true);
      if (spare.ok()) spare_ = *spare;
    }
  }
  return buffer;
}

int64_t ArenaSet::NextArenaBytes() const {
  return std::min(std::max(options_.first_arena_bytes, growing_bytes_),
                  options_.largest_arena_bytes);
}

absl::StatusOr<ArenaSet::Block*> ArenaSet::AddBlock(int64_t bytes, bool shared) {
  CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena,
                          Arena::CreateResult(budget_, bytes, options_.helpers));
  if (options_.helpers.thread != nullptr) {
    options_.helpers.thread->Touch(arena->memory());
  } else {
    arena->memory()->Touch(0, arena->bytes());
  }
  auto block = std::make_unique<Block>();
  arena_bytes_ += arena->bytes();
  block->grows = shared || bytes <= options_.largest_arena_bytes / 4;
  if (block->grows) growing_bytes_ += arena->bytes();
  block->arena = std::move(arena);
  blocks_.push_back(std::move(block));
  return blocks_.back().get();
}

Buffer* ArenaSet::Cut(Block* block, int size_class, int64_t class_bytes) {
  const int64_t alignment = class_bytes >= 8 * PageBytes() ? PageBytes() : 64;
  const int64_t offset = RoundUp(block->used, alignment);
  block->used = offset + class_bytes;
  block->buffers.emplace_back();
  Buffer* const buffer = &block->buffers.back();
  buffer->home_ = this;
  buffer->address_ = reinterpret_cast<DeviceAddress>(block->arena->data() + offset);
  buffer->offset_ = offset;
  buffer->arena_ = block->arena->id();
  buffer->size_class_ = static_cast<uint16_t>(size_class);
  buffer->owner_ = block;
  return buffer;
}

void ArenaSet::Return(Buffer* buffer) {
  auto* const block = static_cast<Block*>(buffer->owner_);
  buffer->next_free_ = free_[buffer->size_class_];
  free_[buffer->size_class_] = buffer;
  --block->live;
  --live_;
  if (!orphaned_) return;
  if (live_ == 0) {
    delete this;
  } else if (block->live == 0) {
    Trim();
  }
}

int64_t ArenaSet::Trim() {
  bool any = false;
  for (const auto& block : blocks_) any |= block->live == 0;
  if (!any) return 0;
  for (Buffer*& head : free_) {
    Buffer** link = &head;
    while (*link != nullptr) {
      if (static_cast<Block*>((*link)->owner_)->live == 0) {
        *link = (*link)->next_free_;
      } else {
        link = &(*link)->next_free_;
      }
    }
  }
  int64_t given_back = 0;
  auto kept = blocks_.begin();
  for (auto& block : blocks_) {
    if (block->live == 0) {
      given_back += block->arena->bytes();
      if (block->grows) growing_bytes_ -= block->arena->bytes();
      if (block.get() == current_) current_ = nullptr;
      if (block.get() == spare_) spare_ = nullptr;
      block.reset();
    } else {
      *kept++ = std::move(block);
    }
  }
  blocks_.erase(kept, blocks_.end());
  arena_bytes_ -= given_back;
  return given_back;
}

Arena* ArenaSet::Find(ArenaId id) const {
  for (const auto& block : blocks_) {
    if (block->arena->id() == id) return block->arena.get();
  }
  return nullptr;
}

// --- DeviceSet ---

absl::StatusOr<BufferRef> DeviceSet::Allocate(const BudgetRef& budget, int64_t bytes) {
  if (bytes < 0 || bytes > kLargestBytes) {
    return Malformed(absl::StrCat("a buffer has 0 to ", kLargestBytes, " bytes, not ", bytes));
  }
  CHORUS_ASSIGN_OR_RETURN(Charge charge,
                          budget->Charge(Domain::kHost, Resource::kResultBytes, bytes));
  DeviceAddress address = 0;
  if (bytes > 0) {
    CHORUS_ASSIGN_OR_RETURN(address, device_->Allocate(bytes));
  }
  auto* const buffer = new Buffer;
  buffer->home_ = this;
  buffer->address_ = address;
  buffer->bytes_ = bytes;
  buffer->references_ = 1;
  buffer->charge_ = std::move(charge);
  ++live_;
  return BufferRef(buffer, BufferRef::Adopt());
}

void DeviceSet::Return(Buffer* buffer) {
  if (buffer->address_ != 0) device_->Free(buffer->address_);
  --live_;
  delete buffer;
}

// --- MemoryThread ---

struct MemoryThread::State {
  struct Job {
    std::shared_ptr<const ArenaMemory> memory;
    bool touch = false;
  };

  // Its own reference is the last one when the arena is gone: then touching is in vain.
  void Do(Job job) {
    if (!job.touch) return;
    for (int64_t at = 0; at < job.memory->bytes() && job.memory.use_count() > 1;
         at += kTouchBytes) {
      job.memory->Touch(at, std::min(kTouchBytes, job.memory->bytes() - at));
    }
  }

  void Loop() {
    while (true) {
      Job job;
      {
        MutexLock lock(&mutex);
        while (jobs.empty() && !stop) changed.Wait(&mutex);
        if (jobs.empty()) return;
        job = std::move(jobs.front());
        jobs.pop_front();
        busy = true;
      }
      Do(std::move(job));
      MutexLock lock(&mutex);
      busy = false;
      changed.SignalAll();
    }
  }

  void Add(Job job) {
    MutexLock lock(&mutex);
    jobs.push_back(std::move(job));
    changed.SignalAll();
  }

  Mutex mutex;
  CondVar changed;
  std::deque<Job> jobs ABSL_GUARDED_BY(mutex);
  bool busy ABSL_GUARDED_BY(mutex) = false;
  bool stop ABSL_GUARDED_BY(mutex) = false;
  std::thread thread;
};

MemoryThread::MemoryThread() : state_(new State) {
  state_->thread = std::thread([state = state_.get()] { state->Loop(); });
}

MemoryThread::~MemoryThread() {
  {
    MutexLock lock(&state_->mutex);
    state_->stop = true;
    state_->changed.SignalAll();
  }
  state_->thread.join();
}

void MemoryThread::Touch(std::shared_ptr<const ArenaMemory> memory) {
  state_->Add({std::move(memory), true});
}

void MemoryThread::Dispose(std::shared_ptr<const ArenaMemory> memory) {
  state_->Add({std::move(memory), false});
}

void MemoryThread::Drain() {
  MutexLock lock(&state_->mutex);
  while (!state_->jobs.empty() || state_->busy) state_->changed.Wait(&state_->mutex);
}

}  // namespace chorus
