#include "core/node/rings.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/shared_file.h"
#include "core/base/work.h"
#include "core/runtime/memory_guard.h"

namespace chorus::node {
namespace {

// Taken from one ring before the next is looked at: a long frame, such as a release of thousands of
// names, takes as long as many short ones.
constexpr size_t kBytesPerTurn = 4 << 10;

// Whether there is something to go on with, or a frame that may be taken.
bool WantsTurn(const Session& session) {
  if (session.goes_on != nullptr) return true;
  return !session.log.parked() && session.ring != nullptr && session.ring->HasFrame();
}

// For a session whose bytes cannot be believed any more; no other session is concerned.
std::string EndedFor(const absl::Status& malformed) {
  return absl::StrCat("its session was ended for malformed bytes (", ErrorOf(malformed).message,
                      ")");
}

}  // namespace

Rings::Rings(const NodeOptions* options, HeldFiles* held, Take take, End end)
    : options_(options),
      held_(held),
      take_(std::move(take)),
      end_(std::move(end)),
      doorbell_(*Doorbell::Create()),  // one page: without it there is no daemon
      wake_epoll_(epoll_create1(EPOLL_CLOEXEC)) {}

absl::StatusOr<SessionDescriptors> Rings::Attach(const std::shared_ptr<Session>& session) {
  if (session->memory == nullptr) {
    SessionMemoryOptions layout;
    layout.tensor_slots = static_cast<uint32_t>(options_->max_tensors);
    CHORUS_ASSIGN_OR_RETURN(
        Charge bytes,
        session->budget->Charge(Domain::kHost, Resource::kSessionBytes,
                                static_cast<int64_t>(SessionMemory::TotalBytes(layout))));
    CHORUS_ASSIGN_OR_RETURN(  // its file, the client's descriptor of it, its wake-up
        Charge descriptors, session->budget->Charge(Domain::kHost, Resource::kDescriptors, 3));
    if (options_->memory_guard != nullptr) {
      const int64_t others_bytes = session->budget->charged_in_all() - bytes.amount();
      CHORUS_RETURN_IF_ERROR(
          options_->memory_guard->Admit(bytes.amount(), /*untouched=*/0, others_bytes));
    }
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<SessionMemory> memory, CreateSessionMemory(layout));
    auto file = std::make_shared<const UniqueFd>(memory->TakeFd());
    UniqueFd client = OpenAgain(file->get(), O_RDWR);
    if (!client.valid()) {
      return MakeError(Reason::kQuota,
                       absl::StrCat("no descriptor for the session's memory: ", strerror(errno)));
    }
    CHORUS_ASSIGN_OR_RETURN(UniqueFd wake, CreateWakeEvent());
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;  // the ring tells what there is, not the count
    event.data.u64 = static_cast<uint64_t>(session->id.value());
    if (epoll_ctl(wake_epoll_.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
      return MakeError(Reason::kQuota,
                       absl::StrCat("no descriptor for the session's wake-up: ", strerror(errno)));
    }
    session->memory_bytes = std::move(bytes);
    session->memory_descriptors = std::move(descriptors);
    session->memory = std::move(memory);
    session->memory_file = std::move(file);
    session->client_fd = std::move(client);
    session->wake_fd = std::move(wake);
    SubmissionRingReader(session->memory.get()).StopLooking();  // while nobody else has it
  }
  SessionDescriptors descriptors;
  descriptors.memory_fd = session->client_fd.get();
  descriptors.wake_fd = session->wake_fd.get();
  return descriptors;
}

absl::Status Rings::Confirm(const std::shared_ptr<Session>& session) {
  if (session->memory == nullptr) {
    return MakeError(Reason::kWrongState, "the session's memory was not asked for");
  }
  if (session->ring != nullptr) return absl::OkStatus();
  if (!IsSealedMapped(session->memory_file->get())) {
    return Malformed(
        "the session's memory: expected the seals FUTURE_WRITE and SEAL, which its client adds "
        "when "
        "it has mapped it; not all are there");
  }
  session->ring = std::make_unique<SubmissionRingReader>(session->memory.get());
  session->completions.Attach(session->memory.get());
  if (session->ring->StopLooking()) {
    quiet_.emplace(session->id, session);
  } else if (std::find(active_.begin(), active_.end(), session) == active_.end()) {
    active_.push_back(session);
  }
  return absl::OkStatus();
}

void Rings::Detach(Session* session) {
  active_.erase(
      std::remove_if(active_.begin(), active_.end(),
                     [&](const std::shared_ptr<Session>& other) { return other.get() == session; }),
      active_.end());
  std::replace(waiting_.begin(), waiting_.end(), session, static_cast<Session*>(nullptr));
  session->goes_on = nullptr;
  if (session->memory == nullptr) return;
  quiet_.erase(session->id);
  epoll_ctl(wake_epoll_.get(), EPOLL_CTL_DEL, session->wake_fd.get(), nullptr);
  session->completions.Detach();
  // Of memory that was never confirmed.
  const bool may_change = session->ring == nullptr;
  session->ring.reset();
  const std::shared_ptr<const SessionMemory> memory = std::move(session->memory);
  session->wake_fd = UniqueFd();
  session->client_fd = UniqueFd();
  held_->Add(session->memory_file, may_change ? memory : nullptr, &session->memory_bytes,
             &session->memory_descriptors);
  session->memory_file.reset();
  session->memory_bytes = Charge();
  session->memory_descriptors = Charge();
}

// A look at a ring is a miss of the caches: of thousands of sessions most are silent.
void Rings::LookAtRung(absl::Time now) {
  epoll_event rung[64];
  const int count = epoll_wait(wake_epoll_.get(), rung, 64, 0);
  for (int i = 0; i < count; ++i) {
    const auto it = quiet_.find(SessionId(static_cast<int64_t>(rung[i].data.u64)));
    if (it == quiet_.end()) continue;  // it is looked at, or has ended
    it->second->ring->LookAgain();
    it->second->last_frame = now;
    active_.push_back(std::move(it->second));
    quiet_.erase(it);
  }
}

bool Rings::Poll(absl::Time now) {
  if (now >= next_look_for_rung_) {
    next_look_for_rung_ = now + kLookForRungEvery;
    LookAtRung(now);
  }
  FindWaiting(now);
  ++round_;
  if (some_wait_ || now < in_order_until_) PutInOrder();
  some_wait_ = false;
  int64_t work = 0;
  // A turn may end sessions, others' as well.
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (waiting_[i] == nullptr) continue;
    work += TakeTurn(waiting_[i]->shared_from_this(), now);
    if (work <= kTurnWork) continue;
    some_wait_ = i + 1 < waiting_.size();
    in_order_until_ = now + kInOrderFor;
    break;
  }
  return !waiting_.empty();
}

void Rings::FindWaiting(absl::Time now) {
  waiting_.clear();
  for (size_t i = 0; i < active_.size();) {
    const std::shared_ptr<Session>& session = active_[i];
    if (WantsTurn(*session)) {
      session->last_frame = now;
      waiting_.push_back(session.get());
      ++i;
      continue;
    }
    const bool is_quiet =
        session->ring == nullptr || (now - session->last_frame > kQuietAfter &&
                                     !session->log.parked() && session->ring->StopLooking());
    if (!is_quiet) {
      ++i;
      continue;
    }
    if (session->ring != nullptr) quiet_.emplace(session->id, session);
    std::swap(active_[i], active_.back());
    active_.pop_back();
  }
}

void Rings::PutInOrder() {
  for (const Session* session : waiting_) {
    session->tenant->turns.Enter(round_, turns_);
    session->process->Enter(round_, session->tenant->turns);
  }
  const auto sort_key = [](const Session* session) {
    return std::make_tuple(session->tenant->turns.work_after_turn(),
                           session->process->work_after_turn(), session->last_turn);
  };
  std::sort(waiting_.begin(), waiting_.end(),
            [&](const Session* a, const Session* b) { return sort_key(a) < sort_key(b); });
}

int64_t Rings::TakeTurn(const std::shared_ptr<Session>& session, absl::Time now) {
  const WorkSlice slice;
  session->last_turn = ++last_turn_;
  if (session->goes_on != nullptr) {
    std::exchange(session->goes_on, nullptr)(session);
  } else {
    TakeFrames(session, now);
  }
  const int64_t work = SliceWork();
  session->process->Leave(work, &session->tenant->turns);
  session->tenant->turns.Leave(work, &turns_);
  return work;
}

void Rings::GoOnLater(const std::shared_ptr<Session>& session,
                      std::function<void(const std::shared_ptr<Session>&)> then) {
  session->goes_on = std::move(then);
  if (quiet_.erase(session->id) > 0) session->ring->LookAgain();
  const bool is_active = std::find(active_.begin(), active_.end(), session) != active_.end();
  if (!is_active) active_.push_back(session);
}

void Rings::TakeFrames(const std::shared_ptr<Session>& session, absl::Time now) {
  size_t bytes = 0;
  const int64_t failed = session->log.failed();
  for (int i = 0; i < CommandLog::kFramesPerTurn && bytes < kBytesPerTurn; ++i) {
    if (session->dead() || session->log.parked()) break;
    // Its error took as long as several commands that go well.
    if (session->log.failed() > failed) break;
    // With what the frames made the daemon do, such as small kernels that ran at once.
    if (!SliceHasTime()) break;
    absl::string_view frame;
    const SubmissionRingReader::Result result = session->ring->Poll(&frame_, &frame);
    if (result == SubmissionRingReader::Result::kEmpty) break;
    bytes += frame.size();
    if (result == SubmissionRingReader::Result::kMalformed) {
      end_(session, EndedFor(session->ring->status()), now);
      break;
    }
    // A frame has no other answer than its sequence, which cannot be believed where it is none.
    const absl::Status status = take_(session, frame, now);
    if (!status.ok()) end_(session, EndedFor(status), now);
  }
}

bool Rings::SleepUnless(const std::function<bool()>& busy, const std::function<void()>& sleep) {
  next_look_for_rung_ = absl::InfinitePast();  // a client may have rung, and ended the sleep
  return doorbell_->SleepUnless(
      [&] {
        return busy() ||
               std::any_of(active_.begin(), active_.end(),
                           [](const std::shared_ptr<Session>& s) { return WantsTurn(*s); });
      },
      sleep);
}

}  // namespace chorus::node
