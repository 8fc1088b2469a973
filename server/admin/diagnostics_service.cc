#include "server/admin/diagnostics_service.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "chorus/v1/diagnostics.grpc.pb.h"
#include "core/base/clock.h"
#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/durations.h"
#include "server/service/methods.h"
#include "server/service/show.h"

namespace chorus::server {
namespace {

v1::SessionState StateTo(node::SessionState state) {
  switch (state) {
    case node::SessionState::kActive:
      return v1::SESSION_STATE_ACTIVE;
    case node::SessionState::kDetached:
      return v1::SESSION_STATE_DETACHED;
    case node::SessionState::kDead:
      return v1::SESSION_STATE_DEAD;
  }
  return v1::SESSION_STATE_UNSPECIFIED;
}

void SessionTo(int64_t incarnation, const node::SessionInfo& info,
               v1::ListSessionsResponse::Session* message) {
  message->set_session(WireSession(incarnation, info.id));
  message->set_tenant(info.tenant);
  message->set_label(info.label);
  if (info.pid >= 0) message->set_pid(info.pid);
  message->set_attached(info.attached);
  message->set_state(StateTo(info.state));
  for (DeviceIndex device : info.devices) message->add_devices(device.value());
  message->set_tensor_count(info.live_tensors);
  message->set_graph_count(info.live_graphs);
  message->set_staging_bytes(info.staging_bytes);
  message->set_command_count(info.commands);
  if (!info.attached) DurationTo(info.lease_left, message->mutable_lease_left());
}

void PendingTo(const node::PendingView& view, v1::ListPendingResponse::Pending* message) {
  message->set_world(view.world.value());
  message->set_world_name(view.world_name);
  ToProto(view.instance.key, message->mutable_instance());
  message->set_what(Utf8(view.instance.what));
  for (Rank rank : view.instance.voted) message->add_voted_ranks(rank.value());
  for (Rank rank : view.instance.missing) message->add_missing_ranks(rank.value());
  DurationTo(view.instance.waiting, message->mutable_waiting());
  message->set_source(Utf8(view.instance.source));
}

void EventTo(int64_t incarnation, const node::FlightEvent& event,
             v1::ListFlightEventsResponse::Event* message) {
  const int64_t nanos = absl::ToUnixNanos(WallTime(event.time));
  message->mutable_time()->set_seconds(nanos / 1'000'000'000);
  message->mutable_time()->set_nanos(static_cast<int32_t>(nanos % 1'000'000'000));
  message->set_kind(static_cast<v1::FlightKind>(static_cast<int>(event.kind)));
  message->set_session(WireSessionOrZero(incarnation, event.session));
  message->set_world(event.world.value());
  message->set_sequence(event.sequence.value());
  message->set_ticket(event.ticket.value());
  message->set_epoch(event.epoch.value());
  message->set_error_id(event.error.value());
}

void OnListDevices(const CallRef<v1::ListDevicesResponse>& call, const v1::ListDevicesRequest&) {
  Show(
      call,
      [](node::LocalNode& node, absl::Time, const std::string& sees) { return node.Devices(sees); },
      [](const std::vector<node::DeviceInfo>& devices, v1::ListDevicesResponse* to) {
        for (const node::DeviceInfo& info : devices) {
          v1::ListDevicesResponse::Device* device = to->add_devices();
          device->set_device(info.index.value());
          device->set_name(info.name);
          device->set_launch_count(info.launches);
          device->set_session_count(info.sessions);
        }
      });
}

void OnListSessions(const CallRef<v1::ListSessionsResponse>& call, const v1::ListSessionsRequest&) {
  const ServiceContext* const service = call->service();
  ShowList(
      call,
      [](node::LocalNode& node, absl::Time now, const std::string& sees) {
        return node.Sessions(sees, now);
      },
      [service](const std::vector<node::SessionInfo>& sessions, v1::ListSessionsResponse* to) {
        for (const node::SessionInfo& info : sessions) {
          SessionTo(service->incarnation, info, to->add_sessions());
        }
      });
}

void OnListPending(const CallRef<v1::ListPendingResponse>& call, const v1::ListPendingRequest&) {
  ShowList(
      call,
      [](node::LocalNode& node, absl::Time now, const std::string& sees) {
        return node.Pending(sees, now);
      },
      [](const node::Listing<node::PendingView>& views, v1::ListPendingResponse* to) {
        for (const node::PendingView& view : views.rows) PendingTo(view, to->add_pending());
        to->set_truncated(views.truncated);
      });
}

void OnGetError(const CallRef<v1::GetErrorResponse>& call, const v1::GetErrorRequest& request) {
  Show(
      call,
      [id = ErrorId(request.error_id())](node::LocalNode& node, absl::Time,
                                         const std::string& sees) {
        return node.FindError(id, sees);
      },
      [](const absl::StatusOr<Error>& error, v1::GetErrorResponse* to) {
        ToProto(*error, to->mutable_error());
      });
}

void OnListFlightEvents(const CallRef<v1::ListFlightEventsResponse>& call,
                        const v1::ListFlightEventsRequest& request) {
  const ServiceContext* const service = call->service();
  ShowList(
      call,
      [limit = request.limit()](node::LocalNode& node, absl::Time, const std::string& sees) {
        return node.Flight(sees, limit);
      },
      [service](const absl::StatusOr<std::vector<node::FlightEvent>>& events,
                v1::ListFlightEventsResponse* to) {
        for (const node::FlightEvent& event : *events) {
          EventTo(service->incarnation, event, to->add_events());
        }
      });
}

void OnGetStats(const CallRef<v1::GetStatsResponse>& call, const v1::GetStatsRequest&) {
  Show(
      call,
      [](node::LocalNode& node, absl::Time, const std::string& sees) { return node.Stats(sees); },
      [](const node::NodeStats& stats, v1::GetStatsResponse* to) {
        to->set_memory_limit_bytes(stats.memory_limit_bytes);
        to->set_memory_used_bytes(stats.memory_used_bytes);
        to->set_published_run_count(stats.runs_published);
        to->set_failed_run_count(stats.runs_failed);
        to->set_aliased_bytes(stats.paths.aliased_bytes);
        to->set_reduced_bytes(stats.paths.reduced_bytes);
        to->set_copied_bytes(stats.paths.copied_bytes);
        to->set_streamed_bytes(stats.paths.streamed_bytes);
        to->set_donated_bytes(stats.paths.donated_bytes);
        to->set_shared_bytes(stats.paths.shared_bytes);
        to->set_shared_op_count(stats.shared_kernels);
        to->set_live_run_count(stats.live_runs);
        to->set_live_buffer_count(stats.live_buffers);
        to->set_loaded_plan_count(stats.loaded_plans);
        to->set_agreement_row_count(stats.agreement_rows);
        to->set_given_up_gradient_count(stats.gradients_given_up);
        to->set_client_held_bytes(stats.client_held_bytes);
        to->set_idle_bytes(stats.idle_bytes);
        to->set_largest_slice_work(stats.largest_slice_work);
      });
}

}  // namespace

std::unique_ptr<grpc::Service> MakeDiagnosticsService(const ServiceContext* context) {
  auto service = std::make_unique<Methods<v1::Diagnostics>>(context);
  (*service)
      .Unary("ListDevices", &OnListDevices)
      .Unary("ListSessions", &OnListSessions)
      .Unary("ListPending", &OnListPending)
      .Unary("GetError", &OnGetError)
      .Unary("ListFlightEvents", &OnListFlightEvents)
      .Unary("GetStats", &OnGetStats);
  return service;
}

}  // namespace chorus::server
