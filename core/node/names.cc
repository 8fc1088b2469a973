#include "core/node/names.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/work.h"

namespace chorus::node {
namespace {

// The work of releasing a name, beside that of a graph's end (graph_store.cc).
constexpr int64_t kWorkPerName = 1;
// So many names that come to stand for one error are a piece.
constexpr int64_t kFailedNamesOfWork = 2;

// What it is about, in as many bytes whatever it was.
Error WithoutTexts(const Error& error) {
  Error result(error.reason, "it has failed; there is no memory to keep why");
  result.code = error.code;
  result.id = error.id;
  result.culprit.rank = error.culprit.rank;
  result.culprit.pid = error.culprit.pid;
  result.ended = error.ended;
  result.alone = error.alone;
  return result;
}

}  // namespace

// --- Tensors ------------------------------------------------------------------------------------

const Names::TensorSlot* Names::SlotOf(TensorId id) const {
  if (id.slot < 0 || static_cast<size_t>(id.slot) >= tensors_.size()) return nullptr;
  const TensorSlot& slot = tensors_[static_cast<size_t>(id.slot)];
  return slot.cell != nullptr && slot.generation == id.generation ? &slot : nullptr;
}

absl::StatusOr<CellRef> Names::FindTensor(TensorId id) const {
  const TensorSlot* const slot = SlotOf(id);
  if (slot == nullptr) {
    return UnknownName(
        absl::StrCat("tensor ", id.slot, ".", id.generation, " does not exist, or was released"));
  }
  if (slot->cell->donated_to == Sequence()) return slot->cell;
  return MakeError(
      Reason::kDonated,
      absl::StrCat("tensor ", id.slot, ".", id.generation, " is donated to run ",
                   slot->cell->donated_to.value(),
                   ", which is not launched yet: it can be used again if that run fails"));
}

bool Names::IsFresh(TensorId id) const {
  if (id.slot < 0 || id.slot >= limits_.tensors) return false;
  if (static_cast<size_t>(id.slot) >= tensors_.size()) return id.generation > 0;
  const TensorSlot& slot = tensors_[static_cast<size_t>(id.slot)];
  return slot.cell == nullptr && id.generation > slot.generation;
}

absl::Status Names::CheckFresh(TensorId id) const {
  if (IsFresh(id)) return absl::OkStatus();
  if (id.slot < 0 || id.slot >= limits_.tensors) {
    return Malformed(
        absl::StrCat("tensor slots go from 0 to ", limits_.tensors - 1, ", not ", id.slot));
  }
  if (static_cast<size_t>(id.slot) >= tensors_.size()) {
    return Malformed("a tensor slot's first generation is 1");
  }
  return Malformed(absl::StrCat("tensor slot ", id.slot, " is in use, or generation ",
                                id.generation, " of it is not new (the last was ",
                                tensors_[static_cast<size_t>(id.slot)].generation, ")"));
}

void Names::NameTensor(TensorId id, CellRef cell) {
  const size_t slot = static_cast<size_t>(id.slot);
  if (tensors_.size() <= slot) tensors_.resize(slot + 1);  // makes room for more
  tensors_[slot].generation = id.generation;
  tensors_[slot].cell = std::move(cell);
  ++live_tensors_;
}

bool Names::NameIfRoom(TensorId id, CellRef cell) {
  if (!Cover(1, id.slot).ok()) return false;
  NameTensor(id, std::move(cell));
  return true;
}

std::shared_ptr<const Error> Names::Keep(Error error) {
  const int64_t bytes = BytesOf(error);
  if (!CoverNames(live_tensors_, bytes).ok()) {
    return std::make_shared<const Error>(WithoutTexts(error));
  }
  *error_bytes_ += bytes;
  return {new Error(std::move(error)), [bytes, count = error_bytes_](const Error* unused) {
            *count -= bytes;
            delete unused;
          }};
}

void Names::NameFailed(absl::Span<const TensorId> ids, std::shared_ptr<const Error> error) {
  CountWork(1 + static_cast<int64_t>(ids.size()) / kFailedNamesOfWork);
  const auto cell = std::make_shared<Cell>();  // one for all: there is nothing to tell them apart
  cell->state = Cell::State::kFailed;
  cell->error = std::move(error);
  cell->type = std::make_shared<TensorType>();
  // Memory that is refused is not asked for again: that takes twenty times as long as a name.
  bool has_room = true;
  for (const TensorId id : ids) {
    if (!IsFresh(id)) continue;
    Publish(id, *cell);
    has_room = has_room && NameIfRoom(id, cell);
  }
}

bool Names::StandsFor(TensorId id, const Cell& cell) const {
  if (static_cast<size_t>(id.slot) >= tensors_.size()) return false;
  return tensors_[static_cast<size_t>(id.slot)].cell.get() == &cell;
}

void Names::ReplaceTensor(TensorId id, CellRef cell) {
  TensorSlot* const slot = SlotOf(id);
  if (slot == nullptr) return;
  if (cell->settled()) Publish(id, *cell);  // else its run will
  slot->cell = std::move(cell);
}

void Names::Publish(TensorId id, const Cell& cell) const {
  TensorRecord record;
  const Cell::Location location = cell.readable();
  if (cell.state == Cell::State::kFailed) {
    record.state = TensorState::kFailed;
    record.code = cell.error->code;
    record.error = cell.error->id;
  } else if (cell.buffer && location.buffer == nullptr) {
    record.state = TensorState::kOnDevice;
  } else {
    record.state = TensorState::kReady;
    record.bytes = cell.bytes;
    if (location.buffer != nullptr) {
      record.arena = location.buffer->arena();
      record.offset = location.buffer->offset() + location.offset;
    }
  }
  completions_->PublishTensor(id, record);
}

void Names::ReleaseTensor(TensorId id) {
  if (SlotOf(id) != nullptr) ReleaseOrMark(&tensors_, id.slot, &marked_tensors_);
}

void Names::Release(TensorSlot* slot) {
  slot->cell.reset();
  --live_tensors_;
}

// --- Graphs -------------------------------------------------------------------------------------

absl::Status Names::CheckFresh(GraphId id) const {
  if (id.slot < 0 || id.slot >= limits_.graphs) {
    return Malformed(
        absl::StrCat("graph slots go from 0 to ", limits_.graphs - 1, ", not ", id.slot));
  }
  // A slot that was never used has generation 0.
  GraphSlot unused;
  const size_t slot = static_cast<size_t>(id.slot);
  const GraphSlot& entry = slot < graphs_.size() ? graphs_[slot] : unused;
  if (entry.record != nullptr || id.generation <= entry.generation) {
    return Malformed(absl::StrCat("graph slot ", slot, " is in use, or generation ", id.generation,
                                  " of it is not new"));
  }
  return absl::OkStatus();
}

absl::Status Names::NameGraph(GraphId id, absl::StatusOr<std::shared_ptr<GraphRecord>> record) {
  const size_t slot = static_cast<size_t>(id.slot);
  const size_t slots = std::max(graphs_.size(), slot + 1);
  const absl::Status room = CoverTables(tensors_.size(), slots, refused_graphs_ + 1);
  if (!room.ok()) {
    no_room_ = room;
    return room;
  }
  graphs_.resize(slots);
  GraphSlot& entry = graphs_[slot];
  Release(&entry);
  entry.generation = id.generation;
  entry.refused = Hold(&entry, std::move(record));
  ++(entry.refused.ok() ? live_graphs_ : refused_graphs_);
  return entry.refused;
}

absl::Status Names::Hold(GraphSlot* slot, absl::StatusOr<std::shared_ptr<GraphRecord>> record) {
  CHORUS_RETURN_IF_ERROR(record.status());
  CHORUS_ASSIGN_OR_RETURN(Charge count_charge,
                          budget_->Charge(Domain::kHost, Resource::kGraphs, 1));
  // The session that had it made has been charged for it.
  if (!(*record)->charge.LiesWithin(*budget_)) {
    CHORUS_ASSIGN_OR_RETURN(
        Charge charge, budget_->Charge(Domain::kHost, Resource::kGraphBytes, (*record)->bytes));
    (*record)->charge = std::move(charge);
  }
  slot->charge = std::move((*record)->charge);
  slot->count_charge = std::move(count_charge);
  slot->record = *std::move(record);
  ++slot->record->names;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<GraphRecord>> Names::FindGraph(GraphId id) const {
  if (id.slot >= 0 && static_cast<size_t>(id.slot) < graphs_.size()) {
    const GraphSlot& slot = graphs_[static_cast<size_t>(id.slot)];
    if (slot.generation == id.generation) {
      CHORUS_RETURN_IF_ERROR(slot.refused);
      if (slot.record != nullptr) return slot.record;
    }
  }
  // Most likely it is the one for whose name there was no memory.
  CHORUS_RETURN_IF_ERROR(no_room_);
  return UnknownName(
      absl::StrCat("graph ", id.slot, ".", id.generation, " is not registered by this session"));
}

void Names::ReleaseGraph(GraphId id) {
  if (id.slot < 0 || static_cast<size_t>(id.slot) >= graphs_.size()) return;
  const GraphSlot& slot = graphs_[static_cast<size_t>(id.slot)];
  if (slot.generation == id.generation) ReleaseOrMark(&graphs_, id.slot, &marked_graphs_);
}

void Names::Release(GraphSlot* slot) {
  if (!slot->refused.ok()) --refused_graphs_;
  if (slot->record != nullptr) --live_graphs_;
  Empty(slot);
}

// A graph that has no name any more stays charged until it is gone: its runs may keep it for hours.
void Names::Empty(GraphSlot* slot) {
  if (slot->record != nullptr && --slot->record->names == 0) {
    slot->record->charge = std::move(slot->charge);
  }
  slot->record.reset();
  slot->charge = Charge();
  slot->count_charge = Charge();
  slot->refused = absl::OkStatus();
}

// --- All of them --------------------------------------------------------------------------------

// A mark costs nothing and takes no memory: a frame may name as many as a session has.
template <typename Slot>
void Names::ReleaseOrMark(std::vector<Slot>* slots, int32_t slot, int32_t* first_marked) {
  Slot& entry = (*slots)[static_cast<size_t>(slot)];
  if (entry.next_marked != kUnmarked) return;
  if (SliceHasTime()) {
    CountWork(kWorkPerName);
    return Release(&entry);
  }
  entry.next_marked = std::exchange(*first_marked, slot);
}

template <typename Slot>
void Names::ReleaseMarked(std::vector<Slot>* slots, int32_t* first_marked) {
  while (*first_marked != kNoMore && SliceHasTime()) {
    CountWork(kWorkPerName);
    Slot& entry = (*slots)[static_cast<size_t>(*first_marked)];
    *first_marked = std::exchange(entry.next_marked, kUnmarked);
    Release(&entry);
  }
}

bool Names::ReleaseMarked() {
  const auto all = [this] { return marked_tensors_ == kNoMore && marked_graphs_ == kNoMore; };
  if (all()) return true;
  ReleaseMarked(&tensors_, &marked_tensors_);
  ReleaseMarked(&graphs_, &marked_graphs_);
  return all();
}

Names::Remains Names::TakeAll() {
  Remains remains;
  remains.names_ = charged_.Take();
  remains.tables_ = tables_.Take();
  remains.tensors_.swap(tensors_);
  remains.graphs_.swap(graphs_);
  live_tensors_ = 0;
  live_graphs_ = 0;
  refused_graphs_ = 0;
  marked_tensors_ = kNoMore;
  marked_graphs_ = kNoMore;
  return remains;
}

bool Names::Remains::Release() {
  for (; !tensors_.empty() && SliceHasTime(); CountWork(kWorkPerName)) tensors_.pop_back();
  for (; !graphs_.empty() && SliceHasTime(); CountWork(kWorkPerName)) {
    Empty(&graphs_.back());
    graphs_.pop_back();
  }
  if (!tensors_.empty() || !graphs_.empty()) return false;
  names_ = Charge();
  tables_ = Charge();
  return true;
}

}  // namespace chorus::node
