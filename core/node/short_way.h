// The short way of the usual run: one small collective whose operands are there, which all ranks of
// its group call alike.
//
// A session's runs of one graph and group have a *template* from the first one on: that the graph
// is one such collective, what it agrees with and whose part it is, is found out once. Each of them
// then stands at the *meeting point* of its group until all members' do. The last one's arrival
// carries them out in one piece: memory, positions (Agreement::Meet), the work (CollectiveAtOnce),
// names and outcomes, without rows, votes, actions and launches of their own.
//
// It decides nothing that the general way would decide otherwise, and knows no errors. Whatever is
// not as usual, or concerns a world or a session of which somebody stands here, has them make way
// first: they go the general way (Commands, Runs), in the order and as of the time in which they
// came. So does a run that has stood for kMostWait. While one stands nothing else of its world is
// pending or under way, and nothing else of its session's log has been taken.
//
// Threads: the node thread. Ownership: sessions own their templates, worlds their points; a run
// that stands shares its session and its inputs. Errors: none.
#ifndef CHORUS_CORE_NODE_SHORT_WAY_H_
#define CHORUS_CORE_NODE_SHORT_WAY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/optional.h"
#include "core/base/ids.h"
#include "core/collective/decisions.h"
#include "core/collective/instance.h"
#include "core/node/at_once.h"
#include "core/node/cell.h"
#include "core/node/domains.h"
#include "core/node/failures.h"
#include "core/node/graph_store.h"
#include "core/node/info.h"
#include "core/node/launcher.h"
#include "core/node/options.h"
#include "core/node/session.h"
#include "core/node/storage.h"
#include "core/node/timers.h"
#include "core/node/world.h"
#include "core/runtime/budget.h"
#include "core/runtime/buffer.h"
#include "core/transport/command.h"

namespace chorus::node {

// What a session's runs of one graph and group have in common.
struct RunTemplate {
  static constexpr int32_t kNone = -1;

  GraphId graph;
  WorldId world;
  Epoch since;  // of the world's membership
  GroupId group;
  // Of those that the group's point tells apart: runs of one kind meet. kNone: they go the general
  // way.
  int32_t kind = kNone;
  GroupRank member;
  DeviceIndex device;
  const GraphRecord* record = nullptr;  // while the session's name for it is
  bool keeps_inputs = false;            // of what is computed something stands in an input
};

// A session's. By the graph's slot: those of one row of the table take turns.
struct RunTemplates {
  static constexpr size_t kMost = 16;
  std::vector<RunTemplate> rows{kMost};
  RunTemplate* Of(GraphId graph) { return &rows[static_cast<size_t>(graph.slot) % kMost]; }
};

// A run that stands at a meeting point.
struct StandingRun {
  std::shared_ptr<Session> session;  // null: nobody stands there
  const RunTemplate* of = nullptr;
  Sequence sequence;
  absl::Time came;
  std::string frame;  // what it goes the general way by
  absl::optional<CallPosition> at;
  struct Operand {  // both null: bytes that came with it
    CellRef cell;
    BufferRef staged;  // of staging memory
  };
  absl::InlinedVector<Operand, 1> inputs;
  // Of one input, where the host reads them.
  alignas(64) char inlined[InlineData::kMaxBytes];
  absl::InlinedVector<absl::optional<TensorId>, 1> outputs;
};

// A group's.
struct MeetingPoint {
  explicit MeetingPoint(BudgetRef budget)
      : charge(std::move(budget), Resource::kAgreementBytes, int64_t{8} << 10) {}

  std::shared_ptr<World> world;  // while somebody stands here
  GroupId group;
  std::vector<StandingRun> standing;  // by member
  std::vector<int32_t> order;         // of those that stand here, as they came
  // What runs ask for, as the sequencer compares them.
  struct Kind {
    GroupRank member;
    Descriptor descriptor;
    std::string source;
  };
  std::vector<Kind> kinds;
  SteppedCharge charge;
};

// A world's, by its first groups.
struct MeetingPoints {
  static constexpr size_t kMost = 16;
  std::vector<std::unique_ptr<MeetingPoint>> of_group{kMost};  // null: nobody has been there
};

class ShortWay {
 public:
  // More members make for a long piece of work.
  static constexpr size_t kMostMembers = 64;
  // A frame is kept for as long as its run stands.
  static constexpr size_t kMostFrameBytes = 256;
  static constexpr size_t kMostKinds = 64;
  static constexpr size_t kMostOutputs = 8;
  static constexpr absl::Duration kMostWait = absl::Milliseconds(10);
  // Of all points together, of which a tenant has its share: so many may have to make way in one
  // slice. Others go the general way.
  static constexpr int64_t kMostStanding = 256;

  // Takes a Run that has been begun in its session's log, the general way, as of `now`.
  using Submit = std::function<void(const std::shared_ptr<Session>& session, Sequence sequence,
                                    absl::string_view frame, absl::Time now)>;
  // All outlive it.
  struct Parts {
    const NodeOptions* options = nullptr;
    const SessionTable* sessions = nullptr;
    const Domains* domains = nullptr;
    Storage* storage = nullptr;
    Launcher* launcher = nullptr;
    Failures* failures = nullptr;
    TimerQueue* timers = nullptr;
    NodeStats* stats = nullptr;
    Submit submit;
  };
  explicit ShortWay(Parts parts) : parts_(std::move(parts)), collective_(parts_.launcher) {}
  ShortWay(const ShortWay&) = delete;
  ShortWay& operator=(const ShortWay&) = delete;

  // Takes the command whose turn it is in the session's log, begun with `done`, if it may go this
  // way. Absent: it may not, and nothing has happened.
  absl::optional<CommandLog::Sender> Take(const std::shared_ptr<Session>& session,
                                          const Command& command, absl::string_view frame,
                                          absl::Time now, OnOutcome* done);
  // Something else comes: of this session's log; of a world, or of those of a session; of a tenant,
  // or of all (empty); whatever.
  void MakeWay(const Session& session);
  void MakeWay(const World& world);
  void MakeWayInWorldsOf(const Session& session);
  void MakeWayInWorldsOf(absl::string_view tenant);
  void MakeWay();
  bool stands() const { return !points_.empty(); }
  // Nothing is taken any more.
  void Stop() { stopped_ = true; }

 private:
  RunTemplate* TemplateOf(Session* session, const Run& run, World* world);
  void MakeTemplate(const Session& session, const Run& run, const GraphRecord& record, World* world,
                    RunTemplate* run_template);
  static int32_t KindOf(const Participation& part, CheckCallSites check, MeetingPoint* point);
  static int64_t BytesOf(const MeetingPoint& point, size_t kinds);
  bool FindOperands(const Session& session, const Run& run, StandingRun* standing) const;
  bool FindOutputs(Session* session, const Run& run, StandingRun* standing) const;
  // Whether runs may stand by what the session, or the run's world, has otherwise.
  bool MayStand(const Session& session) const;
  static bool MayStandThere(const Run& run, const RunTemplate& of, const World& world,
                            const MeetingPoint& point);
  // The run that has been found to may, and has begun.
  void Stand(const std::shared_ptr<World>& world, MeetingPoint* point, GroupRank member);
  // False: they have to go the general way, and nothing has happened.
  bool Meet(MeetingPoint* point, absl::Time now);
  bool FindBytes(MeetingPoint* point);
  bool FindBuffer(const MeetingPoint& point, size_t member, size_t index);
  void Note(FlightKind kind, absl::Time time, const World& world, const StandingRun& run,
            Ticket ticket);
  void Publish(const World& world, const MetGang& met, const StandingRun& run, absl::Time now);
  // All runs that stand there go the general way.
  void MakeWayAt(MeetingPoint* point);
  // At each point that is wanted.
  template <typename Predicate>
  void MakeWayWhere(Predicate is_wanted);
  // No run stands there any more. Those that did, as they came; what they are is at the point until
  // the next one comes.
  absl::InlinedVector<int32_t, 8> Leave(MeetingPoint* point);
  void ArmTimer(absl::Time first_came);

  const Parts parts_;
  bool stopped_ = false;
  bool armed_ = false;
  std::vector<MeetingPoint*> points_;  // where somebody stands
  int64_t num_standing_ = 0;
  // Of one meeting after the other: kept for what they have grown to.
  CollectiveAtOnce collective_;
  struct Bytes {  // by plan buffer
    absl::InlinedVector<DeviceAddress, 4> addresses;
    absl::InlinedVector<BufferRef, 4> refs;
  };
  std::vector<Bytes> bytes_;  // by member
  std::vector<MetCall> calls_;
};

}  // namespace chorus::node

#endif  // CHORUS_CORE_NODE_SHORT_WAY_H_
