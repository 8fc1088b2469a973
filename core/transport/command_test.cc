#include "core/transport/command.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <string>

#include "absl/strings/escaping.h"
#include "core/base/error.h"
#include "core/base/source_line.h"
#include "core/transport/sample_commands.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace chorus {
namespace {

using ::testing::HasSubstr;

std::string Encode(const Command& command) {
  ByteWriter out;
  EncodeFrame(command, &out);
  return out.Take();
}

Command Sample(int64_t sequence) {
  for (const Command& command : SampleCommands()) {
    if (command.sequence == Sequence(sequence)) return command;
  }
  ADD_FAILURE() << sequence;
  return {};
}

std::string WithSize(std::string frame) {
  const uint32_t size = static_cast<uint32_t>(frame.size());
  std::memcpy(&frame[0], &size, sizeof(size));
  return frame;
}

std::string ErrorText(const std::string& frame) {
  const absl::StatusOr<Command> command = DecodeFrame(frame);
  EXPECT_EQ(ErrorOf(command.status()).reason, Reason::kMalformed) << command.status();
  return ErrorOf(command.status()).message;
}

TEST(FrameTest, EveryKindComesBackAsItWas) {
  for (const Command& command : SampleCommands()) {
    const std::string frame = Encode(command);
    const absl::StatusOr<Command> decoded = DecodeFrame(frame);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(decoded->sequence, command.sequence);
    EXPECT_EQ(decoded->body.index(), command.body.index());
    EXPECT_EQ(absl::BytesToHexString(Encode(*decoded)), absl::BytesToHexString(frame));
  }
}

TEST(FrameTest, EveryFieldOfARunComesBack) {
  const absl::StatusOr<Command> decoded = DecodeFrame(Encode(Sample(4)));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const chorus::Run& run = absl::get<chorus::Run>(decoded->body);
  const ExternalRange& range = absl::get<ExternalRange>(run.inputs[2]);
  EXPECT_EQ(run.graph, (GraphId{0x7fffffff, 0xffffffff}));
  ASSERT_EQ(run.inputs.size(), 4u);
  EXPECT_EQ(absl::get<TensorId>(run.inputs[0]), (TensorId{1, 2}));
  EXPECT_THAT(absl::get<InlineData>(run.inputs[1]).bytes,
              ::testing::ElementsAre('d', 'a', 't', 'a', '\0', '\xff'));
  EXPECT_EQ(range.arena, ArenaId(3));
  EXPECT_EQ(range.offset, int64_t{1} << 33);
  EXPECT_THAT(range.strides, ::testing::ElementsAre(-12, 4, 1));
  EXPECT_TRUE(absl::get<InlineData>(run.inputs[3]).bytes.empty());
  ASSERT_EQ(run.outputs.size(), 3u);
  EXPECT_EQ(run.outputs[0].kind, OutBinding::Kind::kFresh);
  EXPECT_EQ(run.outputs[0].id, (TensorId{65535, 9}));
  EXPECT_EQ(run.outputs[1].kind, OutBinding::Kind::kInto);
  EXPECT_THAT(run.outputs[1].into.strides, ::testing::ElementsAre(-12, 4, 1));
  EXPECT_EQ(run.outputs[2].kind, OutBinding::Kind::kDiscard);
  ASSERT_EQ(run.groups.size(), 2u);
  EXPECT_EQ(run.groups[0].world, WorldId(1));
  EXPECT_EQ(run.groups[0].epoch, Epoch(3));
  EXPECT_THAT(run.groups[0].base,
              ::testing::ElementsAre(CallPosition{2, 5, 0}, CallPosition{2, 6, 1},
                                     CallPosition{kMaxCallNumber - 1, 0, 70000}));
  EXPECT_EQ(run.groups[1].world, WorldId(int64_t{1} << 40));
  EXPECT_EQ(run.groups[1].group, GroupId(4));
  EXPECT_TRUE(run.groups[1].base.empty());
  EXPECT_THAT(run.pair_calls, ::testing::ElementsAre(0, 4000, kMaxCallNumber - 1));
  EXPECT_TRUE(run.call_goes_on);
  ASSERT_EQ(run.instances.size(), 2u);
  EXPECT_EQ(run.instances[0].since, Epoch(5));
  EXPECT_EQ(run.instances[0].at, (CallPosition{9, 77, 2}));
  EXPECT_EQ(run.instances[1].tag, -9);
  EXPECT_THAT(run.instances[1].path,
              ::testing::ElementsAre(InstanceKey::Request{7, 2}, InstanceKey::Request{8, 0}));
  EXPECT_THAT(run.donate, ::testing::ElementsAre(true, false, false, true));
  EXPECT_THAT(run.devices, ::testing::ElementsAre(DeviceIndex(0), DeviceIndex(3)));
  EXPECT_EQ(run.gang, ~uint64_t{0});
}

// Longer than what the encoder gathers before it writes.
TEST(FrameTest, ManyNumbersComeBack) {
  Release release;
  for (int32_t i = 0; i < 1000; ++i) {
    release.tensors.push_back({i * i, static_cast<uint32_t>(i)});
  }
  const auto decoded = DecodeFrame(Encode({Sequence(1), release}));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(absl::get<Release>(decoded->body).tensors, release.tensors);
}

TEST(FrameTest, OtherFieldsComeBack) {
  const auto staged = DecodeFrame(Encode(Sample(2)));
  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_EQ(absl::get<RegisterGraph>(staged->body).staged.offset, 4096);
  EXPECT_EQ(absl::get<RegisterGraph>(staged->body).staged_bytes, 100000);
  const auto create = DecodeFrame(Encode(Sample(5)));
  ASSERT_TRUE(create.ok()) << create.status();
  EXPECT_EQ(absl::get<CreateTensor>(create->body).type.ToString(), "f32[4,3]");
  EXPECT_EQ(absl::get<CreateTensor>(create->body).device, DeviceIndex(1));
  EXPECT_EQ(absl::get<CreateTensor>(create->body).call_site, "train.py:12");
  const auto release = DecodeFrame(Encode(Sample(7)));
  ASSERT_TRUE(release.ok()) << release.status();
  EXPECT_EQ(absl::get<Release>(release->body).graphs.size(), 2u);
  EXPECT_EQ(absl::get<Release>(release->body).arenas, std::vector<ArenaId>{ArenaId(4)});
  const auto tape = DecodeFrame(Encode(Sample(8)));
  ASSERT_TRUE(tape.ok()) << tape.status();
  EXPECT_TRUE(absl::get<DropTape>(tape->body).entries[0].consumed);
  EXPECT_EQ(absl::get<DropTape>(tape->body).entries[0].member, GroupRank(2));
  EXPECT_EQ(absl::get<DropTape>(tape->body).entries[1].key.source, GroupRank(1));
}

TEST(FrameTest, EveryFieldOfARefusalComesBack) {
  const auto decoded = DecodeFrame(Encode(Sample(11)));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const Refuse& refuse = absl::get<Refuse>(decoded->body);
  EXPECT_EQ(refuse.world, WorldId(int64_t{1} << 40));
  EXPECT_EQ(refuse.epoch, Epoch(3));
  EXPECT_FALSE(refuse.by_hand);
  ASSERT_EQ(refuse.members.size(), 2u);
  EXPECT_EQ(refuse.members[0].rank, Rank(2));
  EXPECT_EQ(refuse.members[0].step, 9);
  EXPECT_FALSE(refuse.members[0].rest_of_step);
  EXPECT_TRUE(refuse.members[0].drops_tapes);
  ASSERT_EQ(refuse.members[0].calls.size(), 2u);
  const RefusedCalls& group = refuse.members[0].calls[0];
  EXPECT_EQ(group.group, GroupId(4));
  EXPECT_EQ(group.source, GroupRank(-1));
  EXPECT_EQ(group.first, 5);
  EXPECT_EQ(group.next, 8);
  const RefusedCalls& pair = refuse.members[0].calls[1];
  EXPECT_EQ(pair.source, GroupRank(1));
  EXPECT_EQ(pair.destination, GroupRank(0));
  EXPECT_EQ(pair.tag, -7);
  EXPECT_TRUE(pair.is_recv);
  ASSERT_EQ(refuse.members[0].gradients.size(), 1u);
  EXPECT_EQ(refuse.members[0].gradients[0].path.size(), 2u);
  EXPECT_TRUE(refuse.members[1].gradients.empty());
  EXPECT_TRUE(refuse.members[1].rest_of_step);
  EXPECT_FALSE(refuse.members[1].drops_tapes);
  EXPECT_EQ(refuse.why.code, absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refuse.why.reason, Reason::kBadType);
  EXPECT_EQ(refuse.why.message, "add: f32[4] and f32[5]");
  EXPECT_EQ(refuse.why.source, "train.cc:42");
  EXPECT_TRUE(refuse.why.alone);
  const auto by_hand = DecodeFrame(Encode(Sample(12)));
  ASSERT_TRUE(by_hand.ok()) << by_hand.status();
  EXPECT_TRUE(absl::get<Refuse>(by_hand->body).by_hand);
  EXPECT_FALSE(absl::get<Refuse>(by_hand->body).why.alone);
}

// command_fuzz begins with these: what does not decode shows nothing of the decoder.
TEST(FrameTest, TheCorpusIsTheSamples) {
  std::map<std::string, int64_t> sample_of = {
      {"cancel", 9},          {"create_tensor", 5},
      {"drop_tape", 8},       {"enter_epoch", int64_t{1} << 62},
      {"full_run", 4},        {"make_readable", 6},
      {"refuse", 11},         {"refuse_by_hand", 12},
      {"register_inline", 1}, {"register_staged", 2},
      {"release", 7},         {"small_run", 3}};
  EXPECT_EQ(sample_of.size(), SampleCommands().size());
  for (const auto& entry : std::filesystem::directory_iterator("core/transport/testdata/frames")) {
    const std::string name = entry.path().filename();
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    if (name == "short") {
      EXPECT_FALSE(DecodeFrame(bytes).ok());
      continue;
    }
    const auto sample = sample_of.find(name);
    ASSERT_NE(sample, sample_of.end()) << name;
    const std::string expected = Encode(Sample(sample->second));
    EXPECT_EQ(absl::BytesToHexString(bytes), absl::BytesToHexString(expected)) << name;
    EXPECT_TRUE(DecodeFrame(bytes).ok()) << name;
    sample_of.erase(sample);
  }
  EXPECT_TRUE(sample_of.empty()) << sample_of.begin()->first;
}

// The format is fixed: a client and a daemon of different builds but equal version meet here.
TEST(FrameTest, TheBytesOfASmallRunAreWhatTheyWere) {
  EXPECT_EQ(absl::BytesToHexString(Encode(SampleSmallRun(3))),
            "26000000"  // size
            "0200"
            "0200"              // kind, version
            "0300000000000000"  // sequence
            "0201"              // graph 2.1
            "01"
            "00"
            "0b03"  // one input: tensor 11.3
            "01"
            "00"
            "0c04"  // one output: fresh 12.4
            "01"
            "01"
            "00"
            "01"
            "01"
            "28"
            "78"  // one group: world 1, group 0, epoch 1, base step 40 and twice call 60
            "00"  // no pairs' calls, no call that goes on
            "00"
            "00"
            "00"
            "00");  // instances, donation marks, devices, gang
}

TEST(FrameTest, EncodingAppends) {
  ByteWriter out;
  EncodeFrame(Sample(9), &out);
  const size_t first = out.size();
  EncodeFrame(Sample(3), &out);
  EXPECT_EQ(out.bytes().substr(0, first), Encode(Sample(9)));
  EXPECT_EQ(out.bytes().substr(first), Encode(Sample(3)));
}

TEST(FrameTest, NoPrefixAndNothingBehindDecodes) {
  for (const Command& command : SampleCommands()) {
    const std::string frame = Encode(command);
    for (size_t size = 0; size < frame.size(); ++size) {
      EXPECT_FALSE(DecodeFrame(frame.substr(0, size)).ok()) << size;
      if (size < kFrameHeaderBytes) continue;
      EXPECT_FALSE(DecodeFrame(WithSize(frame.substr(0, size))).ok()) << size;
    }
    EXPECT_THAT(ErrorText(WithSize(frame + '\0')), HasSubstr("expected its end, got 1 bytes more"));
  }
}

// Whatever decodes is the one encoding of what it says.
TEST(FrameTest, EveryChangedByteIsRefusedOrMeansSomethingElse) {
  int decoded_count = 0;
  int refused = 0;
  for (const Command& command : SampleCommands()) {
    const std::string frame = Encode(command);
    for (size_t at = 0; at < frame.size(); ++at) {
      for (int value = 0; value < 256; ++value) {
        std::string changed = frame;
        changed[at] = static_cast<char>(value);
        const absl::StatusOr<Command> decoded = DecodeFrame(changed);
        decoded.ok() ? ++decoded_count : ++refused;
        if (decoded.ok()) {
          ASSERT_EQ(absl::BytesToHexString(Encode(*decoded)), absl::BytesToHexString(changed));
        }
      }
    }
  }
  EXPECT_GT(decoded_count, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(FrameTest, ErrorsSayWhatWasExpected) {
  Command command = Sample(3);
  chorus::Run& run = absl::get<chorus::Run>(command.body);
  run.graph.slot = -1;
  EXPECT_THAT(ErrorText(Encode(command)), HasSubstr("frame of a Run"));
  EXPECT_THAT(ErrorText(Encode(command)), HasSubstr("expected a graph's name"));
  run.graph.slot = 1;
  InlineData large;
  large.bytes.resize(InlineData::kMaxBytes + 1);
  run.inputs[0] = large;
  EXPECT_THAT(ErrorText(Encode(command)), HasSubstr("inline data of at most 64 bytes"));
  run.inputs[0] = ExternalRange{ArenaId(1), 0, std::vector<int64_t>(17, 1)};
  EXPECT_THAT(ErrorText(Encode(command)), HasSubstr("at most 16 strides"));
  run.inputs[0] = ExternalRange{ArenaId(1), -8, {}};
  EXPECT_THAT(ErrorText(Encode(command)), HasSubstr("an offset in an arena"));
  run.inputs[0] = TensorId{1, 1};
  run.donate = {true, false};
  EXPECT_THAT(ErrorText(Encode(command)), HasSubstr("a donation mark for each input, or none"));

  Command create = Sample(5);
  absl::get<CreateTensor>(create.body).source = TensorId{1, 1};
  EXPECT_THAT(ErrorText(Encode(create)), HasSubstr("a new tensor's source"));
  create = Sample(5);
  absl::get<CreateTensor>(create.body).call_site.assign(kMaxSourceLineBytes, 'a');
  EXPECT_TRUE(DecodeFrame(Encode(create)).ok());
  absl::get<CreateTensor>(create.body).call_site += 'a';
  EXPECT_THAT(ErrorText(Encode(create)), HasSubstr("a call site of at most 512 bytes"));

  Command graph = Sample(2);
  absl::get<RegisterGraph>(graph.body).staged.strides = {1};
  EXPECT_THAT(ErrorText(Encode(graph)), HasSubstr("a graph without strides"));

  EXPECT_THAT(ErrorText(Encode(Command{Sequence(0), Cancel{Sequence(1)}})),
              HasSubstr("expected a sequence from 1, got 0"));
  EXPECT_THAT(ErrorText("short"), HasSubstr("expected 16 to 65536 bytes, got 5"));
  EXPECT_THAT(ErrorText(std::string(kMaxFrameBytes + 1, '\0')), HasSubstr("got 65537"));
  std::string frame = Encode(Sample(9));
  frame[0] = 99;
  EXPECT_THAT(ErrorText(frame), HasSubstr("its header says 99"));
  frame = Encode(Sample(9));
  frame[4] = 77;
  EXPECT_THAT(ErrorText(frame), HasSubstr("expected a kind of 1 to 9, got 77"));
  frame = Encode(Sample(9));
  frame[6] = 1;
  const absl::Status version = DecodeFrame(frame).status();
  EXPECT_EQ(ErrorOf(version).reason, Reason::kVersion);
  EXPECT_THAT(std::string(version.message()),
              HasSubstr("speaks version 2, the frame has version 1"));
}

TEST(FrameTest, NumbersOfCallsAreBounded) {
  const Command sound = Sample(3);
  const auto run_text = [&](void (*change)(chorus::Run*)) {
    Command command = sound;
    change(&absl::get<chorus::Run>(command.body));
    return ErrorText(Encode(command));
  };
  EXPECT_THAT(run_text([](auto* run) { run->groups[0].base[0].step = -1; }),
              HasSubstr("a step below 2^48"));
  EXPECT_THAT(run_text([](auto* run) { run->groups[0].base[0].step = kMaxCallNumber; }),
              HasSubstr("a step below 2^48"));
  for (const int64_t call :
       {int64_t{-1}, kMaxCallNumber, int64_t{1} << 62, std::numeric_limits<int64_t>::max()}) {
    Command command = sound;
    absl::get<chorus::Run>(command.body).groups[0].base[0].call = call;
    EXPECT_THAT(ErrorText(Encode(command)), HasSubstr("a call below 2^48")) << call;
    absl::get<chorus::Run>(command.body).groups[0].base[0].call = 0;
    absl::get<chorus::Run>(command.body).pair_calls = {call};
    EXPECT_THAT(ErrorText(Encode(command)), HasSubstr("a pair's call below 2^48")) << call;
  }
  EXPECT_THAT(run_text([](auto* run) { run->groups[0].base[0].part = -1; }),
              HasSubstr("the part of a call"));
}

TEST(FrameTest, RefusalsAreChecked) {
  const auto text = [](void (*change)(Refuse*)) {
    Command command = Sample(11);
    change(&absl::get<Refuse>(command.body));
    return ErrorText(Encode(command));
  };
  EXPECT_THAT(text([](Refuse* r) { r->members.clear(); }), HasSubstr("1 to 1024 members"));
  EXPECT_THAT(text([](Refuse* r) { r->members.resize(1025, r->members[1]); }),
              HasSubstr("1 to 1024 members"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].calls.resize(1025, r->members[0].calls[0]); }),
              HasSubstr("at most 1024 refused calls and gradients"));
  EXPECT_THAT(text([](Refuse* r) {
                const InstanceKey gradient = InstanceKey().Gradient({1, 0});
                r->members.resize(2, r->members[0]);
                for (RefusedMember& m : r->members) m.gradients.resize(600, gradient);
              }),
              HasSubstr("at most 1024 refused calls and gradients"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].rank = Rank(-1); }), HasSubstr("a rank"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].step = -1; }), HasSubstr("a step below 2^48"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].calls[0].group = GroupId(-1); }),
              HasSubstr("a group's number"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].calls[1].destination = GroupRank(-1); }),
              HasSubstr("a pair's destination"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].calls[0].first = -1; }),
              HasSubstr("a call below 2^48"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].calls[0].next = kMaxCallNumber; }),
              HasSubstr("a call below 2^48"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].calls[0].first = 9; }),
              HasSubstr("refused calls whose end is not before their start"));
  EXPECT_THAT(text([](Refuse* r) { r->members[0].gradients[0].path.clear(); }),
              HasSubstr("a gradient's key"));
  EXPECT_THAT(text([](Refuse* r) { r->why.code = absl::StatusCode::kOk; }),
              HasSubstr("a status code other than OK"));
  EXPECT_THAT(text([](Refuse* r) { r->why.code = static_cast<absl::StatusCode>(17); }),
              HasSubstr("a status code"));
  EXPECT_THAT(text([](Refuse* r) { r->why.reason = static_cast<Reason>(999); }),
              HasSubstr("a reason that this build knows"));
  EXPECT_THAT(text([](Refuse* r) { r->why.message.assign(4097, 'm'); }),
              HasSubstr("a text of at most 4096 bytes"));
  EXPECT_THAT(text([](Refuse* r) { r->why.source.assign(4097, 's'); }),
              HasSubstr("a text of at most 4096 bytes"));

  // As large as it may be.
  Command command = Sample(11);
  Refuse& refuse = absl::get<Refuse>(command.body);
  refuse.members.resize(1024, refuse.members[1]);
  refuse.why.message.assign(4096, 'm');
  refuse.why.source.assign(4096, 's');
  EXPECT_TRUE(DecodeFrame(Encode(command)).ok());
}

// A count that the frame has no bytes for allocates nothing.
TEST(FrameTest, ACommandSaysNoMoreThanASliceHasTimeFor) {
  MakeReadable readable;
  readable.tensors.assign(MakeReadable::kMaxTensors, TensorId{1, 1});
  EXPECT_TRUE(DecodeFrame(Encode({Sequence(1), readable})).ok());
  readable.tensors.push_back(TensorId{1, 1});
  EXPECT_THAT(ErrorText(Encode({Sequence(1), readable})), HasSubstr("at most 1024 tensors"));
  DropTape drop;
  drop.entries.resize(DropTape::kMaxEntries);
  EXPECT_TRUE(DecodeFrame(Encode({Sequence(1), drop})).ok());
  drop.entries.emplace_back();
  EXPECT_THAT(ErrorText(Encode({Sequence(1), drop})), HasSubstr("at most 512 tape entries"));
}

TEST(FrameTest, CountsThatCannotBeTrueAreRefused) {
  ByteWriter body;
  body.PutVarint(1);  // graph 1.1
  body.PutVarint(1);
  body.PutVarint(uint64_t{1} << 60);
  ByteWriter out;
  EncodeFrame(Command{Sequence(1), chorus::Run()}, &out);
  const std::string frame = WithSize(out.bytes().substr(0, kFrameHeaderBytes) + body.bytes());
  EXPECT_THAT(ErrorText(frame), HasSubstr("a count of inputs"));
}

TEST(FrameTest, RandomBytesNeverCrash) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const std::vector<Command> samples = SampleCommands();
  for (int i = 0; i < 50000; ++i) {
    std::string frame = Encode(samples[random() % samples.size()]);
    for (uint64_t changes = 1 + random() % 8; changes > 0; --changes) {
      frame[random() % frame.size()] = static_cast<char>(random());
    }
    if (random() % 4 == 0) frame.resize(16 + random() % 200, static_cast<char>(random()));
    frame = WithSize(frame);
    const absl::StatusOr<Command> decoded = DecodeFrame(frame);
    if (decoded.ok()) {
      ASSERT_EQ(Encode(*decoded), frame);
    }
  }
}

}  // namespace
}  // namespace chorus
