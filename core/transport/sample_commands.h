// A command of each kind, with every field used, for tests and benchmarks.
//
// Threads: plain functions. Ownership: plain values. Errors: none.
#ifndef CHORUS_CORE_TRANSPORT_SAMPLE_COMMANDS_H_
#define CHORUS_CORE_TRANSPORT_SAMPLE_COMMANDS_H_

#include <vector>

#include "core/transport/command.h"

namespace chorus {

// What an eager collective sends: one input, one output, one group.
inline Command SampleSmallRun(int64_t sequence) {
  Run run;
  run.graph = GraphId{2, 1};
  run.inputs.push_back(TensorId{11, 3});
  run.outputs.push_back(OutBinding{OutBinding::Kind::kFresh, TensorId{12, 4}, {}});
  run.groups.push_back(RunGroup{WorldId(1), GroupId(0), Epoch(1), {{40, 60, 0}}});
  return Command{Sequence(sequence), std::move(run)};
}

inline std::vector<Command> SampleCommands() {
  const InlineData data{{'d', 'a', 't', 'a', '\0', '\xff'}};
  const InlineData no_data;
  const ExternalRange range{ArenaId(3), int64_t{1} << 33, {-12, 4, 1}};
  const InstanceKey forward{GroupId(2), Epoch(5), {9, 77, 2}, GroupRank(-1), GroupRank(-1), 0, {}};
  const InstanceKey pair{GroupId(0),   Epoch(1), {7, 3, 0},       GroupRank(1),
                         GroupRank(0), -9,       {{7, 2}, {8, 0}}};

  RegisterGraph inline_graph;
  inline_graph.graph = GraphId{1, 7};
  inline_graph.encoded = "not looked at";
  RegisterGraph staged_graph;
  staged_graph.graph = GraphId{1, 8};
  staged_graph.staged = ExternalRange{ArenaId(0), 4096, {}};
  staged_graph.staged_bytes = 100000;

  Run run;
  run.graph = GraphId{0x7fffffff, 0xffffffff};
  run.inputs = {Binding(TensorId{1, 2}), Binding(data), Binding(range), Binding(no_data)};
  run.outputs = {OutBinding{OutBinding::Kind::kFresh, TensorId{65535, 9}, {}},
                 OutBinding{OutBinding::Kind::kInto, {}, range},
                 OutBinding{OutBinding::Kind::kDiscard, {}, {}}};
  run.groups = {
      RunGroup{
          WorldId(1), GroupId(0), Epoch(3), {{2, 5, 0}, {2, 6, 1}, {kMaxCallNumber - 1, 0, 70000}}},
      RunGroup{WorldId(int64_t{1} << 40), GroupId(4), Epoch(1), {}}};
  run.pair_calls = {0, 4000, kMaxCallNumber - 1};
  run.call_goes_on = true;
  run.instances = {forward, pair};
  run.donate = {true, false, false, true};
  run.devices = {DeviceIndex(0), DeviceIndex(3)};
  run.gang = ~uint64_t{0};

  CreateTensor create;
  create.tensor = TensorId{5, 1};
  create.type = TensorType(DType::kF32, {Dim(4), Dim(3)});
  create.device = DeviceIndex(1);
  create.source = range;
  create.call_site = "train.py:12";

  Refuse refuse;
  refuse.world = WorldId(int64_t{1} << 40);
  refuse.epoch = Epoch(3);
  RefusedCalls of_group;
  of_group.group = GroupId(4);
  of_group.first = 5;
  of_group.next = 8;
  RefusedCalls of_pair = of_group;
  of_pair.source = GroupRank(1);
  of_pair.destination = GroupRank(0);
  of_pair.tag = -7;
  of_pair.is_recv = true;
  refuse.members = {{Rank(2), 9, false, true, {of_group, of_pair}, {pair}},
                    {Rank(0), 0, true, false, {}, {}}};
  refuse.why.SetReason(Reason::kBadType);
  refuse.why.message = "add: f32[4] and f32[5]";
  refuse.why.source = "train.cc:42";
  refuse.why.alone = true;
  Refuse by_hand;
  by_hand.world = WorldId(1);
  by_hand.epoch = Epoch(2);
  by_hand.by_hand = true;
  by_hand.members = {{Rank(1), 3, false, false, {}, {}}};
  by_hand.why.code = absl::StatusCode::kCancelled;

  return {
      Command{Sequence(1), inline_graph},
      Command{Sequence(2), staged_graph},
      SampleSmallRun(3),
      Command{Sequence(4), run},
      Command{Sequence(5), create},
      Command{Sequence(6), MakeReadable{{TensorId{1, 1}, TensorId{2, 300}}}},
      Command{Sequence(7), Release{{TensorId{1, 1}}, {GraphId{2, 2}, GraphId{3, 3}}, {ArenaId(4)}}},
      Command{Sequence(8), DropTape{{{WorldId(1), GroupRank(2), forward, true},
                                     {WorldId(1), GroupRank(0), pair, false}}}},
      Command{Sequence(9), Cancel{Sequence(4)}},
      Command{Sequence(int64_t{1} << 62), EnterEpoch{WorldId(1), Epoch(4)}},
      Command{Sequence(11), refuse},
      Command{Sequence(12), by_hand},
  };
}

}  // namespace chorus

#endif  // CHORUS_CORE_TRANSPORT_SAMPLE_COMMANDS_H_
