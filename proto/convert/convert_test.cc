// Hostile messages are refused with the field's name; sound ones survive.

#include "proto/convert/convert.h"

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/counting_heap.h"
#include "core/graph/encoding.h"
#include "core/transport/sample_commands.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using testing::HasSubstr;

// A command in which every part that a mutation below touches is there.
v1::Command SoundRegister() {
  v1::Command command;
  command.set_sequence(1);
  v1::RegisterGraph* to = command.mutable_register_graph();
  to->mutable_id()->set_slot(1);
  to->mutable_id()->set_generation(1);
  v1::Graph* graph = to->mutable_graph();
  v1::GraphInput* input = graph->add_inputs();
  input->mutable_type()->set_dtype(v1::DTYPE_F32);
  input->mutable_type()->add_dims(4);
  v1::Node* node = graph->add_nodes();
  node->set_op("all_reduce");
  node->add_inputs(0);
  *node->add_outputs() = input->type();
  v1::Attribute* attribute = node->add_attributes();
  attribute->set_name("a");
  attribute->set_int_value(1);
  v1::Collective* collective = node->mutable_collective();
  collective->set_kind(v1::COLLECTIVE_KIND_ALL_REDUCE);
  collective->set_reduction(v1::REDUCTION_SUM);
  graph->add_outputs()->set_value(1);
  graph->add_group_slots()->set_size(2);
  graph->mutable_group_slots(0)->add_held_ranks(0);
  return command;
}

v1::Command SoundRun() {
  v1::Command command;
  command.set_sequence(1);
  v1::Run* run = command.mutable_run();
  run->mutable_graph()->set_slot(1);
  run->mutable_graph()->set_generation(1);
  run->add_inputs()->mutable_tensor()->set_generation(1);
  run->add_inputs()->set_inline_("1234");
  run->add_inputs()->mutable_external()->set_arena(1);
  run->add_outputs()->mutable_fresh()->set_generation(1);
  run->add_groups()->set_world(1);
  run->mutable_groups(0)->add_base()->set_step(4);
  run->add_instances()->set_since(1);
  run->add_pair_calls(3);
  run->add_devices(0);
  return command;
}

v1::Command SoundRefusal() {
  v1::Command command;
  command.set_sequence(1);
  v1::Refuse* refuse = command.mutable_refuse();
  refuse->set_world(1);
  refuse->set_epoch(2);
  v1::Refuse::Member* member = refuse->add_members();
  member->set_step(3);
  member->add_calls()->set_next(1);
  refuse->mutable_why()->set_code(3);
  return command;
}

v1::Refuse::Member* MemberOf(v1::Command* c) { return c->mutable_refuse()->mutable_members(0); }
v1::Graph* GraphOf(v1::Command* c) { return c->mutable_register_graph()->mutable_graph(); }
v1::Collective* CollectiveOf(v1::Command* c) {
  return GraphOf(c)->mutable_nodes(0)->mutable_collective();
}

TEST(ConvertTest, SoundMessagesPass) {
  EXPECT_TRUE(FromProto(SoundRegister()).ok());
  EXPECT_TRUE(FromProto(SoundRun()).ok());
  EXPECT_TRUE(FromProto(SoundRefusal()).ok());
}

struct Mutation {
  const char* text;  // that the error must have: the field, and what came
  std::function<void(v1::Command*)> apply;
};

void ExpectRefused(const v1::Command& sound, const std::vector<Mutation>& mutations) {
  for (const Mutation& mutation : mutations) {
    v1::Command command = sound;
    mutation.apply(&command);
    const absl::StatusOr<Command> result = FromProto(command);
    ASSERT_FALSE(result.ok()) << mutation.text;
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorOf(result.status()).reason, Reason::kMalformed);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(mutation.text));
  }
}

TEST(ConvertTest, HostileGraphsAreRefusedByField) {
  ExpectRefused(
      SoundRegister(),
      {
          {"sequence: expected a number >= 1, got 0", [](auto* c) { c->set_sequence(0); }},
          {"sequence: expected a number >= 1, got -5", [](auto* c) { c->set_sequence(-5); }},
          {"id.slot", [](auto* c) { c->mutable_register_graph()->mutable_id()->set_slot(-1); }},
          {"id.generation: expected 1 to 4294967295, got 4294967296",
           [](auto* c) {
             c->mutable_register_graph()->mutable_id()->set_generation(int64_t{1} << 32);
           }},
          {"id.generation",
           [](auto* c) { c->mutable_register_graph()->mutable_id()->clear_generation(); }},
          {"graph or staged", [](auto* c) { c->mutable_register_graph()->clear_graph(); }},
          {"staged.size_bytes", [](auto* c) { c->mutable_register_graph()->mutable_staged(); }},
          {"staged.range.strides",
           [](auto* c) {
             c->mutable_register_graph()->mutable_staged()->mutable_range()->add_strides(1);
           }},
          {"graph.ir_version", [](auto* c) { GraphOf(c)->set_ir_version(-1); }},
          {"graph.nodes[0].source: expected at most 512 bytes, got 513",
           [](auto* c) { GraphOf(c)->mutable_nodes(0)->set_source(std::string(513, 's')); }},
          {"graph.device_slot_count", [](auto* c) { GraphOf(c)->set_device_slot_count(-2); }},
          {"graph.instance_slot_count", [](auto* c) { GraphOf(c)->set_instance_slot_count(-2); }},
          {"graph.inputs[0].type.dtype: 99 is no DType",
           [](auto* c) {
             GraphOf(c)->mutable_inputs(0)->mutable_type()->set_dtype(static_cast<v1::DType>(99));
           }},
          {"graph.inputs[0].type.dtype: 0 is no DType",
           [](auto* c) { GraphOf(c)->mutable_inputs(0)->clear_type(); }},
          {"graph.inputs[0].type.dims[0]: expected a number >= 0, got -4",
           [](auto* c) { GraphOf(c)->mutable_inputs(0)->mutable_type()->set_dims(0, -4); }},
          {"graph.inputs[0].type.dims: expected at most 16, got 17",
           [](auto* c) {
             for (int i = 0; i < 16; ++i) {
               GraphOf(c)->mutable_inputs(0)->mutable_type()->add_dims(1);
             }
           }},
          {"graph.inputs[0].type.layout: 7",
           [](auto* c) {
             GraphOf(c)->mutable_inputs(0)->mutable_type()->set_layout(static_cast<v1::Layout>(7));
           }},
          {"graph.inputs[0].type.symbolic_dims: expected ascending positions below 1, got 1",
           [](auto* c) {
             GraphOf(c)->mutable_inputs(0)->mutable_type()->add_symbolic_dims()->set_dim(1);
           }},
          {"graph.inputs[0].role: 9",
           [](auto* c) { GraphOf(c)->mutable_inputs(0)->set_role(static_cast<v1::ValueRole>(9)); }},
          {"graph.inputs[0].device_slot",
           [](auto* c) { GraphOf(c)->mutable_inputs(0)->set_device_slot(-1); }},
          {"graph.nodes[0].inputs[0]",
           [](auto* c) { GraphOf(c)->mutable_nodes(0)->set_inputs(0, -1); }},
          {"graph.nodes[0].version",
           [](auto* c) { GraphOf(c)->mutable_nodes(0)->set_version(-1); }},
          {"graph.nodes[0].device_slot",
           [](auto* c) { GraphOf(c)->mutable_nodes(0)->set_device_slot(-1); }},
          {"graph.nodes[0].effect: -1",
           [](auto* c) { GraphOf(c)->mutable_nodes(0)->set_effect(static_cast<v1::Effect>(-1)); }},
          {"graph.nodes[0].outputs[0].dtype",
           [](auto* c) { GraphOf(c)->mutable_nodes(0)->mutable_outputs(0)->clear_dtype(); }},
          {"graph.nodes[0].attributes[0]: expected int_value",
           [](auto* c) { GraphOf(c)->mutable_nodes(0)->mutable_attributes(0)->clear_value(); }},
          {"graph.nodes[0].attributes: expected each name once, got \"a\" twice",
           [](auto* c) {
             *GraphOf(c)->mutable_nodes(0)->add_attributes() = GraphOf(c)->nodes(0).attributes(0);
           }},
          {"graph.nodes[0].collective.kind: 0 is no CollectiveKind",
           [](auto* c) { CollectiveOf(c)->clear_kind(); }},
          {"graph.nodes[0].collective.kind: 12",
           [](auto* c) { CollectiveOf(c)->set_kind(static_cast<v1::CollectiveKind>(12)); }},
          {"graph.nodes[0].collective.reduction: 10",
           [](auto* c) { CollectiveOf(c)->set_reduction(static_cast<v1::Reduction>(10)); }},
          {"graph.nodes[0].collective.group_slot",
           [](auto* c) { CollectiveOf(c)->set_group_slot(-1); }},
          {"graph.nodes[0].collective.rank", [](auto* c) { CollectiveOf(c)->set_rank(-1); }},
          {"graph.nodes[0].collective.root", [](auto* c) { CollectiveOf(c)->set_root(-1); }},
          {"graph.nodes[0].collective.peer", [](auto* c) { CollectiveOf(c)->set_peer(-1); }},
          {"graph.nodes[0].collective.part", [](auto* c) { CollectiveOf(c)->set_part(-1); }},
          {"graph.nodes[0].collective.counts[0]", [](auto* c) { CollectiveOf(c)->add_counts(-1); }},
          {"graph.nodes[0].collective.runtime_counts.input",
           [](auto* c) { CollectiveOf(c)->mutable_runtime_counts()->set_input(-1); }},
          {"graph.nodes[0].collective.runtime_counts.maximum",
           [](auto* c) { CollectiveOf(c)->mutable_runtime_counts()->set_maximum(-1); }},
          {"graph.nodes[0].collective.instance.gradient.node",
           [](auto* c) { CollectiveOf(c)->mutable_instance()->mutable_gradient()->set_node(-1); }},
          {"graph.nodes[0].collective.instance.gradient.request",
           [](auto* c) {
             CollectiveOf(c)->mutable_instance()->mutable_gradient()->set_request(-1);
           }},
          {"graph.nodes[0].collective.instance.bound.slot",
           [](auto* c) { CollectiveOf(c)->mutable_instance()->mutable_bound()->set_slot(-1); }},
          {"graph.outputs[0].value",
           [](auto* c) { GraphOf(c)->mutable_outputs(0)->set_value(-1); }},
          {"graph.outputs[0].may_alias",
           [](auto* c) { GraphOf(c)->mutable_outputs(0)->set_may_alias(-1); }},
          {"graph.group_slots[0].size",
           [](auto* c) { GraphOf(c)->mutable_group_slots(0)->set_size(-1); }},
          {"graph.group_slots[0].held_ranks[0]",
           [](auto* c) { GraphOf(c)->mutable_group_slots(0)->set_held_ranks(0, -1); }},
          {"graph.group_slots[0].device_slots[0]",
           [](auto* c) { GraphOf(c)->mutable_group_slots(0)->add_device_slots(-1); }},
      });
}

TEST(ConvertTest, AGraphOfAnotherVersionIsRefusedBeforeTheNodeSeesIt) {
  v1::Command command = SoundRegister();
  GraphOf(&command)->set_ir_version(99);
  const absl::Status status = FromProto(command).status();
  EXPECT_EQ(ErrorOf(status).reason, Reason::kVersion) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("99"));
}

TEST(ConvertTest, GraphsAreConvertedWithinLimitsOrNotAtAll) {
  const v1::Command command = SoundRegister();
  const v1::Graph& message = command.register_graph().graph();
  const absl::StatusOr<Graph> graph = FromProto(message);
  ASSERT_TRUE(graph.ok()) << graph.status();
  DecodeLimits limits;
  limits.max_nodes = 1;
  limits.max_bytes = MemoryOf(*graph);
  EXPECT_TRUE(FromProto(message, limits).ok());
  // What it refuses, decoding would: the node sees no bytes that do not decode.
  const std::string encoded = EncodeGraph(*graph);
  EXPECT_TRUE(DecodeGraph(encoded, limits).ok());
  for (int64_t less = 0; less < limits.max_bytes; ++less) {
    DecodeLimits tight = limits;
    tight.max_bytes = less;
    ASSERT_EQ(ErrorOf(FromProto(message, tight).status()).reason, Reason::kQuota) << less;
  }
  limits.max_nodes = 0;
  EXPECT_EQ(ErrorOf(FromProto(message, limits).status()).message,
            "nodes: expected at most 0, got 1");
}

// Two bytes of a message are a node.
TEST(ConvertTest, AMessageOfEmptyNodesIsRefusedBeforeTheyAreMade) {
  v1::Command command = SoundRegister();
  v1::Graph* graph = GraphOf(&command);
  while (graph->nodes_size() <= static_cast<int>(kMaxFrameBytes / 9)) graph->add_nodes();
  const HeapUse heap;
  const Error error = ErrorOf(FromProto(command).status());
  EXPECT_LT(heap.most_bytes(), 4096);
  EXPECT_EQ(error.reason, Reason::kMalformed);
  EXPECT_THAT(error.message, HasSubstr("graph.nodes: expected at most 7281, got 7282"));
}

TEST(ConvertTest, AMessageOfEmptyTapesIsRefusedBeforeTheyAreMade) {
  v1::Command command;
  command.set_sequence(1);
  for (int i = 0; i <= static_cast<int>(DropTape::kMaxEntries); ++i) {
    command.mutable_drop_tape()->add_entries();
  }
  const Error error = ErrorOf(FromProto(command).status());
  EXPECT_THAT(error.message, HasSubstr("entries: expected at most 512, got 513"));
}

TEST(ConvertTest, HostileRunsAndOtherCommandsAreRefusedByField) {
  ExpectRefused(
      SoundRun(),
      {
          {"graph.slot", [](auto* c) { c->mutable_run()->mutable_graph()->set_slot(-1); }},
          {"inputs[0].tensor.generation",
           [](auto* c) { c->mutable_run()->mutable_inputs(0)->mutable_tensor()->Clear(); }},
          {"inputs[1].inline: expected at most 64 bytes, got 65",
           [](auto* c) { c->mutable_run()->mutable_inputs(1)->set_inline_(std::string(65, 'x')); }},
          {"inputs[1]: expected tensor, inline or external",
           [](auto* c) { c->mutable_run()->mutable_inputs(1)->Clear(); }},
          {"inputs[2].external.arena",
           [](auto* c) { c->mutable_run()->mutable_inputs(2)->mutable_external()->set_arena(-1); }},
          {"inputs[2].external.offset_bytes",
           [](auto* c) {
             c->mutable_run()->mutable_inputs(2)->mutable_external()->set_offset_bytes(-8);
           }},
          {"inputs[2].external.strides: expected at most 16, got 17",
           [](auto* c) {
             auto* external = c->mutable_run()->mutable_inputs(2)->mutable_external();
             for (int i = 0; i < 17; ++i) external->add_strides(1);
           }},
          {"outputs[0].fresh.slot",
           [](auto* c) { c->mutable_run()->mutable_outputs(0)->mutable_fresh()->set_slot(-1); }},
          {"outputs[0].into.arena",
           [](auto* c) { c->mutable_run()->mutable_outputs(0)->mutable_into()->set_arena(-1); }},
          {"groups[0].world", [](auto* c) { c->mutable_run()->mutable_groups(0)->set_world(-1); }},
          {"groups[0].group", [](auto* c) { c->mutable_run()->mutable_groups(0)->set_group(-1); }},
          {"groups[0].epoch", [](auto* c) { c->mutable_run()->mutable_groups(0)->set_epoch(-1); }},
          {"groups[0].base[0].step: expected a number from 0 to 2^48 - 1, got -1",
           [](auto* c) { c->mutable_run()->mutable_groups(0)->mutable_base(0)->set_step(-1); }},
          {"groups[0].base[0].step: expected a number from 0 to 2^48 - 1, got 281474976710656",
           [](auto* c) {
             c->mutable_run()->mutable_groups(0)->mutable_base(0)->set_step(kMaxCallNumber);
           }},
          {"groups[0].base[1].call",
           [](auto* c) { c->mutable_run()->mutable_groups(0)->add_base()->set_call(-1); }},
          {"groups[0].base[1].part",
           [](auto* c) { c->mutable_run()->mutable_groups(0)->add_base()->set_part(-1); }},
          {"pair_calls[0]", [](auto* c) { c->mutable_run()->set_pair_calls(0, -1); }},
          {"pair_calls[1]", [](auto* c) { c->mutable_run()->add_pair_calls(kMaxCallNumber); }},
          {"instances[0].group",
           [](auto* c) { c->mutable_run()->mutable_instances(0)->set_group(-1); }},
          {"instances[0].since",
           [](auto* c) { c->mutable_run()->mutable_instances(0)->set_since(-1); }},
          {"instances[0].step",
           [](auto* c) { c->mutable_run()->mutable_instances(0)->set_step(-1); }},
          {"instances[0].call",
           [](auto* c) { c->mutable_run()->mutable_instances(0)->set_call(kMaxCallNumber); }},
          {"instances[0].part",
           [](auto* c) { c->mutable_run()->mutable_instances(0)->set_part(-1); }},
          {"instances[0].source, destination: expected both or none",
           [](auto* c) { c->mutable_run()->mutable_instances(0)->set_source(0); }},
          {"instances[0].gradient_path[0].number",
           [](auto* c) {
             c->mutable_run()->mutable_instances(0)->add_gradient_path()->set_number(-1);
           }},
          {"instances[0].gradient_path[0].step",
           [](auto* c) {
             c->mutable_run()->mutable_instances(0)->add_gradient_path()->set_step(kMaxCallNumber);
           }},
          {"instances: expected at most 9362, got 9363",
           [](auto* c) {
             while (c->run().instances_size() < 9363) c->mutable_run()->add_instances();
           }},
          {"instances[0].gradient_path: expected at most 64 requests, got 65",
           [](auto* c) {
             for (size_t i = 0; i <= kMaxGradientOrder; ++i) {
               c->mutable_run()->mutable_instances(0)->add_gradient_path();
             }
           }},
          {"devices[0]", [](auto* c) { c->mutable_run()->set_devices(0, -1); }},
          {"expected one of the commands", [](auto* c) { c->clear_run(); }},
          {"run_sequence", [](auto* c) { c->mutable_cancel()->set_run_sequence(0); }},
          {"epoch", [](auto* c) { c->mutable_enter_epoch()->set_epoch(-1); }},
          {"entries[0].member",
           [](auto* c) { c->mutable_drop_tape()->add_entries()->set_member(-1); }},
          {"tensors[0].slot", [](auto* c) { c->mutable_release()->add_tensors()->set_slot(-1); }},
          {"graphs[0].generation", [](auto* c) { c->mutable_release()->add_graphs(); }},
          {"arenas[0]", [](auto* c) { c->mutable_release()->add_arenas(-1); }},
          {"tensors[0].generation", [](auto* c) { c->mutable_make_readable()->add_tensors(); }},
          {"type.dtype",
           [](auto* c) { c->mutable_create_tensor()->mutable_id()->set_generation(1); }},
          {"source: expected inline or external, got a tensor",
           [](auto* c) {
             c->mutable_create_tensor()->mutable_id()->set_generation(1);
             c->mutable_create_tensor()->mutable_type()->set_dtype(v1::DTYPE_F32);
             c->mutable_create_tensor()->mutable_source()->mutable_tensor()->set_generation(1);
           }},
          {"call_site: expected at most 512 bytes, got 513",
           [](auto* c) {
             c->mutable_create_tensor()->mutable_id()->set_generation(1);
             c->mutable_create_tensor()->mutable_type()->set_dtype(v1::DTYPE_F32);
             c->mutable_create_tensor()->mutable_source()->set_inline_("");
             c->mutable_create_tensor()->set_call_site(std::string(513, 'a'));
           }},
      });
}

TEST(ConvertTest, HostileRefusalsAreRefusedByField) {
  ExpectRefused(
      SoundRefusal(),
      {
          {"world", [](auto* c) { c->mutable_refuse()->set_world(-1); }},
          {"epoch", [](auto* c) { c->mutable_refuse()->set_epoch(-1); }},
          {"members: expected 1 to 1024, got 0",
           [](auto* c) { c->mutable_refuse()->clear_members(); }},
          {"members: expected 1 to 1024, got 1025",
           [](auto* c) {
             while (c->refuse().members_size() < 1025) c->mutable_refuse()->add_members();
           }},
          {"members[0].rank", [](auto* c) { MemberOf(c)->set_rank(-1); }},
          {"members[0].step", [](auto* c) { MemberOf(c)->set_step(-1); }},
          {"members[0].calls[0].group",
           [](auto* c) { MemberOf(c)->mutable_calls(0)->set_group(-1); }},
          {"members[0].calls[0].source, destination: expected both or none, got one",
           [](auto* c) { MemberOf(c)->mutable_calls(0)->set_source(0); }},
          {"members[0].calls[0].tag, is_recv: expected none without source and destination",
           [](auto* c) { MemberOf(c)->mutable_calls(0)->set_tag(1); }},
          {"members[0].calls[0].tag, is_recv: expected none without source and destination",
           [](auto* c) { MemberOf(c)->mutable_calls(0)->set_is_recv(true); }},
          {"members[0].calls[0].first",
           [](auto* c) { MemberOf(c)->mutable_calls(0)->set_first(-1); }},
          {"members[0].calls[0].next",
           [](auto* c) { MemberOf(c)->mutable_calls(0)->set_next(kMaxCallNumber); }},
          {"members[0].calls[0].next: expected a number from 2, which is first, got 1",
           [](auto* c) { MemberOf(c)->mutable_calls(0)->set_first(2); }},
          {"members[0].gradients[0].gradient_path: expected at least one request, got none",
           [](auto* c) { MemberOf(c)->add_gradients(); }},
          {"members[0].gradients[0].step",
           [](auto* c) { MemberOf(c)->add_gradients()->set_step(-1); }},
          {"why.code: expected a status code from 1 to 16, got 0",
           [](auto* c) { c->mutable_refuse()->clear_why(); }},
          {"why.code: expected a status code from 1 to 16, got 17",
           [](auto* c) { c->mutable_refuse()->mutable_why()->set_code(17); }},
          {"why.reason: expected one of docs/errors.md, got 'BAD_TYPES'",
           [](auto* c) { c->mutable_refuse()->mutable_why()->set_reason("BAD_TYPES"); }},
          {"why.message: expected at most 4096 bytes, got 4097",
           [](auto* c) {
             c->mutable_refuse()->mutable_why()->set_message(std::string(4097, 'm'));
           }},
          {"why.source: expected at most 4096 bytes, got 4097",
           [](auto* c) { c->mutable_refuse()->mutable_why()->set_source(std::string(4097, 's')); }},
      });
}

TEST(ConvertTest, AnErrorComesBackAsItWas) {
  Error error(Reason::kQuota, "no room");
  error.id = ErrorId(7);
  error.culprit.rank = 3;
  error.culprit.pid = 0;
  error.culprit.node = "node";
  error.instance = "group 1 #2";
  error.op = "all_reduce";
  error.source = "train.cc:42";
  error.expected = "f32[4]";
  error.got = "f32[5]";
  error.alone = true;
  error.ended.push_back({WorldId(2), Epoch(5)});
  error.ranks.push_back({1, "all_reduce SUM f32[4]", "train.cc:42"});
  v1::Error message;
  ToProto(error, &message);
  const Error back = FromProto(message);
  EXPECT_EQ(back.id, error.id);
  EXPECT_EQ(back.code, absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(back.reason, Reason::kQuota);
  EXPECT_EQ(back.message, "no room");
  EXPECT_EQ(back.culprit.rank, 3);
  EXPECT_EQ(back.culprit.pid, 0);
  EXPECT_EQ(back.culprit.node, "node");
  EXPECT_EQ(back.instance, error.instance);
  EXPECT_EQ(back.op, error.op);
  EXPECT_EQ(back.source, error.source);
  EXPECT_EQ(back.expected, error.expected);
  EXPECT_EQ(back.got, error.got);
  EXPECT_TRUE(back.alone);
  ASSERT_EQ(back.ended.size(), 1u);
  EXPECT_EQ(back.ended[0].world, WorldId(2));
  EXPECT_EQ(back.ended[0].open, Epoch(5));
  EXPECT_EQ(back.ranks, error.ranks);

  EXPECT_EQ(FromProto(v1::Error()).culprit.rank, Error().culprit.rank);
  for (const int code : {-1, 17, 1 << 20}) {
    message.set_code(code);
    EXPECT_EQ(FromProto(message).code, absl::StatusCode::kUnknown) << code;
  }
  message.set_reason("FROM_LATER");
  EXPECT_EQ(FromProto(message).reason, Reason::kUnspecified);
}

TEST(ConvertTest, TextsOfAnErrorAreUtf8) {
  Error error;
  for (std::string* text : {&error.message, &error.culprit.node, &error.instance, &error.op,
                            &error.source, &error.expected, &error.got}) {
    *text = "\xff";
  }
  error.ranks.push_back({0, "\xff", "\xff"});
  v1::Error message;
  ToProto(error, &message);
  v1::Error parsed;
  EXPECT_TRUE(parsed.ParseFromString(message.SerializeAsString()));
  EXPECT_EQ(parsed.op(), "?");
}

// A trainer may give any bytes as the text: a message with them would be lost on the way.
TEST(ConvertTest, TextsOfARefusalAreUtf8) {
  Refuse refuse;
  refuse.members.emplace_back();
  refuse.why.code = absl::StatusCode::kAborted;
  const auto text = [&refuse](const std::string& message) {
    refuse.why.message = message;
    v1::Command converted;
    EXPECT_TRUE(ToProto(Command{Sequence(1), refuse}, &converted).ok());
    v1::Command parsed;
    EXPECT_TRUE(parsed.ParseFromString(converted.SerializeAsString())) << message;
    return parsed.refuse().why().message();
  };
  EXPECT_EQ(text("plain"), "plain");
  for (const char* good : {"\xc3\xa4", "\xe2\x82\xac!", "\xf0\x9f\x8e\xb5", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(text(good), good);
  }
  EXPECT_EQ(text("a\xff"), "a?");
  EXPECT_EQ(text("\xc3"), "?");
  EXPECT_EQ(text("\xc3("), "?(");
  EXPECT_EQ(text("\xc0\x80"), "??");            // a longer form than needed
  EXPECT_EQ(text("\xed\xa0\x80"), "???");       // half of a surrogate pair
  EXPECT_EQ(text("\xf4\x90\x80\x80"), "????");  // beyond Unicode
  EXPECT_EQ(text("\xc3\xa4\xff"), "???");
}

// Paths of source files may be any bytes, too.
TEST(ConvertTest, LinesOfSourceAreUtf8) {
  Graph graph;
  graph.nodes.emplace_back().source = "m\xfcller.cc:1";
  RegisterGraph registers;
  registers.encoded = EncodeGraph(graph);
  CreateTensor create;
  create.call_site = "m\xfcller.cc:2";
  create.source = InlineData();
  v1::Command parsed;
  v1::Command converted;
  ASSERT_TRUE(ToProto(Command{Sequence(1), registers}, &converted).ok());
  EXPECT_TRUE(parsed.ParseFromString(converted.SerializeAsString()));
  EXPECT_EQ(parsed.register_graph().graph().nodes(0).source(), "m?ller.cc:1");
  converted.Clear();
  ASSERT_TRUE(ToProto(Command{Sequence(1), create}, &converted).ok());
  EXPECT_TRUE(parsed.ParseFromString(converted.SerializeAsString()));
  EXPECT_EQ(parsed.create_tensor().call_site(), "m?ller.cc:2");
}

TEST(ConvertTest, AMembershipCountsFromTheFirstEpochUnlessSaid) {
  v1::InstanceKey message;
  message.set_call(5);
  const absl::StatusOr<InstanceKey> key = FromProto(message);
  ASSERT_TRUE(key.ok()) << key.status();
  EXPECT_EQ(key->since, Epoch(1));
  EXPECT_EQ(key->at, (CallPosition{0, 5, 0}));
}

TEST(ConvertTest, CommandsOfTheRingHaveMessages) {
  int converted = 0;
  for (const Command& command : SampleCommands()) {
    v1::Command message;
    const absl::Status status = ToProto(command, &message);
    if (absl::holds_alternative<RegisterGraph>(command.body) &&
        !absl::get<RegisterGraph>(command.body).encoded.empty()) {
      // The sample's graph is no graph.
      EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
      continue;
    }
    ASSERT_TRUE(status.ok()) << status;
    const absl::StatusOr<Command> back = FromProto(message);
    ASSERT_TRUE(back.ok()) << back.status() << "\n" << message.DebugString();
    ByteWriter expected;
    ByteWriter got;
    EncodeFrame(command, &expected);
    EncodeFrame(*back, &got);
    EXPECT_EQ(expected.bytes(), got.bytes()) << message.DebugString();
    ++converted;
  }
  EXPECT_GE(converted, 11);
}

TEST(ConvertTest, DefaultsThatMakeHandWrittenMessagesShort) {
  v1::Command command = SoundRegister();
  const absl::StatusOr<Command> converted = FromProto(command);
  ASSERT_TRUE(converted.ok());
  const absl::StatusOr<Graph> graph =
      DecodeGraph(absl::get<RegisterGraph>(converted->body).encoded);
  ASSERT_TRUE(graph.ok());
  EXPECT_EQ(graph->ir_version, 1);
  EXPECT_EQ(graph->num_device_slots, 1);
  EXPECT_EQ(graph->nodes[0].version, 1);
  EXPECT_EQ(graph->nodes[0].effect, Effect::kCollective);
  EXPECT_EQ(graph->nodes[0].collective->root, GroupRank(-1));
  EXPECT_EQ(graph->group_slots[0].device_slots, std::vector<int32_t>{0});
  EXPECT_EQ(graph->inputs[0].role, InputRole::kData);
}

TEST(ConvertTest, EveryDTypeKindAndReductionHasItsNumber) {
  for (int i = v1::DType_MIN + 1; i <= v1::DType_MAX; ++i) {
    const absl::StatusOr<DType> dtype = FromProto(static_cast<v1::DType>(i));
    ASSERT_TRUE(dtype.ok());
    EXPECT_EQ(ToProto(*dtype), i);
    // "DTYPE_F32" and "f32" are the same name, "DTYPE_COMPLEX64" and "c64" as well.
    std::string name = v1::DType_Name(i).substr(6);
    for (char& c : name) c = static_cast<char>(tolower(c));
    if (name.rfind("complex", 0) == 0) name = "c" + name.substr(7);
    EXPECT_EQ(DTypeFromName(name), *dtype) << name;
  }
  for (int i = v1::CollectiveKind_MIN + 1; i <= v1::CollectiveKind_MAX; ++i) {
    std::string name = v1::CollectiveKind_Name(i).substr(16);
    for (char& c : name) c = static_cast<char>(tolower(c));
    EXPECT_EQ(CollectiveKindName(static_cast<CollectiveKind>(i)), name);
  }
  for (int i = v1::Reduction_MIN + 1; i <= v1::Reduction_MAX; ++i) {
    EXPECT_EQ(ReductionName(static_cast<Reduction>(i)), v1::Reduction_Name(i).substr(10));
  }
}

}  // namespace
}  // namespace chorus
