#include "server/service/call.h"

#include <string>
#include <utility>

namespace chorus::server {

void ForSessionOf(const ServiceContext& context, const Caller& caller, int64_t name,
                  HoldSession hold, SessionTask task, std::function<void(absl::Status)> refuse,
                  absl::FunctionRef<void(node::NodeLoop::Task task)> post) {
  const absl::StatusOr<SessionId> session = ParseSession(context.incarnation, name);
  if (!session.ok()) return refuse(session.status());
  post([tenant = caller.tenant, name, id = *session, hold = std::move(hold), task = std::move(task),
        refuse = std::move(refuse)](node::LocalNode& node, absl::Time now) {
    const absl::StatusOr<std::string> owner = node.TenantOf(id);
    if (!owner.ok() || *owner != tenant) return refuse(SessionLost(name));
    const absl::StatusOr<absl::Duration> lease = node.RenewLease(id, now);
    if (!lease.ok()) return refuse(lease.status());
    hold(id, *lease);
    task(node, now, id);
  });
}

absl::Status CallTimedOut() {
  return MakeError(
      Reason::kTransportTimeout,
      "the call's deadline has passed; a command goes on (Log.Wait tells its outcome), "
      "and a rank that waited in Join or Reform has not asked");
}

}  // namespace chorus::server
