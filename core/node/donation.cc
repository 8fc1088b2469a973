#include "core/node/donation.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/node/session.h"

namespace chorus::node {

// The memory of an input that nobody else has or can come to have, if it is known: of a tensor that
// is there, or of one that a run under way makes. Null: others may read it. It is the session's
// tenant's like all that the session names, and written by the daemon alone.
BufferRef Donations::SoleBufferOf(const CellRef& cell) {
  if (cell->state == Cell::State::kReady) {
    // The name's reference and its reader's; the cell's on the buffer. Who reads or writes it has
    // more; so has whoever shares its bytes.
    if (cell.use_count() != 2 || !cell->buffer || cell->buffer->references() != 1 ||
        cell->buffer->state() == Buffer::State::kStaging || cell->offset != 0) {
      return BufferRef();
    }
    return cell->buffer;
  }
  // And its producer's. That run reserved the memory for itself, or was promised it. Whoever waits
  // to read it does not count, and comes when the next run may have written there already.
  RunState* const producer = runs_->Find(cell->producer);
  if (cell->settled() || producer == nullptr || cell.use_count() != 3 ||
      cell->number != Hash128() || !cell->on_settled.empty()) {
    return BufferRef();
  }
  const auto found = std::find(producer->outputs.begin(), producer->outputs.end(), cell);
  if (found == producer->outputs.end()) return BufferRef();
  const auto index = static_cast<size_t>(found - producer->outputs.begin());
  const Plan::Output& place = producer->plan->plan.outputs[index];
  if (!place.sole) return BufferRef();
  return producer->refs[static_cast<size_t>(place.buffer)];
}

absl::Status Donations::Promise(const Run& command, RunState* run) {
  const std::vector<GraphInput>& inputs = run->graph->graph.inputs;
  for (size_t i = 0; i < command.donate.size(); ++i) {
    if (command.donate[i] && !inputs[i].donatable) {
      return Malformed(absl::StrCat("input ", i, " of the graph cannot be donated"));
    }
  }
  if (command.donate.empty()) return absl::OkStatus();
  const Plan& plan = run->plan->plan;
  for (size_t o = 0; o < plan.outputs.size(); ++o) {
    const Plan::Output& place = plan.outputs[o];
    if (place.donor < 0 || !command.donate[static_cast<size_t>(place.donor)] || place.bytes == 0 ||
        run->outputs[o] == nullptr) {
      continue;
    }
    const CellRef& cell = run->inputs[static_cast<size_t>(place.donor)];
    if (cell == nullptr) continue;
    BufferRef buffer = SoleBufferOf(cell);
    if (!buffer || buffer->bytes() != place.bytes) continue;
    cell->donated_to = run->sequence;
    const TensorId id = absl::get<TensorId>(command.inputs[static_cast<size_t>(place.donor)]);
    run->donations.push_back({place.donor, id});
    run->addresses[static_cast<size_t>(place.buffer)] = buffer->address();
    run->refs[static_cast<size_t>(place.buffer)] = std::move(buffer);
  }
  run->vote.donates = !run->donations.empty();
  return absl::OkStatus();
}

// The name of what was given away stands for an error.
void Donations::NameDonated(RunState* run, const RunState::Donation& donation,
                            absl::string_view what) {
  const CellRef& given = run->inputs[static_cast<size_t>(donation.input)];
  Error error = ErrorOf(MakeError(
      Reason::kDonated, absl::StrCat("tensor ", donation.id.slot, ".", donation.id.generation,
                                     " was donated to run ", run->sequence.value(), ", ", what)));
  errors_->Record(run->session->tenant->name, &error);
  auto gone = std::make_shared<Cell>();
  gone->state = Cell::State::kFailed;
  gone->error = std::make_shared<Error>(std::move(error));
  gone->type = given->type;
  gone->device = given->device;
  run->session->names.ReplaceTensor(donation.id, std::move(gone));
}

void Donations::Take(RunState* run) {
  run->donated = !run->donations.empty();
  for (const RunState::Donation& donation : run->donations) {
    const Cell& given = *run->inputs[static_cast<size_t>(donation.input)];
    given.buffer->set_state(Buffer::State::kResult);
    given.buffer->set_mirror(BufferRef());  // of what stood there
    NameDonated(run, donation, "whose result has its memory");
  }
}

void Donations::Return(RunState* run) {
  if (run->donations.empty()) return;
  for (const RunState::Donation& donation : run->donations) {
    const CellRef& given = run->inputs[static_cast<size_t>(donation.input)];
    if (run->donated && !run->held_back) {
      NameDonated(run, donation, "which failed after it had written there");
      continue;
    }
    given->donated_to = Sequence();
    if (run->donated) run->session->names.ReplaceTensor(donation.id, given);
  }
  run->donations.clear();
}

}  // namespace chorus::node
