#include "core/runtime/memory.h"

#include <errno.h>
#include <fcntl.h>
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

}  // namespace

// --- MemoryBudget ---

absl::Status MemoryBudget::Charge(int64_t bytes) {
  if (bytes > limit_ - used_) {
    for (ArenaSet* set : sets_) {
      if (bytes <= limit_ - used_) break;
      set->Trim();
    }
  }
  if (bytes > limit_ - used_) {
    return MakeError(Reason::kOutOfMemory,
                     absl::StrCat("out of memory: ", bytes, " bytes are needed, ", limit_ - used_,
                                  " of the daemon's ", limit_, " are free"));
  }
  used_ += bytes;
  return absl::OkStatus();
}

// --- Arena ---

ArenaMemory::~ArenaMemory() {
  munmap(data_, static_cast<size_t>(bytes_));
  close(fd_);
}

void ArenaMemory::Touch(int64_t offset, int64_t bytes) const {
  if (madvise(data_ + offset, static_cast<size_t>(bytes), kPopulateWrite) == 0) return;
  // An older kernel: this gives the file its pages, and leaves only the cheap faults.
  while (fallocate(fd_, 0, offset, bytes) != 0 && errno == EINTR) {
  }
}

Arena::Arena(MemoryBudget* budget, MemoryThread* thread, Kind kind,
             std::shared_ptr<const ArenaMemory> memory)
    : budget_(budget),
      thread_(thread),
      kind_(kind),
      id_(budget->NextArenaId()),
      memory_(std::move(memory)) {}

Arena::~Arena() {
  budget_->Refund(bytes());
  if (thread_ != nullptr) thread_->Dispose(std::move(memory_));
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::Create(MemoryBudget* budget, int64_t bytes,
                                                     MemoryThread* thread, Kind kind) {
  if (bytes <= 0 || bytes > kLargestBytes) {
    return Malformed(absl::StrCat("an arena has 1 to ", kLargestBytes, " bytes, not ", bytes));
  }
  bytes = RoundUp(bytes, PageBytes());
  CHORUS_RETURN_IF_ERROR(budget->Charge(bytes));
  const char* const name = kind == Kind::kStaging ? "chorus-staging" : "chorus-result";
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) {
    const int error = errno;
    budget->Refund(bytes);
    return OutOfMemory("memfd_create", bytes, error);
  }
  const char* failed = nullptr;
  void* data = MAP_FAILED;
  if (ftruncate(fd, bytes) != 0) {
    failed = "ftruncate";
  } else {
    // Mapped before it is sealed: FUTURE_WRITE forbids writable mappings from then on.
    const int protection = kind == Kind::kStaging ? PROT_READ : PROT_READ | PROT_WRITE;
    data = mmap(nullptr, static_cast<size_t>(bytes), protection, MAP_SHARED, fd, 0);
    const int seals = kind == Kind::kStaging
                          ? F_SEAL_SHRINK | F_SEAL_GROW
                          : F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    if (data == MAP_FAILED) {
      failed = "mmap";
    } else if (fcntl(fd, F_ADD_SEALS, seals) != 0) {
      failed = "fcntl(F_ADD_SEALS)";
    }
  }
  if (failed != nullptr) {
    const int error = errno;
    if (data != MAP_FAILED) munmap(data, static_cast<size_t>(bytes));
    close(fd);
    budget->Refund(bytes);
    return OutOfMemory(failed, bytes, error);
  }
  auto memory = std::make_shared<const ArenaMemory>(fd, static_cast<char*>(data), bytes);
  return std::shared_ptr<Arena>(new Arena(budget, thread, kind, std::move(memory)));
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::CreateStaging(MemoryBudget* budget, int64_t bytes,
                                                            MemoryThread* thread) {
  return Create(budget, bytes, thread, Kind::kStaging);
}

absl::StatusOr<std::shared_ptr<Arena>> Arena::CreateResult(MemoryBudget* budget, int64_t bytes,
                                                           MemoryThread* thread) {
  return Create(budget, bytes, thread, Kind::kResult);
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

ArenaSet::Ptr ArenaSet::Create(MemoryBudget* budget, const ArenaSetOptions& options) {
  return Ptr(new ArenaSet(budget, options));
}

ArenaSet::ArenaSet(MemoryBudget* budget, const ArenaSetOptions& options)
    : budget_(budget), options_(options) {
  budget_->sets_.push_back(this);
}

ArenaSet::~ArenaSet() {
  auto& sets = budget_->sets_;
  sets.erase(std::find(sets.begin(), sets.end(), this));
}

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
  if (options_.thread != nullptr && spare_ == nullptr &&
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
                          Arena::CreateResult(budget_, bytes, options_.thread));
  if (options_.thread != nullptr) {
    options_.thread->Touch(arena->memory());
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

const Arena* ArenaSet::Find(ArenaId id) const {
  for (const auto& block : blocks_) {
    if (block->arena->id() == id) return block->arena.get();
  }
  return nullptr;
}

// --- DeviceSet ---

absl::StatusOr<BufferRef> DeviceSet::Allocate(int64_t bytes) {
  if (bytes < 0 || bytes > kLargestBytes) {
    return Malformed(absl::StrCat("a buffer has 0 to ", kLargestBytes, " bytes, not ", bytes));
  }
  CHORUS_RETURN_IF_ERROR(budget_->Charge(bytes));
  DeviceAddress address = 0;
  if (bytes > 0) {
    absl::StatusOr<DeviceAddress> allocated = device_->Allocate(bytes);
    if (!allocated.ok()) {
      budget_->Refund(bytes);
      return allocated.status();
    }
    address = *allocated;
  }
  auto* const buffer = new Buffer;
  buffer->home_ = this;
  buffer->address_ = address;
  buffer->bytes_ = bytes;
  buffer->references_ = 1;
  ++live_;
  return BufferRef(buffer, BufferRef::Adopt());
}

void DeviceSet::Return(Buffer* buffer) {
  if (buffer->address_ != 0) device_->Free(buffer->address_);
  budget_->Refund(buffer->bytes_);
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
