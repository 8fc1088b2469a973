#include "core/worker/protocol.h"

#include <string>
#include <vector>

#include "core/base/error.h"
#include "gtest/gtest.h"

namespace chorus::worker {
namespace {

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
          Launch{0, "launch"},
          Settled{0, LaunchId(5), TransferId(6)},
          Upload{0, TransferId(8), 4096, 7, 100, true},
          Download{0, TransferId(8), 4096, 100, LaunchId(3)},
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
          Workspace{11, absl::OkStatus(), 4096},
          Pong()};
}

// Equal bytes of what was decoded show that no field was left out.
template <typename Messages, typename Decode>
void CheckEach(const std::vector<Messages>& messages, Decode decode) {
  ASSERT_EQ(messages.size(), absl::variant_size<Messages>::value) << "one of each kind";
  for (size_t i = 0; i < messages.size(); ++i) {
    EXPECT_EQ(messages[i].index(), i);
    const std::string bytes = Bytes(messages[i]);
    const auto decoded = decode(bytes);
    ASSERT_TRUE(decoded.ok()) << i << ": " << decoded.status();
    EXPECT_EQ(decoded->index(), i);
    EXPECT_EQ(Bytes(*decoded), bytes) << i;
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
      *DecodeToWorker(Bytes(ToWorker(Upload{3, TransferId(8), 4096, 7, 100, true}))));
  EXPECT_EQ(upload.device, 3);
  EXPECT_EQ(upload.transfer, TransferId(8));
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
