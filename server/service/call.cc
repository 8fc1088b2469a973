#include "server/service/call.h"

#include <string>
#include <utility>

namespace chorus::server {

void ForSessionOf(const ServiceContext& context, const Caller& caller, int64_t name,
                  SessionTask task, std::function<void(absl::Status)> refuse,
                  absl::FunctionRef<void(node::NodeLoop::Task task)> post) {
  const absl::StatusOr<SessionId> session = ParseSession(context.incarnation, name);
  if (!session.ok()) return refuse(session.status());
  post([tenant = caller.tenant, name, id = *session, task = std::move(task),
        refuse = std::move(refuse)](node::LocalNode& node, absl::Time now) {
    const absl::StatusOr<std::string> owner = node.TenantOf(id);
    if (!owner.ok() || *owner != tenant) return refuse(SessionLost(name));
    const absl::Status status = node.RenewLease(id, now);
    if (!status.ok()) return refuse(status);
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
