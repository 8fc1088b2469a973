// What docs/grpcurl.md needs of grpcurl, which Debian does not package: the same options, the same
// protocol (server reflection, then JSON to dynamic messages), the same output. So the test runs
// the commands of the page as they stand there.
//
//   grpcurl -plaintext [-unix] [-max-time SECONDS] [-d JSON] ADDRESS list [SERVICE]
//   grpcurl ... ADDRESS describe SYMBOL
//   grpcurl ... ADDRESS SERVICE/METHOD
//
// It knows nothing of Chorus: no message of proto/chorus is linked.

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "google/protobuf/dynamic_message.h"
#include "google/protobuf/util/json_util.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "testing/reflection.grpc.pb.h"

namespace {

namespace reflection = grpc::reflection::v1alpha;

struct Options {
  bool unix_socket = false;
  std::string data;
  int max_seconds = 60;
  std::vector<std::string> words;
};

[[noreturn]] void Die(const std::string& text, int code = 1) {
  std::cerr << text << std::endl;
  exit(code);
}

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "-plaintext") continue;
    if (word == "-unix") {
      options.unix_socket = true;
    } else if ((word == "-d" || word == "-max-time") && i + 1 < argc) {
      const std::string value = argv[++i];
      if (word == "-d") {
        options.data = value;
      } else {
        options.max_seconds = atoi(value.c_str());
      }
    } else if (!word.empty() && word[0] == '-') {
      Die("grpcurl: this stand-in does not know " + word);
    } else {
      options.words.push_back(word);
    }
  }
  if (options.words.size() < 2) Die("grpcurl: expected ADDRESS and a verb or method");
  return options;
}

// Descriptors of a server, by reflection.
class Reflection {
 public:
  explicit Reflection(const std::shared_ptr<grpc::Channel>& channel, int max_seconds)
      : stub_(reflection::ServerReflection::NewStub(channel)) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(max_seconds));
    stream_ = stub_->ServerReflectionInfo(&context_);
  }

  std::vector<std::string> Services() {
    reflection::ServerReflectionRequest request;
    request.set_list_services("*");
    const reflection::ServerReflectionResponse response = Ask(request);
    std::vector<std::string> names;
    for (const auto& service : response.list_services_response().service()) {
      names.push_back(service.name());
    }
    return names;
  }

  // After this the pool knows `symbol`.
  void Load(const std::string& symbol) {
    reflection::ServerReflectionRequest request;
    request.set_file_containing_symbol(symbol);
    AddAll(Ask(request).file_descriptor_response());
  }

  const google::protobuf::DescriptorPool& pool() const { return pool_; }

 private:
  reflection::ServerReflectionResponse Ask(const reflection::ServerReflectionRequest& request) {
    reflection::ServerReflectionResponse response;
    if (!stream_->Write(request) || !stream_->Read(&response)) {
      const grpc::Status status = stream_->Finish();
      Die("Failed to reach the server: " + status.error_message());
    }
    if (response.has_error_response()) Die(response.error_response().error_message());
    return response;
  }

  void AddAll(const reflection::FileDescriptorResponse& response) {
    for (const std::string& bytes : response.file_descriptor_proto()) {
      google::protobuf::FileDescriptorProto file;
      if (!file.ParseFromString(bytes)) Die("grpcurl: the server sent no file descriptor");
      Add(file);
    }
  }

  // Dependencies first: the pool takes no file without them.
  void Add(const google::protobuf::FileDescriptorProto& file) {
    if (!added_.insert(file.name()).second) return;
    for (const std::string& dependency : file.dependency()) {
      if (added_.count(dependency) > 0) continue;
      reflection::ServerReflectionRequest request;
      request.set_file_by_filename(dependency);
      AddAll(Ask(request).file_descriptor_response());
    }
    if (pool_.BuildFile(file) == nullptr) Die("grpcurl: " + file.name() + " does not build");
  }

  std::unique_ptr<reflection::ServerReflection::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<reflection::ServerReflectionRequest,
                                           reflection::ServerReflectionResponse>>
      stream_;
  google::protobuf::DescriptorPool pool_;
  std::set<std::string> added_;
};

// The JSON objects that stand one after another in `text`.
std::vector<std::string> SplitObjects(const std::string& text) {
  std::vector<std::string> objects;
  int depth = 0;
  bool quoted = false;
  size_t start = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == '{' && depth++ == 0) {
      start = i;
    } else if (c == '}' && --depth == 0) {
      objects.push_back(text.substr(start, i + 1 - start));
    }
  }
  return objects;
}

// Waits for the operation that was just started on `queue`.
bool Next(grpc::CompletionQueue* queue) {
  void* tag = nullptr;
  bool ok = false;
  return queue->Next(&tag, &ok) && ok;
}

grpc::ByteBuffer Serialize(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

bool Deserialize(grpc::ByteBuffer* buffer, google::protobuf::Message* message) {
  std::vector<grpc::Slice> slices;
  if (!buffer->Dump(&slices).ok()) return false;
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return message->ParseFromString(bytes);
}

const char* CodeName(grpc::StatusCode code) {
  static const char* const kNames[] = {
      "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
      "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
      "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
      "DataLoss", "Unauthenticated"};
  return code >= 0 && code <= 16 ? kNames[code] : "Code";
}

int Invoke(const Options& options, const std::shared_ptr<grpc::Channel>& channel,
           Reflection* server, const std::string& name) {
  const size_t slash = name.rfind('/');
  const std::string service_name = name.substr(0, slash);
  server->Load(service_name);
  const auto* service = server->pool().FindServiceByName(service_name);
  const auto* method =
      service == nullptr ? nullptr : service->FindMethodByName(name.substr(slash + 1));
  if (method == nullptr) Die("service or method " + name + " not found");

  google::protobuf::DynamicMessageFactory factory;
  std::vector<grpc::ByteBuffer> requests;
  std::vector<std::string> texts = SplitObjects(options.data);
  if (texts.empty() && !method->client_streaming()) texts.push_back("{}");
  for (const std::string& text : texts) {
    std::unique_ptr<google::protobuf::Message> request(
        factory.GetPrototype(method->input_type())->New());
    const auto status = google::protobuf::util::JsonStringToMessage(text, request.get());
    if (!status.ok()) {
      Die("Error invoking method \"" + name +
          "\": error getting request data: " + status.message().ToString());
    }
    requests.push_back(Serialize(*request));
  }

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::seconds(options.max_seconds));
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  auto call = stub.PrepareCall(&context, "/" + name, &queue);
  call->StartCall(nullptr);
  bool ok = Next(&queue);
  for (size_t i = 0; ok && i < requests.size(); ++i) {
    call->Write(requests[i], nullptr);
    ok = Next(&queue);
  }
  if (ok) {
    call->WritesDone(nullptr);
    ok = Next(&queue);
  }
  while (ok) {
    grpc::ByteBuffer buffer;
    call->Read(&buffer, nullptr);
    if (!(ok = Next(&queue))) break;
    std::unique_ptr<google::protobuf::Message> response(
        factory.GetPrototype(method->output_type())->New());
    std::string json;
    google::protobuf::util::JsonPrintOptions print;
    print.add_whitespace = true;
    if (!Deserialize(&buffer, response.get()) ||
        !google::protobuf::util::MessageToJsonString(*response, &json, print).ok()) {
      Die("grpcurl: the response does not decode");
    }
    std::cout << json << std::flush;
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  Next(&queue);
  if (status.ok()) return 0;
  std::cerr << "ERROR:\n  Code: " << CodeName(status.error_code())
            << "\n  Message: " << status.error_message() << std::endl;
  return 64 + status.error_code();
}

int Describe(Reflection* server, const std::string& symbol) {
  // A method's file is found by its service.
  server->Load(symbol);
  const auto& pool = server->pool();
  std::cout << symbol << " is ";
  if (const auto* service = pool.FindServiceByName(symbol)) {
    std::cout << "a service:\n" << service->DebugString();
  } else if (const auto* method = pool.FindMethodByName(symbol)) {
    std::cout << "a method:\n" << method->DebugString();
  } else if (const auto* message = pool.FindMessageTypeByName(symbol)) {
    std::cout << "a message:\n" << message->DebugString();
  } else if (const auto* an_enum = pool.FindEnumTypeByName(symbol)) {
    std::cout << "an enum:\n" << an_enum->DebugString();
  } else {
    Die("Symbol not found: " + symbol);
  }
  return 0;
}

int List(Reflection* server, const std::string& service_name) {
  if (service_name.empty()) {
    std::set<std::string> sorted;
    for (std::string& name : server->Services()) sorted.insert(std::move(name));
    for (const std::string& name : sorted) std::cout << name << "\n";
    return 0;
  }
  server->Load(service_name);
  const auto* service = server->pool().FindServiceByName(service_name);
  if (service == nullptr) Die("Service not found: " + service_name);
  std::set<std::string> sorted;
  for (int i = 0; i < service->method_count(); ++i) {
    sorted.insert(service->method(i)->full_name());
  }
  for (const std::string& name : sorted) std::cout << name << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  const std::string address = (options.unix_socket ? "unix:" : "") + options.words[0];
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  Reflection server(channel, options.max_seconds);
  const std::string& verb = options.words[1];
  const std::string operand = options.words.size() > 2 ? options.words[2] : "";
  if (verb == "list") return List(&server, operand);
  if (verb == "describe") return Describe(&server, operand);
  return Invoke(options, channel, &server, verb);
}
