#include "core/worker/protocol.h"

#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "core/base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus::worker {
namespace {

using ::testing::Each;

template <typename Messages>
std::string Bytes(const Messages& message) {
  ByteWriter out;
  Encode(message, &out);
  return out.Take();
}

std::vector<ToWorker> EachToWorker() {
  OpenCommunicator open;
  open.device = 1;
  open.communicator = CommunicatorId(9);
  open.member = 2;
  open.devices = {3, 1, 2};
  return {MapMemory{1, DeviceAddress{1} << 44, int64_t{1} << 33},
          UnmapMemory{1, DeviceAddress{1} << 44},
          LoadPlan{2, PlanId(7), "plan"},
          UnloadPlan{2, PlanId(7)},
          open,
          AbortCommunicator{1, CommunicatorId(9), MakeError(Reason::kPeerDied, "rank 1 died")},
          CloseCommunicator{1, CommunicatorId(9)},
          Launch{1, "launch"},
          Settled{1, LaunchId(5), TransferId(6)},
          Upload{2, TransferId(8), 5, 4096, 7, 100, true},
          Download{2, TransferId(8), 5, 4096, 100, LaunchId(3)},
          FreeSlot{3},
          AskWorkspace{11, "node"},
          Ping(),
          Stop(),
          Abandon{1, LaunchId(5)}};
}

std::vector<ToDaemon> EachToDaemon() {
  Ready ready;
  ready.info.backend = "sim";
  ready.info.domains = {0, 0, 1};
  ready.info.cores_per_device = 132;
  return {ready,
          NotReady{MakeError(Reason::kWrongState, "no GPU")},
          Event{2, "event"},
          Uploaded{3},
          Downloaded{1, TransferId(4), 5, 6, 7},
          Workspace{11, MakeError(Reason::kWrongState, "no GPU"), 4096},
          Pong()};
}

// How many members a struct has: as many as it can be made of, at most.
struct AnyMember {
  template <typename T>
  operator T() const;
};
template <typename T, typename = void, typename... Members>
struct MembersOf : std::integral_constant<size_t, sizeof...(Members) - 1> {};
template <typename T, typename... Members>
struct MembersOf<T, std::void_t<decltype(T{Members()...})>, Members...>
    : MembersOf<T, void, Members..., AnyMember> {};

template <typename T>
bool Same(const T& a, const T& b) {
  return a == b;
}
bool Same(const absl::Status& a, const absl::Status& b) {
  return ErrorOf(a).reason == ErrorOf(b).reason && ErrorOf(a).message == ErrorOf(b).message;
}

// Every member is a field, every field is as it was sent, and none was sent as it is anyway.
template <typename T>
void CheckFields(const T& got, const T& sent) {
  const T untouched{};
  const auto with_sent = [&](const auto&... s) {
    const auto with_got = [&](const auto&... g) {
      EXPECT_THAT((std::vector<bool>{Same(g, s)...}), Each(true));
      const auto with_untouched = [&](const auto&... u) {
        EXPECT_THAT((std::vector<bool>{Same(u, s)...}), Each(false));
      };
      T::Fields(untouched, with_untouched);
    };
    T::Fields(got, with_got);
    // What it has is a struct of another library, of which the worker tells some.
    if (std::is_same<T, Ready>::value) return;
    EXPECT_EQ(sizeof...(s), MembersOf<T>::value) << "fields and members";
  };
  T::Fields(sent, with_sent);
}

template <typename Messages, typename Decode>
void CheckEach(const std::vector<Messages>& messages, Decode decode) {
  ASSERT_EQ(messages.size(), absl::variant_size<Messages>::value) << "one of each kind";
  for (size_t i = 0; i < messages.size(); ++i) {
    EXPECT_EQ(messages[i].index(), i);
    const std::string bytes = Bytes(messages[i]);
    const auto decoded = decode(bytes);
    ASSERT_TRUE(decoded.ok()) << i << ": " << decoded.status();
    ASSERT_EQ(decoded->index(), i);
    EXPECT_EQ(Bytes(*decoded), bytes) << i;
    SCOPED_TRACE(i);
    absl::visit(
        [&decoded](const auto& sent) {
          CheckFields(absl::get<std::decay_t<decltype(sent)>>(*decoded), sent);
        },
        messages[i]);
  }
  for (const std::string& bytes : {std::string(), std::string("\x7f"), std::string(40, '\xff')}) {
    EXPECT_EQ(ErrorOf(decode(bytes).status()).reason, Reason::kMalformed);
  }
}

TEST(ProtocolTest, EachMessageDecodesToItself) {
  CheckEach(EachToWorker(), DecodeToWorker);
  CheckEach(EachToDaemon(), DecodeToDaemon);
}

TEST(ProtocolTest, FieldsComeBack) {
  const auto upload = absl::get<Upload>(
      *DecodeToWorker(Bytes(ToWorker(Upload{3, TransferId(8), 5, 4096, 7, 100, true}))));
  EXPECT_EQ(upload.device, 3);
  EXPECT_EQ(upload.transfer, TransferId(8));
  EXPECT_EQ(upload.lane, 5);
  EXPECT_EQ(upload.to, 4096u);
  EXPECT_EQ(upload.slot, 7);
  EXPECT_EQ(upload.bytes, 100);
  EXPECT_TRUE(upload.is_last);
  const std::string bytes =
      Bytes(ToWorker(AbortCommunicator{1, CommunicatorId(9), MakeError(Reason::kPeerDied, "x")}));
  EXPECT_EQ(ErrorOf(absl::get<AbortCommunicator>(*DecodeToWorker(bytes)).why).reason,
            Reason::kPeerDied);
}

// What ends early, where no field takes the rest, is no message.
TEST(ProtocolTest, NothingOfAMessageMayBeMissing) {
  for (const ToWorker& message : EachToWorker()) {
    const bool takes_rest = absl::holds_alternative<LoadPlan>(message) ||
                            absl::holds_alternative<Launch>(message) ||
                            absl::holds_alternative<AskWorkspace>(message);
    if (takes_rest) continue;
    const std::string bytes = Bytes(message);
    EXPECT_FALSE(DecodeToWorker(bytes.substr(0, bytes.size() - 1)).ok()) << message.index();
    EXPECT_FALSE(DecodeToWorker(bytes + '\0').ok()) << message.index();
  }
}

}  // namespace
}  // namespace chorus::worker
