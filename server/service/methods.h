// The RPCs of a service, as functions that get messages.
//
// Every one of them is a stream for gRPC, also where clients see a unary call or a stream one way.
// gRPC makes a call of a unary RPC when all of its request has come, and nobody counts what has
// come until then. A stream is a call from its headers on: it is counted, and its request is read
// when it is its turn (request_call.h).
//
// Threads: made before the server starts; functions are called on gRPC's threads. They parse,
// convert and post; nothing in them waits but for room, that of parsing (parsed.h) last. Ownership:
// `context` outlives it. Errors: a request that does not parse ends its call; all else the
// functions reply.
#ifndef CHORUS_SERVER_SERVICE_METHODS_H_
#define CHORUS_SERVER_SERVICE_METHODS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "google/protobuf/descriptor.h"
#include "grpcpp/impl/codegen/server_callback_handlers.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/byte_buffer.h"
#include "server/service/call.h"
#include "server/service/context.h"
#include "server/service/parsed.h"

namespace chorus::server {

// `Rpcs`: "v1::Sessions".
template <typename Rpcs>
class Methods : public Rpcs::Service {
 public:
  explicit Methods(const ServiceContext* context) : context_(context) {}

  // What `handle` needs after it has returned it takes out of the request. `most`: bytes of one.
  template <typename Request, typename Response>
  using Handle = void (*)(const CallRef<Response>& call, const Request& request);
  template <typename Request, typename Response>
  Methods& Unary(const char* name, Handle<Request, Response> handle,
                 int64_t most = kMaxRequestBytes) {
    typename Call<Response>::OnRequest on_request = [handle, most](const CallRef<Response>& call,
                                                                   grpc::ByteBuffer* bytes) {
      const Parsed<Request> request(call->service()->parsing, bytes, most);
      if (!request.ok()) return call->Reply(request.status());
      handle(call, *request);
    };
    return Raw<Response>(name, std::move(on_request));
  }
  // One that parses its request itself.
  template <typename Response>
  Methods& Raw(const char* name, typename Call<Response>::OnRequest on_request) {
    return Stream(name,
                  [context = context_, on_request = std::move(on_request)](
                      grpc::CallbackServerContext* call) -> ByteStream* {
                    return Call<Response>::Start(context, call, &on_request);
                  });
  }

  using StartStream = std::function<ByteStream*(grpc::CallbackServerContext* call)>;
  Methods& Stream(const char* name, const StartStream& start) {
    const int index = google::protobuf::DescriptorPool::generated_pool()
                          ->FindServiceByName(Rpcs::service_full_name())
                          ->FindMethodByName(name)
                          ->index();
    using Handler = grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>;
    // The first makes a stream of it, the second lets a reactor serve it.
    this->MarkMethodStreamed(index, new Handler(start));
    this->MarkMethodRawCallback(index, new Handler(start));
    return *this;
  }

 private:
  const ServiceContext* const context_;
};

}  // namespace chorus::server

#endif  // CHORUS_SERVER_SERVICE_METHODS_H_
