#include "core/node/holders.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "core/base/utf8.h"
#include "core/base/work.h"
#include "core/graph/graph.h"
#include "core/node/world.h"

namespace chorus::node {
namespace {

// Of a session's memberships, hundreds perhaps, with long names, the first are enough: each error
// has them.
std::string NameOf(const Session& session) {
  constexpr size_t kNamed = 3;
  const std::vector<Session::Membership>& all = session.memberships;
  std::string name;
  for (size_t i = 0; i < std::min(all.size(), kNamed); ++i) {
    absl::StrAppend(&name, i == 0 ? "" : " and ", "rank ", all[i].rank.value(), " of \"",
                    all[i].world->name, "\"");
  }
  if (all.size() > kNamed) absl::StrAppend(&name, " and ", all.size() - kNamed, " more");
  if (all.empty()) name = absl::StrCat("session \"", session.request.label, "\"");
  return absl::StrCat(name, " (pid ", session.request.pid, ")");
}

constexpr int64_t kMostSlots = 8192;  // of all sessions that are looked at
constexpr int64_t kWorkPerSlot = 2;

void Locate(absl::string_view op, absl::string_view source, Error* error) {
  error->op = std::string(op);
  error->source = OneLine(source);
  const bool has_source = !error->source.empty();
  error->message = absl::StrCat(op, has_source ? " (" : "", error->source, has_source ? ")" : "",
                                ": ", error->message);
}

}  // namespace

void Holders::Explain(const Session& caller, const RunState* run, Error* error) {
  if (error->reason != Reason::kOutOfMemory || error->id != ErrorId()) return;
  if (run != nullptr && run->graph != nullptr && run->graph->largest_node >= 0) {
    const Node& largest = run->graph->graph.nodes[static_cast<size_t>(run->graph->largest_node)];
    Locate(largest.op, largest.source, error);
  }
  Name(caller, error);
}

void Holders::Explain(const Session& caller, const CreateTensor& create, Error* error) {
  if (error->reason != Reason::kOutOfMemory || error->id != ErrorId()) return;
  Locate("from_host", create.call_site, error);
  Name(caller, error);
}

void Holders::Name(const Session& caller, Error* error) {
  Tenant* const tenant = caller.tenant.get();
  // To look for them is work for each tensor, and a client may ask for too much again and again,
  // also at the end of a long slice.
  const int64_t slots =
      std::min(kMostSlots, (kMaxSliceWork - kTurnWork - SliceWork()) / kWorkPerSlot);
  if (slots > 0 && clock_->now >= tenant->holders_at + absl::Seconds(1)) {
    tenant->holders = TextOf(*tenant, slots);
    tenant->holders_at = clock_->now;
  }
  error->message += tenant->holders;
}

std::string Holders::TextOf(const Tenant& tenant, int64_t most_slots) {
  constexpr size_t kNamed = 3;
  const int64_t most_of_one = most_slots / 2;  // so that there is something left for the others
  struct Holder {
    Held held;
    const Session* session;
  };
  int64_t room = most_slots;
  std::vector<Holder> holders;
  sessions_->ForEach([&](const std::shared_ptr<Session>& session) {
    if (session->tenant.get() != &tenant) return;
    const Held held = HeldBy(*session, std::min(room, most_of_one));
    room -= held.slots;
    if (held.bytes > 0) holders.push_back({held, session.get()});
  });
  CountWork(kWorkPerSlot * (most_slots - room));
  std::sort(holders.begin(), holders.end(), [](const Holder& a, const Holder& b) {
    return std::tie(b.held.bytes, a.session->id) < std::tie(a.held.bytes, b.session->id);
  });
  std::string text;
  for (size_t i = 0; i < std::min(holders.size(), kNamed); ++i) {
    const Held& held = holders[i].held;
    absl::StrAppend(&text, i == 0 ? "; the largest holders are " : ", ",
                    NameOf(*holders[i].session), " with ", held.all ? "" : "at least ", held.bytes,
                    " bytes");
  }
  return text;
}

// Each buffer once, whatever names it has; of a run under way those that it has bound.
Holders::Held Holders::HeldBy(const Session& session, int64_t most_slots) {
  Held held;
  held.bytes = session.staging_bytes;
  absl::flat_hash_set<const Buffer*> counted_buffers;
  const auto count = [&](const BufferRef& buffer) {
    if (buffer.get() == nullptr || buffer->state() == Buffer::State::kStaging) return;
    if (counted_buffers.insert(buffer.get()).second) held.bytes += buffer->bytes();
  };
  held.slots = session.names.ForEachCell(most_slots, [&](const Cell& cell) { count(cell.buffer); });
  held.all = held.slots < most_slots;
  for (const RunHandle handle : session.runs) {
    const auto& refs = runs_->Find(handle)->refs;
    const int64_t slots = held.slots + 1 + static_cast<int64_t>(refs.size());
    if (slots > most_slots) {
      held.all = false;
      break;
    }
    held.slots = slots;
    for (const BufferRef& buffer : refs) count(buffer);
  }
  return held;
}

}  // namespace chorus::node
