#include "server/service/call_turns.h"

#include <tuple>
#include <utility>

#include "core/runtime/budget.h"

namespace chorus::server {

bool CallTurns::Has(const Holder& holder, const Line& line) const {
  const auto of_tenant = held_by_.find(holder.tenant);
  return held_ < turns_ && line.held < of_one_connection_ &&
         (of_tenant == held_by_.end() || of_tenant->second < ShareOf(turns_));
}

void CallTurns::Take(const Holder& holder, Line* line) {
  ++held_;
  ++held_by_[holder.tenant];
  ++line->held;
}

void CallTurns::Drop(const Holder& holder) {
  const auto line = lines_.find(holder);
  if (line->second.held == 0 && line->second.waiting.empty()) lines_.erase(line);
}

int64_t CallTurns::Enter(const Holder& holder, OnTurn on_turn) {
  int64_t name = 0;
  {
    MutexLock lock(&mutex_);
    name = ++last_;
    Line& line = lines_[holder];
    // The thread that hands turns on comes to it.
    if (handing_on_ || !Has(holder, line)) {
      line.waiting.emplace(name, std::move(on_turn));
      return name;
    }
    Take(holder, &line);
  }
  on_turn(Turn(this, holder));
  return name;
}

void CallTurns::Forget(const Holder& holder, int64_t name) {
  OnTurn on_turn;  // goes when the mutex is free
  MutexLock lock(&mutex_);
  const auto line = lines_.find(holder);
  if (line == lines_.end()) return;
  const auto waiter = line->second.waiting.find(name);
  if (waiter == line->second.waiting.end()) return;
  on_turn = std::move(waiter->second);
  line->second.waiting.erase(waiter);
  Drop(holder);
}

void CallTurns::End(const Holder& holder) {
  {
    MutexLock lock(&mutex_);
    --held_;
    if (--held_by_[holder.tenant] == 0) held_by_.erase(holder.tenant);
    --lines_[holder].held;
    Drop(holder);
    // It may be under this one: of a crowd that has gone none takes its turn.
    if (std::exchange(handing_on_, true)) return;
  }
  while (HandOn()) {
  }
}

bool CallTurns::HandOn() {
  OnTurn on_turn;
  Holder next;
  {
    MutexLock lock(&mutex_);
    // The connection that holds fewest has it; of several the one that has waited for longest.
    const auto weight = [](const Line& line) {
      return std::make_tuple(line.held, line.waiting.begin()->first);
    };
    auto best = lines_.end();
    for (auto line = lines_.begin(); line != lines_.end(); ++line) {
      if (line->second.waiting.empty() || !Has(line->first, line->second)) continue;
      if (best == lines_.end() || weight(line->second) < weight(best->second)) best = line;
    }
    handing_on_ = best != lines_.end();
    if (!handing_on_) return false;
    next = best->first;
    on_turn = std::move(best->second.waiting.begin()->second);
    best->second.waiting.erase(best->second.waiting.begin());
    Take(next, &best->second);
  }
  on_turn(Turn(this, next));
  return true;
}

}  // namespace chorus::server
