// One session's names: what its tensor and graph ids stand for, and what is published of them.
//
// An id is a slot and a generation. A slot's generations rise, so that a late message about a name
// that was released never meets its successor; after the last one there is none.
//
// Threads: the node thread. Ownership: a session owns its names, which share cells and graphs.
// Errors: said at each function.
#ifndef CHORUS_CORE_NODE_NAMES_H_
#define CHORUS_CORE_NODE_NAMES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "core/base/error.h"
#include "core/base/ids.h"
#include "core/node/cell.h"
#include "core/node/completions.h"
#include "core/node/graph_store.h"
#include "core/runtime/budget.h"

namespace chorus::node {

class Names {
  // Of slots that are to be released, the next one; or:
  static constexpr int32_t kNoMore = -1;
  static constexpr int32_t kUnmarked = -2;

  struct TensorSlot {
    uint32_t generation = 0;
    int32_t next_marked = kUnmarked;
    CellRef cell;
  };
  struct GraphSlot {
    uint32_t generation = 0;
    int32_t next_marked = kUnmarked;
    std::shared_ptr<GraphRecord> record;
    Charge charge;
    Charge count_charge;   // it is one of so many
    absl::Status refused;  // why there is no record of this generation
  };

 public:
  struct Limits {
    int32_t tensors = 0;
    int32_t graphs = 0;
  };

  // What a name and the cell that it stands for take, about.
  static constexpr int64_t kBytesPerTensor = 512;
  // Names that stay free for what fails: a session that uses a tensor for which there was no memory
  // is told so, and not that there is no such name.
  static constexpr int64_t kSpareNames = 32;
  // What a slot takes; a table may have room for twice as many. Of usual sessions one step has all.
  static constexpr int64_t kTableStep = int64_t{64} << 10;
  static constexpr int64_t kBytesPerSlot = 64;
  static constexpr int64_t kBytesPerGraphSlot = 256;
  // What is kept of why a graph was refused, about.
  static constexpr int64_t kBytesPerRefusal = 4096;

  // Names are charged to `budget`. `completions` is told what they come to stand for, and outlives
  // it.
  Names(const Limits& limits, BudgetRef budget, Completions* completions)
      : limits_(limits),
        budget_(std::move(budget)),
        completions_(completions),
        charged_(budget_, Resource::kNameBytes, 64 * kBytesPerTensor),
        tables_(budget_, Resource::kNameBytes, kTableStep) {}
  Names(const Names&) = delete;
  Names& operator=(const Names&) = delete;

  // --- Tensors --------------------------------------------------------------------------------
  // NOT_FOUND kUnknownName: never given, or released. FAILED_PRECONDITION kDonated: it is promised
  // to a run that is not launched.
  absl::StatusOr<CellRef> FindTensor(TensorId id) const;
  // The same, of whatever the name stands for; null: it names nothing. Until the name is changed.
  const Cell* CellOf(TensorId id) const {
    const CellRef* const cell = SharedCellOf(id);
    return cell == nullptr ? nullptr : cell->get();
  }
  const CellRef* SharedCellOf(TensorId id) const {
    const TensorSlot* const slot = SlotOf(id);
    return slot == nullptr ? nullptr : &slot->cell;
  }
  // INVALID_ARGUMENT kMalformed: the slot is out of range or in use, or the generation not new.
  absl::Status CheckFresh(TensorId id) const;
  bool IsFresh(TensorId id) const;
  // Charges for `count` names that come next, in slots up to `top_slot`, and for the spare ones.
  // RESOURCE_EXHAUSTED kOutOfMemory.
  absl::Status Reserve(size_t count, int32_t top_slot) {
    return Cover(static_cast<int64_t>(count) + kSpareNames, top_slot);
  }
  // The id is fresh, and reserved.
  void NameTensor(TensorId id, CellRef cell);
  // The id is fresh, and nothing was reserved for it. False: there is no memory for the name.
  bool NameIfRoom(TensorId id, CellRef cell);
  // `error` as cells keep it that have failed: charged, with its texts, as long as one of them has
  // it. Where there is no memory for the texts it is kept without; GetError has them.
  std::shared_ptr<const Error> Keep(Error error);
  // Those of these names that are fresh stand for the error, as long as there is memory for them;
  // the session is told of all in any case.
  void NameFailed(absl::Span<const TensorId> ids, std::shared_ptr<const Error> error);
  // Whether the name, unless it was released, still stands for `cell`.
  bool StandsFor(TensorId id, const Cell& cell) const;
  // The name, unless it was released, stands for `cell` now.
  void ReplaceTensor(TensorId id, CellRef cell);
  // Tells the session of the cell, which is settled.
  void Publish(TensorId id, const Cell& cell) const;
  // As long as the slice has time for it, else ReleaseMarked() does it later. A name that was
  // released already is no fault: releases may cross with the end of what they name.
  void ReleaseTensor(TensorId id);
  int64_t live_tensors() const { return live_tensors_; }
  // Those in the first `most` slots; returns how many slots these are.
  template <typename Fn>
  int64_t ForEachCell(int64_t most, Fn fn) const {
    const size_t slots = std::min(tensors_.size(), static_cast<size_t>(most));
    for (size_t i = 0; i < slots; ++i) {
      if (tensors_[i].cell != nullptr) fn(*tensors_[i].cell);
    }
    return static_cast<int64_t>(slots);
  }

  // --- Graphs ---------------------------------------------------------------------------------
  absl::Status CheckFresh(GraphId id) const;
  // The id is fresh. Charges for the name and the record, unless this session has been charged for
  // making it: then that is the name's. Returns why there is none, which runs of it are told. Where
  // there is not even memory for the name, that is what runs of unknown graphs are told from now
  // on. RESOURCE_EXHAUSTED kQuota: the tenant has as many graphs as it may have.
  absl::Status NameGraph(GraphId id, absl::StatusOr<std::shared_ptr<GraphRecord>> record);
  // NOT_FOUND kUnknownName, or why it was refused.
  absl::StatusOr<std::shared_ptr<GraphRecord>> FindGraph(GraphId id) const;
  // The same; null: there is none. Until the name is released.
  const GraphRecord* RecordOf(GraphId id) const {
    if (id.slot < 0 || static_cast<size_t>(id.slot) >= graphs_.size()) return nullptr;
    const GraphSlot& slot = graphs_[static_cast<size_t>(id.slot)];
    return slot.generation == id.generation ? slot.record.get() : nullptr;
  }
  void ReleaseGraph(GraphId id);  // as ReleaseTensor
  int64_t live_graphs() const { return live_graphs_; }

  // --- All of them ----------------------------------------------------------------------------
  // Releases what no slice has had the time for, as long as this one has. True: that was all.
  bool ReleaseMarked();
  // What names stood for that are no more: charged until it is released, by its end at the latest.
  // A turn of the node has not the time to release all that a session may have (65,536 results: 3
  // to 5 ms; 16,384 graphs: a second).
  class Remains {
   public:
    // Releases more, as long as the slice has time. True: that was all.
    bool Release();

   private:
    friend class Names;
    Charge names_;
    Charge tables_;
    std::vector<TensorSlot> tensors_;
    std::vector<GraphSlot> graphs_;
  };
  // Releases all names.
  Remains TakeAll();

 private:
  static_assert(2 * sizeof(TensorSlot) <= kBytesPerSlot);
  static_assert(2 * sizeof(GraphSlot) <= kBytesPerGraphSlot);
  void Release(TensorSlot* slot);
  void Release(GraphSlot* slot);
  template <typename Slot>
  void ReleaseOrMark(std::vector<Slot>* slots, int32_t slot, int32_t* first_marked);
  template <typename Slot>
  void ReleaseMarked(std::vector<Slot>* slots, int32_t* first_marked);
  static void Empty(GraphSlot* slot);
  absl::Status Hold(GraphSlot* slot, absl::StatusOr<std::shared_ptr<GraphRecord>> record);
  absl::Status Cover(int64_t more_names, int32_t top_slot) {
    CHORUS_RETURN_IF_ERROR(CoverTables(std::max(tensors_.size(), static_cast<size_t>(top_slot + 1)),
                                       graphs_.size(), refused_graphs_));
    return CoverNames(live_tensors_ + more_names, 0);
  }
  absl::Status CoverNames(int64_t tensors, int64_t more_of_errors) {
    return charged_.Cover(tensors * kBytesPerTensor + *error_bytes_ + more_of_errors);
  }
  absl::Status CoverTables(size_t tensor_slots, size_t graph_slots, int64_t refused) {
    return tables_.Cover(static_cast<int64_t>(tensor_slots) * kBytesPerSlot +
                         static_cast<int64_t>(graph_slots) * kBytesPerGraphSlot +
                         refused * kBytesPerRefusal);
  }
  // Null: it names nothing.
  const TensorSlot* SlotOf(TensorId id) const;
  TensorSlot* SlotOf(TensorId id) {
    return const_cast<TensorSlot*>(const_cast<const Names*>(this)->SlotOf(id));
  }

  const Limits limits_;
  const BudgetRef budget_;
  Completions* const completions_;
  SteppedCharge charged_;  // for live names, and the errors that are kept
  SteppedCharge tables_;   // for slots and refusals
  std::vector<TensorSlot> tensors_;
  std::vector<GraphSlot> graphs_;
  int32_t marked_tensors_ = kNoMore;  // the first slot that is
  int32_t marked_graphs_ = kNoMore;
  int64_t live_tensors_ = 0;
  const std::shared_ptr<int64_t> error_bytes_ = std::make_shared<int64_t>(0);  // errors count it
  int64_t live_graphs_ = 0;
  int64_t refused_graphs_ = 0;
  absl::Status no_room_;  // why the last graph without a name has none
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_NAMES_H_
