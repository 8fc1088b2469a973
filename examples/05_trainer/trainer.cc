// Lesson 5: a whole trainer. One rank of a job that trains a small network on Fashion-MNIST, one
// request to the daemon a step.
//
// tools/quickstart starts a daemon and as many of these as the job has ranks; README.md shows how
// to do it by hand. Exits with 1, and says why, when anything fails: the death of another rank too.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "chorus/chorus.h"
#include "chorus/data/plot.h"
#include "chorus/data/progress_bar.h"
#include "chorus/data/sampler.h"
#include "core/base/clock.h"
#include "core/base/error.h"
#include "examples/05_trainer/dataset.h"
#include "examples/05_trainer/model.h"

ABSL_FLAG(int, rank, -1, "This trainer's rank; -1: from the environment (RANK).");
ABSL_FLAG(int, ranks, -1, "How many there are; -1: from the environment (WORLD_SIZE).");
ABSL_FLAG(std::string, address, "", "Where chorusd listens; empty: $CHORUS_ADDRESS.");
ABSL_FLAG(std::string, data, "/usr/share/datasets/fashion-mnist", "Directory of the images.");
ABSL_FLAG(int, training_epochs, 3, "How often every image is seen.");
ABSL_FLAG(int64_t, batch, 64, "Images of a rank in a step.");
ABSL_FLAG(double, learning_rate, 0.1, "At the start; it falls to a tenth, linearly.");
ABSL_FLAG(double, momentum, 0.9, "Of SGD.");
ABSL_FLAG(uint64_t, seed, 1, "Of the initial weights and of the order of images.");
ABSL_FLAG(int, steps_under_way, 4, "How many steps may have been asked for and not be done.");
ABSL_FLAG(std::string, parameters, "", "File that this rank's final parameters go to, as floats.");
ABSL_FLAG(std::string, report, "", "File for `accuracy=... steps_per_second=...`, of rank 0.");
ABSL_FLAG(std::string, plot, "",
          "SVG file for loss and accuracy, of rank 0, which prints them too.");

namespace trainer {
namespace {

using chorus::Tensor;

// A rank's part [begin, end) of `size` things from `begin` on: one at least, where there are as
// many as ranks. Fewer, behind the last whole batch, are left out below.
std::pair<int64_t, int64_t> PartOf(int64_t begin, int64_t size, int rank, int ranks) {
  return {begin + size * rank / ranks, begin + size * (rank + 1) / ranks};
}

// The share of `data` that the model puts into the right class, with every rank's help.
absl::StatusOr<double> Accuracy(const chorus::World& world, const Dataset& data, const State& state,
                                Trainer* trainer) {
  const int64_t images = absl::GetFlag(FLAGS_batch) * world.size();  // at a time
  std::vector<int64_t> order(static_cast<size_t>(data.count));
  std::iota(order.begin(), order.end(), 0);
  std::vector<Tensor> counts;
  int64_t seen = 0;
  for (int64_t begin = 0; data.count - begin >= world.size(); begin += images) {
    const int64_t size = std::min(images, data.count - begin);
    const auto part = PartOf(begin, size, world.rank(), world.size());
    CHORUS_ASSIGN_OR_RETURN(
        Tensor right,
        trainer->CountRight(TakeBatch(data, order, part.first, part.second - part.first), state));
    counts.push_back(std::move(right));
    seen += size;
  }
  int64_t right = 0;
  for (const Tensor& count : counts) {
    CHORUS_ASSIGN_OR_RETURN(const int64_t chunk, count.Item<int64_t>());
    right += chunk;
  }
  return static_cast<double>(right) / static_cast<double>(seen);
}

absl::Status WriteParameters(const State& state, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (size_t i = 0; i < kParameters; ++i) {
    CHORUS_ASSIGN_OR_RETURN(const std::vector<float> values, state[i].Read<float>());
    file.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * sizeof(float)));
  }
  file.close();
  return file.good() ? absl::OkStatus() : absl::UnavailableError("cannot write " + path);
}

absl::Status WriteText(const std::string& text, const std::string& path) {
  std::ofstream file(path);
  file << text;
  file.close();
  return file.good() ? absl::OkStatus() : absl::UnavailableError("cannot write " + path);
}

absl::Status Train() {
  CHORUS_ASSIGN_OR_RETURN(const Dataset data, ReadDataset(absl::GetFlag(FLAGS_data), "train"));
  CHORUS_ASSIGN_OR_RETURN(const Dataset test, ReadDataset(absl::GetFlag(FLAGS_data), "t10k"));

  chorus::SessionOptions open;
  open.address = absl::GetFlag(FLAGS_address);
  CHORUS_ASSIGN_OR_RETURN(const chorus::Session session, chorus::Session::Open(open));
  chorus::WorldOptions join;
  join.rank = absl::GetFlag(FLAGS_rank);
  join.size = absl::GetFlag(FLAGS_ranks);
  CHORUS_ASSIGN_OR_RETURN(const chorus::World world, session.Join(join));
  const bool speaks = world.rank() == 0;

  ModelShape shape;
  shape.pixels = data.pixels;
  const uint64_t seed = absl::GetFlag(FLAGS_seed);
  CHORUS_ASSIGN_OR_RETURN(State state, InitialState(world, shape, seed));
  Trainer trainer(world, shape, static_cast<float>(absl::GetFlag(FLAGS_momentum)),
                  absl::GetFlag(FLAGS_batch));

  const int epochs = absl::GetFlag(FLAGS_training_epochs);
  const int64_t global_batch = absl::GetFlag(FLAGS_batch) * world.size();
  const int64_t steps = epochs * ((data.count - world.size()) / global_batch + 1);
  const auto under_way = static_cast<size_t>(absl::GetFlag(FLAGS_steps_under_way));
  chorus::plot::Curve losses{"loss", {}, {}};
  chorus::plot::Curve accuracies{"accuracy", {}, {}};
  double accuracy = 0;
  double speed = 0;
  int64_t steps_begun = 0;
  {
    chorus::data::ProgressBar progress(speaks ? stdout : stderr, steps);
    // Losses of steps under way; waiting for the oldest keeps this rank at most so far ahead.
    std::deque<Tensor> pending;
    const auto take_loss = [&]() -> absl::Status {
      CHORUS_ASSIGN_OR_RETURN(const float loss, pending.front().Item<float>());
      pending.pop_front();
      const auto steps_ended = steps_begun - static_cast<int64_t>(pending.size());
      losses.x.push_back(static_cast<double>(steps_ended));
      losses.y.push_back(loss);
      if (speaks) progress.Show(steps_ended, loss);
      return absl::OkStatus();
    };
    absl::Duration evaluating;
    const absl::Time start = chorus::SteadyNow();
    for (int epoch = 0; epoch < epochs; ++epoch) {
      const std::vector<int64_t> order = chorus::data::EpochOrder(data.count, seed, epoch);
      for (int64_t begin = 0; data.count - begin >= world.size(); begin += global_batch) {
        const int64_t size = std::min(global_batch, data.count - begin);
        const auto part = PartOf(begin, size, world.rank(), world.size());
        // A rank that leaves a step by an error is in line with the others again in the next one.
        CHORUS_RETURN_IF_ERROR(world.Step(steps_begun + 1));
        const double share = static_cast<double>(steps_begun) / static_cast<double>(steps);
        const double rate = absl::GetFlag(FLAGS_learning_rate) * (1 - 0.9 * share);
        CHORUS_ASSIGN_OR_RETURN(
            Tensor loss, trainer.Step(TakeBatch(data, order, part.first, part.second - part.first),
                                      size, static_cast<float>(rate), &state));
        pending.push_back(std::move(loss));
        ++steps_begun;
        while (pending.size() > under_way) CHORUS_RETURN_IF_ERROR(take_loss());
      }
      while (!pending.empty()) CHORUS_RETURN_IF_ERROR(take_loss());
      const absl::Time trained = chorus::SteadyNow();
      CHORUS_ASSIGN_OR_RETURN(accuracy, Accuracy(world, test, state, &trainer));
      evaluating += chorus::SteadyNow() - trained;
      accuracies.x.push_back(epoch + 1);
      accuracies.y.push_back(accuracy);
      if (speaks) {
        progress.Say(absl::StrFormat("epoch %d/%d accuracy %.4f", epoch + 1, epochs, accuracy));
      }
    }
    speed = static_cast<double>(steps_begun) /
            absl::ToDoubleSeconds(chorus::SteadyNow() - start - evaluating);
  }

  const std::string parameters = absl::GetFlag(FLAGS_parameters);
  if (!parameters.empty()) CHORUS_RETURN_IF_ERROR(WriteParameters(state, parameters));
  const std::string report = absl::GetFlag(FLAGS_report);
  if (speaks && !report.empty()) {
    CHORUS_RETURN_IF_ERROR(WriteText(
        absl::StrFormat("accuracy=%.4f steps_per_second=%.1f\n", accuracy, speed), report));
  }
  const std::string plot = absl::GetFlag(FLAGS_plot);
  if (speaks && !plot.empty()) {
    const std::string svg = chorus::plot::Svg({{"training", {"step"}, {"loss"}, {losses}},
                                               {"test", {"epoch"}, {"accuracy"}, {accuracies}}});
    CHORUS_RETURN_IF_ERROR(WriteText(svg, plot));
    std::fputs(chorus::plot::Text(losses, 72, 12).c_str(), stdout);
    std::fputs(chorus::plot::Text(accuracies, 72, 6).c_str(), stdout);
  }
  return chorus::Barrier(world).Wait();
}

}  // namespace
}  // namespace trainer

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("one rank of a job that trains a small network on Fashion-MNIST");
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = trainer::Train();
  if (status.ok()) return 0;
  const char* given = std::getenv("RANK");
  const std::string rank = absl::GetFlag(FLAGS_rank) < 0 && given != nullptr
                               ? given
                               : absl::StrCat(absl::GetFlag(FLAGS_rank));
  std::fprintf(stderr, "trainer %s: %s\n", rank.c_str(), chorus::ErrorOf(status).message.c_str());
  return 1;
}
