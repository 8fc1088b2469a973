#include "core/node/donation.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/work.h"
#include "core/node/session.h"

namespace chorus::node {
namespace {

// So many names are given to others in the time of a piece of work.
constexpr int64_t kDonationsOfWork = 4;

}  // namespace

// The memory of an input that nothing else has or can come to have, if it is known: of a tensor
// that is there, or of one that a run under way makes. Null: others may read it. It is the
// session's tenant's like all that the session names, and written by the daemon alone.
BufferRef Donations::SoleBufferOf(const CellRef& cell) {
  if (cell->state == Cell::State::kReady) {
    // The name's reference and its reader's; the cell's on the buffer. A cell that is read or
    // written has more of them; so has a buffer whose bytes are shared.
    if (cell.use_count() != 2 || !cell->buffer || cell->buffer->references() != 1 ||
        cell->buffer->state() == Buffer::State::kStaging || cell->offset != 0) {
      return BufferRef();
    }
    return cell->buffer;
  }
  // And its producer's. That run reserved the memory for itself, or was promised it. A reader that
  // waits for it has no reference, and comes when the next run may have written there already.
  RunState* const producer = runs_->Find(cell->producer);
  if (cell->settled() || producer == nullptr || cell.use_count() != 3 ||
      cell->value_id != Hash128() || !cell->on_settled.empty()) {
    return BufferRef();
  }
  const Plan::Output& output = producer->plan->plan.outputs[static_cast<size_t>(cell->output)];
  if (!output.sole) return BufferRef();
  return producer->refs[static_cast<size_t>(output.buffer)];
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
    const Plan::Output& output = plan.outputs[o];
    if (output.donor < 0 || !command.donate[static_cast<size_t>(output.donor)] ||
        output.bytes == 0 || run->outputs[o] == nullptr) {
      continue;
    }
    const CellRef& cell = run->inputs[static_cast<size_t>(output.donor)];
    if (cell == nullptr) continue;
    BufferRef buffer = SoleBufferOf(cell);
    if (!buffer || buffer->bytes() != output.bytes) continue;
    cell->donated_to = run->sequence;
    const TensorId id = absl::get<TensorId>(command.inputs[static_cast<size_t>(output.donor)]);
    run->donations.push_back({output.donor, id});
    run->addresses[static_cast<size_t>(output.buffer)] = buffer->address();
    run->refs[static_cast<size_t>(output.buffer)] = std::move(buffer);
  }
  run->vote.donates = !run->donations.empty();
  return absl::OkStatus();
}

// What the names of what the run was given stand for: one error, however many these are, so that no
// others are forgotten for it.
std::shared_ptr<const Error> Donations::Tell(const RunState& run, absl::string_view what) {
  Error error =
      ErrorOf(MakeError(Reason::kDonated, absl::StrCat("the tensor was donated to run ",
                                                       run.sequence.value(), ", ", what)));
  errors_->Record(run.session->tenant->name, &error);
  return run.session->names.Keep(std::move(error));
}

void Donations::NameDonated(RunState* run, const RunState::Donation& donation,
                            const std::shared_ptr<const Error>& error) {
  const CellRef& donated = run->inputs[static_cast<size_t>(donation.input)];
  auto replacement = std::make_shared<Cell>();
  replacement->state = Cell::State::kFailed;
  replacement->error = error;
  replacement->type = donated->type;
  replacement->device = donated->device;
  run->session->names.ReplaceTensor(donation.id, std::move(replacement));
}

void Donations::Take(RunState* run) {
  run->donated = !run->donations.empty();
  if (!run->donated) return;
  CountWork(static_cast<int64_t>(run->donations.size()) / kDonationsOfWork);
  const std::shared_ptr<const Error> error = Tell(*run, "whose result has its memory");
  for (const RunState::Donation& donation : run->donations) {
    const Cell& cell = *run->inputs[static_cast<size_t>(donation.input)];
    cell.buffer->set_state(Buffer::State::kResult);
    cell.buffer->DropMirrors();  // of what stood there
    NameDonated(run, donation, error);
  }
}

void Donations::Return(RunState* run) {
  if (run->donations.empty()) return;
  CountWork(static_cast<int64_t>(run->donations.size()) / kDonationsOfWork);
  const bool is_lost = run->donated && !run->held_back;
  const std::shared_ptr<const Error> error =
      is_lost ? Tell(*run, "which failed after it had written there") : nullptr;
  for (const RunState::Donation& donation : run->donations) {
    if (is_lost) {
      NameDonated(run, donation, error);
      continue;
    }
    const CellRef& cell = run->inputs[static_cast<size_t>(donation.input)];
    cell->donated_to = Sequence();
    if (run->donated) run->session->names.ReplaceTensor(donation.id, cell);
  }
  run->donations.clear();
}

}  // namespace chorus::node
