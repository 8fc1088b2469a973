#include "absl/strings/str_cat.h"
#include "benchmarks/grpc_round_trip.h"
#include "benchmarks/handoff.h"
#include "benchmarks/memory_floor.h"
#include "benchmarks/suites.h"
#include "core/base/error.h"

namespace chorus {
namespace bench {
namespace {

absl::Status MeasureHandoffs(const Context& context) {
  for (const int ranks : context.ranks) {
    CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<HandoffGroup> handoff,
                            HandoffGroup::Start(*context.scratch, ranks));
    std::vector<Contender> contenders;
    for (const char* op : {"yield", "futex", "ring"}) {
      HandoffGroup* const group = handoff.get();
      contenders.push_back({absl::StrCat("by ", op), Role::kFloor, {{"", [group, op](int64_t n) {
                                                                       return group->Run(op, n);
                                                                     }}}});
    }
    CHORUS_ASSIGN_OR_RETURN(std::vector<Measured> measured,
                            MeasureInterleaved(contenders, context.Interleave()));
    Case c;
    c.benchmark = "floor";
    c.what = "hand-off";
    c.ranks = ranks;
    context.report->Add(c, std::move(measured));
  }
  context.Show();
  return absl::OkStatus();
}

absl::Status MeasureGrpc(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<GrpcRoundTrip> grpc,
                          GrpcRoundTrip::Start(*context.scratch));
  CHORUS_ASSIGN_OR_RETURN(
      std::vector<Measured> measured,
      MeasureInterleaved({{"health check over a Unix socket",
                           Role::kFloor,
                           {{"", [&grpc](int64_t n) { return grpc->Run(n); }}}}},
                         context.Interleave()));
  Case c;
  c.benchmark = "floor";
  c.what = "gRPC call";
  context.report->Add(c, std::move(measured));
  context.Show();
  return absl::OkStatus();
}

absl::Status MeasureMemory(const Context& context) {
  CHORUS_ASSIGN_OR_RETURN(std::unique_ptr<MemoryFloor> memory,
                          MemoryFloor::Start(*context.scratch));
  for (const int ranks : context.ranks) {
    for (const int64_t bytes :
         context.Sizes({64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20}, 2 * ranks)) {
      // One memory is held at a time, so these two cannot take turns.
      for (const int outputs : {1, ranks}) {
        CHORUS_ASSIGN_OR_RETURN(
            std::vector<Measured> measured,
            MeasureInterleaved({memory->AsContender(ranks, outputs, bytes)}, context.Interleave()));
        Case c;
        c.benchmark = "floor";
        c.what = "memory";
        c.ranks = ranks;
        c.bytes = bytes;
        c.moved_bytes = static_cast<double>(bytes) * (ranks + outputs);
        context.report->Add(c, std::move(measured));
      }
    }
    context.Show();
  }
  return memory->Forget();
}

}  // namespace

absl::Status RunFloor(const Context& context) {
  CHORUS_RETURN_IF_ERROR(MeasureHandoffs(context));
  CHORUS_RETURN_IF_ERROR(MeasureGrpc(context));
  return MeasureMemory(context);
}

}  // namespace bench
}  // namespace chorus
