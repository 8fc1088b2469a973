#include "server/admin/capabilities_service.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "chorus/v1/capabilities.grpc.pb.h"
#include "core/graph/graph.h"
#include "core/ops/registry.h"
#include "core/tensor/type.h"
#include "core/transport/command.h"
#include "proto/convert/api_version.h"
#include "proto/convert/convert.h"
#include "server/service/call.h"
#include "server/service/methods.h"

namespace chorus::server {
namespace {

void Fill(const ServiceContext& service, const std::vector<node::DeviceInfo>& devices,
          v1::GetCapabilitiesResponse* to) {
  to->set_oldest_api_version(kApiVersion);
  to->set_newest_api_version(kApiVersion);
  to->set_daemon_version(kDaemonVersion);
  to->set_incarnation(service.incarnation);
  to->set_backend(service.backend);
  for (const OpDef* op : AllOps()) {
    v1::GetCapabilitiesResponse::Op* entry = to->add_ops();
    entry->set_name(std::string(op->name));
    entry->set_version(op->version);
  }
  for (const CollectiveFacts& facts : kCollectives) {
    if (IsCollectiveKind(facts.kind)) to->add_collectives(ToProto(facts.kind));
  }
  for (int i = v1::DType_MIN + 1; i <= v1::DType_MAX; ++i) {
    if (IsSupported(static_cast<DType>(i))) to->add_dtypes(static_cast<v1::DType>(i));
  }
  for (int i = 1; i <= static_cast<int>(kLastReduction); ++i) {
    to->add_reductions(static_cast<v1::Reduction>(i));
  }
  to->add_transports(v1::TRANSPORT_UNARY);
  to->add_transports(v1::TRANSPORT_STREAM);
  if (service.attach != nullptr) to->add_transports(v1::TRANSPORT_RING);
  to->set_max_inline_bytes(InlineData::kMaxBytes);
  to->set_max_frame_bytes(kMaxFrameBytes);
  to->set_max_chunk_bytes(node::kMaxChunkBytes);
  to->set_newest_ir_version(Graph::kIrVersion);
  to->set_max_tensors(service.max_tensors);
  to->set_max_graphs(service.max_graphs);
  to->set_attach_path(service.attach_path);
  for (const node::DeviceInfo& info : devices) {
    v1::GetCapabilitiesResponse::Device* device = to->add_devices();
    device->set_device(info.index.value());
    device->set_name(info.name);
    device->set_memory_bytes(info.memory_bytes);
    device->set_core_count(info.cores);
  }
}

void OnGet(const CallRef<v1::GetCapabilitiesResponse>& call, const v1::GetCapabilitiesRequest&) {
  const ServiceContext* const service = call->service();
  call->Post([service, call](node::LocalNode& node, absl::Time) {
    call->Reply(absl::OkStatus(),
                [service, devices = node.Devices("")](v1::GetCapabilitiesResponse* to) {
                  Fill(*service, devices, to);
                });
  });
}

}  // namespace

std::unique_ptr<grpc::Service> MakeCapabilitiesService(const ServiceContext* context) {
  auto service = std::make_unique<Methods<v1::Capabilities>>(context);
  (*service).Unary("Get", &OnGet);
  return service;
}

}  // namespace chorus::server
