#include "core/ops/convolution/convolution_host.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <dnnl.hpp>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/ops/convolution/convolution.h"
#include "core/ops/host_onednn.h"

namespace chorus {
namespace {

// Which of x, w and y is the result.
enum class Gives { kY, kX, kW };

// Elements of one sample, and of one pair of channels.
int64_t Plane(const std::array<int64_t, 2>& sizes) { return sizes[0] * sizes[1]; }
int64_t Taps(const ConvolutionSizes& s) { return s.windows[0].kernel * s.windows[1].kernel; }

// --- Plain loops --------------------------------------------------------------------------------

// A unit is a plane of the result: of a channel of a sample, or of a pair of channels.
template <typename T>
class Loops : public HostKernel {
 public:
  Loops(const ConvolutionSizes& s, Gives gives)
      : HostKernel(UnitsOf(s, gives), CostOf(s, gives)), s_(s), gives_(gives) {}

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    T* const out = static_cast<T*>(buffers.outputs[0]);
    const T* const a = static_cast<const T*>(buffers.inputs[0]);
    const T* const b = static_cast<const T*>(buffers.inputs[1]);
    for (int64_t unit = begin; unit < end; ++unit) {
      switch (gives_) {
        case Gives::kY:
          PlaneOfY(a, b, unit, out + unit * Plane(s_.y));
          break;
        case Gives::kX:
          PlaneOfX(a, b, unit, out + unit * Plane(s_.x));
          break;
        case Gives::kW:
          PlaneOfW(a, b, unit, out + unit * Taps(s_));
          break;
      }
    }
    return absl::OkStatus();
  }

 private:
  static int64_t UnitsOf(const ConvolutionSizes& s, Gives gives) {
    switch (gives) {
      case Gives::kY:
        return Plane(s.y) == 0 ? 0 : s.batch * s.groups * s.out;
      case Gives::kX:
        return Plane(s.x) == 0 ? 0 : s.batch * s.groups * s.in;
      default:
        return s.groups * s.out * s.in;
    }
  }
  static int64_t CostOf(const ConvolutionSizes& s, Gives gives) {
    const int64_t plane = gives == Gives::kY   ? Plane(s.y)
                          : gives == Gives::kX ? Plane(s.x)
                                               : Taps(s);
    const int64_t products = gives == Gives::kY ? s.in : gives == Gives::kX ? s.out : s.batch;
    // Before anything is multiplied, of each tap its places are found, and of each row of these the
    // first.
    constexpr auto kTap = static_cast<double>(CostOfLoops(1));
    constexpr double kRow = 8;
    const double places = kTap + static_cast<double>(s.y[0]) * (kRow + static_cast<double>(s.y[1]));
    const double sums = places * static_cast<double>(Taps(s) * products);
    // No number holds what the largest tensors could cost.
    constexpr double kMost = 1e15;
    return plane * int64_t{sizeof(T)} + static_cast<int64_t>(std::min(sums, kMost));
  }

  // Calls f(x, y, count) for the runs of elements of a plane of x that tap (i, j) is over, with
  // those of y that it is for; from one to the next of x is a stride.
  template <typename F>
  void ForEachRun(int64_t i, int64_t j, const F& f) const {
    const Window& over_h = s_.windows[0];
    const Window& over_w = s_.windows[1];
    const Window::Range rows = over_h.PlacesOfTap(i, s_.x[0]);
    const Window::Range columns = over_w.PlacesOfTap(j, s_.x[1]);
    if (columns.begin == columns.end) return;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      f(over_h.ElementAt(row, i) * s_.x[1] + over_w.ElementAt(columns.begin, j),
        row * s_.y[1] + columns.begin, columns.end - columns.begin);
    }
  }
  template <typename F>
  void ForEachTap(const F& f) const {
    for (int64_t i = 0; i < s_.windows[0].kernel; ++i) {
      for (int64_t j = 0; j < s_.windows[1].kernel; ++j) f(i, j, i * s_.windows[1].kernel + j);
    }
  }

  void PlaneOfY(const T* x, const T* w, int64_t unit, T* y) const {
    const int64_t step = s_.windows[1].stride;
    const int64_t channel = unit % (s_.groups * s_.out);
    x += (unit / (s_.groups * s_.out) * s_.groups + channel / s_.out) * s_.in * Plane(s_.x);
    w += channel * s_.in * Taps(s_);
    std::fill_n(y, Plane(s_.y), T{});
    for (int64_t c = 0; c < s_.in; ++c, x += Plane(s_.x), w += Taps(s_)) {
      ForEachTap([&](int64_t i, int64_t j, int64_t tap) {
        const T factor = w[tap];
        ForEachRun(i, j, [&](int64_t from, int64_t to, int64_t count) {
          for (int64_t k = 0; k < count; ++k) y[to + k] += factor * x[from + k * step];
        });
      });
    }
  }

  void PlaneOfX(const T* y, const T* w, int64_t unit, T* x) const {
    const int64_t step = s_.windows[1].stride;
    const int64_t channel = unit % (s_.groups * s_.in);
    const int64_t group = channel / s_.in;
    y += (unit / (s_.groups * s_.in) * s_.groups + group) * s_.out * Plane(s_.y);
    w += (group * s_.out * s_.in + channel % s_.in) * Taps(s_);
    std::fill_n(x, Plane(s_.x), T{});
    for (int64_t o = 0; o < s_.out; ++o, y += Plane(s_.y), w += s_.in * Taps(s_)) {
      ForEachTap([&](int64_t i, int64_t j, int64_t tap) {
        const T factor = w[tap];
        ForEachRun(i, j, [&](int64_t from, int64_t to, int64_t count) {
          for (int64_t k = 0; k < count; ++k) x[from + k * step] += factor * y[to + k];
        });
      });
    }
  }

  void PlaneOfW(const T* x, const T* y, int64_t unit, T* w) const {
    const int64_t step = s_.windows[1].stride;
    const int64_t channel = unit / s_.in;  // of y
    x += (channel / s_.out * s_.in + unit % s_.in) * Plane(s_.x);
    y += channel * Plane(s_.y);
    std::fill_n(w, Taps(s_), T{});
    for (int64_t n = 0; n < s_.batch; ++n) {
      ForEachTap([&](int64_t i, int64_t j, int64_t tap) {
        T sum{};
        ForEachRun(i, j, [&](int64_t from, int64_t to, int64_t count) {
          for (int64_t k = 0; k < count; ++k) sum += x[from + k * step] * y[to + k];
        });
        w[tap] += sum;
      });
      x += s_.groups * s_.in * Plane(s_.x);
      y += s_.groups * s_.out * Plane(s_.y);
    }
  }

  const ConvolutionSizes s_;
  const Gives gives_;
};

// --- oneDNN -------------------------------------------------------------------------------------

using dnnl::memory;
using Dims = memory::dims;

const dnnl::engine& Engine() {
  static const auto* const engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// How a convolution is cut: into blocks of samples and equal slices, of the groups where there are
// several, else of the channels of y, of the result where that is x.
struct Cut {
  Cut(const ConvolutionSizes& s, Gives gives) {
    const int64_t weights = s.groups * s.out * s.in * Taps(s);
    const int64_t sample = s.groups * (s.in * Plane(s.x) + s.out * Plane(s.y));
    // So many that weights do not cost more than samples to bring in, nor calls more than either.
    constexpr int64_t kElements = 1 << 16;
    constexpr int64_t kMostBlocks = 64;
    samples = std::max({weights / sample, kElements / sample,
                        (s.batch + kMostBlocks - 1) / kMostBlocks, int64_t{1}});
    samples = std::min(samples, s.batch);
    blocks = (s.batch + samples - 1) / samples;
    // Enough units for several processors; each reads all of the operand that is not sliced, which
    // should be worth it.
    constexpr int64_t kUnits = 8;
    constexpr int64_t kProducts = 512;
    constexpr int64_t kChannels = 32;
    const int64_t units = gives == Gives::kW ? 1 : blocks;
    const int64_t channels = s.groups > 1 ? s.groups : gives == Gives::kX ? s.in : s.out;
    while (units * slices < kUnits && channels % (slices * 2 * kChannels) == 0 &&
           (s.groups > 1 || channels / slices / 2 * Taps(s) >= kProducts)) {
      slices *= 2;
    }
  }
  int64_t samples = 1;  // of a block; the last may have fewer
  int64_t blocks = 1;
  int64_t slices = 1;
};

// An operand: as it lies in the tensor, and as the convolution wants it.
struct ConvOperand {
  memory::desc here;
  memory::desc wanted;
  dnnl::reorder reorder;  // between the two; none where they are equal
  bool reordered = false;
  int64_t bytes() const { return reordered ? Aligned(int64_t(wanted.get_size())) : 0; }
};

// The convolution of one slice of a number of samples. Throws what oneDNN refuses.
class Block {
 public:
  // `like`: wants its weights as that one does, unless it is null.
  Block(const ConvolutionSizes& s, Gives gives, int64_t samples, int64_t slices, const Block* like)
      : gives_(gives) {
    const int64_t groups = s.groups > 1 ? s.groups / slices : 1;
    const int64_t in = s.groups == 1 && gives == Gives::kX ? s.in / slices : s.in;
    const int64_t out = s.groups == 1 && gives != Gives::kX ? s.out / slices : s.out;
    const Window& over_h = s.windows[0];
    const Window& over_w = s.windows[1];
    const auto images = [&](int64_t channels, int64_t all, const std::array<int64_t, 2>& sizes) {
      return memory::desc({samples, channels, sizes[0], sizes[1]}, memory::data_type::f32,
                          Dims{all * Plane(sizes), Plane(sizes), sizes[1], 1});
    };
    // A single tap that strides reads a part of x: what brings x in leaves the rest out. oneDNN
    // takes no tensor in which the end of a row or plane would lie behind the next one's begin;
    // with padding it always would.
    bool thin = gives != Gives::kX && Taps(s) == 1 && over_h.stride * over_w.stride > 1;
    for (size_t d = 0; d < 2; ++d) thin = thin && s.y[d] * s.windows[d].stride <= s.x[d];
    x.here = images(groups * in, s.groups * s.in, s.x);
    if (thin) {
      x.here = memory::desc(
          {samples, groups * in, s.y[0], s.y[1]}, memory::data_type::f32,
          Dims{s.groups * s.in * Plane(s.x), Plane(s.x), over_h.stride * s.x[1], over_w.stride});
    }
    y.here = images(groups * out, s.groups * s.out, s.y);
    Dims w_dims = {out, in, over_h.kernel, over_w.kernel};
    Dims w_strides = {s.in * Taps(s), Taps(s), over_w.kernel, 1};
    if (s.groups > 1) {
      w_dims.insert(w_dims.begin(), groups);
      w_strides.insert(w_strides.begin(), s.out * s.in * Taps(s));
    }
    w.here = memory::desc(w_dims, memory::data_type::f32, w_strides);
    const auto any = [](const memory::desc& desc) {
      return memory::desc(desc.dims(), memory::data_type::f32, memory::format_tag::any);
    };
    const Dims strides = {thin ? 1 : over_h.stride, thin ? 1 : over_w.stride};
    const Dims dilates = {over_h.dilation - 1, over_w.dilation - 1};
    const Dims padding = {over_h.padding, over_w.padding};
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    constexpr auto kDirect = dnnl::algorithm::convolution_direct;
    const dnnl::convolution_forward::primitive_desc forward(
        {gives == Gives::kY ? dnnl::prop_kind::forward_inference
                            : dnnl::prop_kind::forward_training,
         kDirect, any(x.here), any(w.here), any(y.here), strides, dilates, padding, padding},
        attributes, Engine());
    const auto take = [&](const auto& description) { scratchpad_ = description.scratchpad_desc(); };
    switch (gives) {
      case Gives::kY: {
        take(forward);
        x.wanted = forward.src_desc();
        w.wanted = forward.weights_desc();
        y.wanted = forward.dst_desc();
        convolution_ = dnnl::convolution_forward(forward);
        break;
      }
      case Gives::kX: {
        const dnnl::convolution_backward_data::primitive_desc backward(
            {kDirect, any(x.here), any(w.here), any(y.here), strides, dilates, padding, padding},
            attributes, Engine(), forward);
        take(backward);
        x.wanted = backward.diff_src_desc();
        w.wanted = backward.weights_desc();
        y.wanted = backward.diff_dst_desc();
        convolution_ = dnnl::convolution_backward_data(backward);
        break;
      }
      case Gives::kW: {
        const dnnl::convolution_backward_weights::primitive_desc backward(
            {kDirect, any(x.here), like == nullptr ? any(w.here) : like->w.wanted, any(y.here),
             strides, dilates, padding, padding},
            attributes, Engine(), forward);
        take(backward);
        x.wanted = backward.src_desc();
        w.wanted = backward.diff_weights_desc();
        y.wanted = backward.diff_dst_desc();
        convolution_ = dnnl::convolution_backward_weights(backward);
        break;
      }
    }
    scratchpad_bytes_ = static_cast<int64_t>(scratchpad_.get_size());
    AddReorder(gives == Gives::kX, attributes, &x);
    // Sums over blocks of samples stand in memory of their own.
    AddReorder(gives == Gives::kW, attributes, &w);
    AddReorder(gives == Gives::kY, attributes, &y);
  }

  ConvOperand x, w, y;
  int64_t scratchpad_bytes() const { return Aligned(scratchpad_bytes_); }

  // With each where it is wanted.
  absl::Status Convolve(void* x_data, void* w_data, void* y_data, void* scratchpad) const {
    const int x_arg = gives_ == Gives::kX ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC;
    const int w_arg = gives_ == Gives::kW ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS;
    const int y_arg = gives_ == Gives::kY ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST;
    return Execute(convolution_, {{x_arg, &x.wanted, x_data},
                                  {w_arg, &w.wanted, w_data},
                                  {y_arg, &y.wanted, y_data},
                                  {DNNL_ARG_SCRATCHPAD, &scratchpad_, scratchpad}});
  }
  // An input on its way in, or the result on its way out.
  absl::Status Move(const ConvOperand& operand, bool in, void* here, void* wanted) const {
    return Execute(operand.reorder, {{in ? DNNL_ARG_FROM : DNNL_ARG_TO, &operand.here, here},
                                     {in ? DNNL_ARG_TO : DNNL_ARG_FROM, &operand.wanted, wanted}});
  }

 private:
  struct Argument {
    int name;
    const memory::desc* desc;
    void* data;
  };

  void AddReorder(bool is_result, const dnnl::primitive_attr& attributes, ConvOperand* operand) {
    operand->reordered = operand->here != operand->wanted;
    if (!operand->reordered) return;
    const memory::desc& from = is_result ? operand->wanted : operand->here;
    const memory::desc& to = is_result ? operand->here : operand->wanted;
    const dnnl::reorder::primitive_desc description(Engine(), from, Engine(), to, attributes);
    // Plain ones want none.
    if (description.scratchpad_desc().get_size() != 0) throw dnnl::error(dnnl_unimplemented, "");
    operand->reorder = dnnl::reorder(description);
  }

  // The C interface, which throws nothing.
  template <size_t n>
  static absl::Status Execute(const dnnl::primitive& primitive, const Argument (&arguments)[n]) {
    UseOneThread();
    // oneDNN does not say that a stream may be used by several threads.
    struct Stream {
      dnnl_stream_t stream = nullptr;
      ~Stream() { dnnl_stream_destroy(stream); }
    };
    thread_local Stream stream;
    dnnl_status_t status = dnnl_success;
    if (stream.stream == nullptr) {
      status = dnnl_stream_create(&stream.stream, Engine().get(), dnnl_stream_default_flags);
    }
    dnnl_exec_arg_t given[n];
    size_t count = 0;
    for (; count < n && status == dnnl_success; ++count) {
      given[count] = {arguments[count].name, nullptr};
      status = dnnl_memory_create(&given[count].memory, &arguments[count].desc->data,
                                  Engine().get(), arguments[count].data);
    }
    if (status == dnnl_success) {
      status = dnnl_primitive_execute(primitive.get(), stream.stream, static_cast<int>(n), given);
    }
    while (count > 0) dnnl_memory_destroy(given[--count].memory);
    if (status == dnnl_success) return absl::OkStatus();
    return MakeError(
        status == dnnl_out_of_memory ? Reason::kOutOfMemory : Reason::kInternal,
        absl::StrCat("convolution: oneDNN answers with status ", static_cast<int>(status)));
  }

  const Gives gives_;
  dnnl::primitive convolution_;
  memory::desc scratchpad_;
  int64_t scratchpad_bytes_ = 0;
};

class OneDnn : public HostKernel {
 public:
  // Throws what oneDNN refuses.
  static std::unique_ptr<HostKernel> Make(const ConvolutionSizes& s, Gives gives) {
    // Where it is made of products, as some of single taps are.
    PrepareSgemm();
    const Cut cut(s, gives);
    Block whole(s, gives, cut.samples, cut.slices, nullptr);
    const int64_t rest = s.batch % cut.samples;
    std::unique_ptr<Block> last;
    if (rest != 0) last = std::make_unique<Block>(s, gives, rest, cut.slices, &whole);
    return std::unique_ptr<HostKernel>(
        new OneDnn(s, gives, cut, std::move(whole), std::move(last)));
  }

  absl::Status Run(const HostBuffers& buffers, int64_t begin, int64_t end) const override {
    char* const room = buffers.workspace.data() + begin * room_.all();
    const void* const a = buffers.inputs[0];
    const void* const b = buffers.inputs[1];
    void* const out = buffers.outputs[0];
    switch (gives_) {
      case Gives::kY:
        return RunBlocks(const_cast<void*>(a), const_cast<void*>(b), out, room, begin, end);
      case Gives::kX:
        return RunBlocks(out, const_cast<void*>(b), const_cast<void*>(a), room, begin, end);
      default:
        return RunWeights(const_cast<void*>(a), const_cast<void*>(b), out, buffers.workspace.data(),
                          begin, end);
    }
  }

 private:
  // What a unit may use: for the operands where they are wanted, then for the scratchpad. Of
  // weights there are the sums and what is added to them.
  struct Room {
    int64_t x = 0, w = 0, y = 0, sums = 0, scratchpad = 0;
    int64_t all() const { return x + w + y + sums + scratchpad; }
  };

  static Room RoomOf(Gives gives, const Block& whole, const Block* last, const Cut& cut) {
    Room room;
    for (const Block* block : {&whole, last}) {
      if (block == nullptr) continue;
      room.x = std::max(room.x, block->x.bytes());
      room.y = std::max(room.y, block->y.bytes());
      room.w = std::max(room.w, block->w.bytes());
      room.scratchpad = std::max(room.scratchpad, block->scratchpad_bytes());
    }
    if (gives == Gives::kW && cut.blocks > 1) {
      room.w = room.sums = Aligned(static_cast<int64_t>(whole.w.wanted.get_size()));
    }
    return room;
  }
  static int64_t UnitsOf(Gives gives, const Cut& cut) {
    return cut.slices * (gives == Gives::kW ? 1 : cut.blocks);
  }
  static int64_t CostOf(const ConvolutionSizes& s, Gives gives, const Cut& cut) {
    const int64_t samples = gives == Gives::kW ? s.batch : cut.samples;
    const int64_t images = samples * s.groups * (s.in * Plane(s.x) + s.out * Plane(s.y));
    const int64_t weights = s.groups * s.out * s.in * Taps(s);
    // As many multiply-adds as it does in the time of one byte.
    constexpr int64_t kProducts = 8;
    return (images + weights) * int64_t{sizeof(float)} / cut.slices + 1 +
           samples * Plane(s.y) * weights / cut.slices / kProducts;
  }

  OneDnn(const ConvolutionSizes& s, Gives gives, const Cut& cut, Block whole,
         std::unique_ptr<Block> last)
      : HostKernel(UnitsOf(gives, cut), CostOf(s, gives, cut),
                   UnitsOf(gives, cut) * RoomOf(gives, whole, last.get(), cut).all()),
        s_(s),
        gives_(gives),
        cut_(cut),
        whole_(std::move(whole)),
        last_(std::move(last)),
        room_(RoomOf(gives, whole_, last_.get(), cut)) {}

  const Block& BlockAt(int64_t block) const {
    return last_ != nullptr && block == cut_.blocks - 1 ? *last_ : whole_;
  }
  // Where the parts of a block and slice begin. What is not sliced begins with its block.
  float* XAt(void* x, int64_t block, int64_t slice) const {
    const bool sliced = s_.groups > 1 || gives_ == Gives::kX;
    const int64_t channels = s_.groups * s_.in;
    return static_cast<float*>(x) +
           (block * cut_.samples * channels + (sliced ? slice * channels / cut_.slices : 0)) *
               Plane(s_.x);
  }
  float* YAt(void* y, int64_t block, int64_t slice) const {
    const bool sliced = s_.groups > 1 || gives_ != Gives::kX;
    const int64_t channels = s_.groups * s_.out;
    return static_cast<float*>(y) +
           (block * cut_.samples * channels + (sliced ? slice * channels / cut_.slices : 0)) *
               Plane(s_.y);
  }
  float* WAt(void* w, int64_t slice) const {
    const int64_t first = s_.groups == 1 && gives_ == Gives::kX
                              ? slice * s_.in / cut_.slices
                              : slice * s_.groups * s_.out / cut_.slices * s_.in;
    return static_cast<float*>(w) + first * Taps(s_);
  }

  // Brings an input where it is wanted, unless it is there.
  static absl::Status Bring(const Block& block, const ConvOperand& operand, bool is_there,
                            void* here, void* room, void** wanted) {
    *wanted = operand.reordered ? room : here;
    if (is_there || !operand.reordered) return absl::OkStatus();
    return block.Move(operand, /*in=*/true, here, room);
  }

  // What one unit needs and the next one too is brought in once.
  absl::Status RunBlocks(void* x, void* w, void* y, char* room, int64_t begin, int64_t end) const {
    char* const x_room = room;
    char* const w_room = x_room + room_.x;
    char* const y_room = w_room + room_.w;
    char* const scratchpad = y_room + room_.y;
    int64_t last_block = -1;
    int64_t last_slice = -1;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t index = unit % cut_.blocks;
      const int64_t slice = unit / cut_.blocks;
      const Block& block = BlockAt(index);
      const bool same_w = slice == last_slice && &block == &BlockAt(last_block);
      const bool same_images = index == last_block && s_.groups == 1;
      float* const x_here = XAt(x, index, slice);
      float* const w_here = WAt(w, slice);
      float* const y_here = YAt(y, index, slice);
      void* w_there = nullptr;
      CHORUS_RETURN_IF_ERROR(Bring(block, block.w, same_w, w_here, w_room, &w_there));
      void* x_there = block.x.reordered ? x_room : static_cast<void*>(x_here);
      void* y_there = block.y.reordered ? y_room : static_cast<void*>(y_here);
      if (gives_ == Gives::kY) {
        CHORUS_RETURN_IF_ERROR(Bring(block, block.x, same_images, x_here, x_room, &x_there));
      } else {
        CHORUS_RETURN_IF_ERROR(Bring(block, block.y, same_images, y_here, y_room, &y_there));
      }
      CHORUS_RETURN_IF_ERROR(block.Convolve(x_there, w_there, y_there, scratchpad));
      const bool gives_y = gives_ == Gives::kY;
      const ConvOperand& result = gives_y ? block.y : block.x;
      if (result.reordered) {
        CHORUS_RETURN_IF_ERROR(block.Move(result, /*in=*/false, gives_y ? y_here : x_here,
                                          gives_y ? y_there : x_there));
      }
      last_block = index;
      last_slice = slice;
    }
    return absl::OkStatus();
  }

  absl::Status RunWeights(void* x, void* y, void* w, char* workspace, int64_t begin,
                          int64_t end) const {
    char* const x_room = workspace + begin * room_.all();
    char* const y_room = x_room + room_.x;
    char* const w_room = y_room + room_.y;
    char* const scratchpad = w_room + room_.w;
    for (int64_t index = 0; index < cut_.blocks; ++index) {
      const Block& block = BlockAt(index);
      for (int64_t slice = begin; slice < end; ++slice) {
        const bool same_x = slice > begin && s_.groups == 1;
        void* x_there = nullptr;
        void* y_there = nullptr;
        CHORUS_RETURN_IF_ERROR(
            Bring(block, block.x, same_x, XAt(x, index, slice), x_room, &x_there));
        CHORUS_RETURN_IF_ERROR(
            Bring(block, block.y, false, YAt(y, index, slice), y_room, &y_there));
        float* const w_here = WAt(w, slice);
        if (cut_.blocks == 1) {
          void* const w_there = block.w.reordered ? w_room : static_cast<void*>(w_here);
          CHORUS_RETURN_IF_ERROR(block.Convolve(x_there, w_there, y_there, scratchpad));
          if (block.w.reordered) {
            CHORUS_RETURN_IF_ERROR(block.Move(block.w, /*in=*/false, w_here, w_there));
          }
          continue;
        }
        char* const room = workspace + slice * room_.all();
        auto* const sums = reinterpret_cast<float*>(room + room_.all() - room_.sums);
        auto* const block_sums = reinterpret_cast<float*>(w_room);
        CHORUS_RETURN_IF_ERROR(
            block.Convolve(x_there, index == 0 ? sums : block_sums, y_there, scratchpad));
        const size_t bytes = block.w.wanted.get_size();
        if (index > 0) {
          for (size_t i = 0; i < bytes / sizeof(float); ++i) sums[i] += block_sums[i];
        }
        if (index + 1 < cut_.blocks) continue;
        if (block.w.reordered) {
          CHORUS_RETURN_IF_ERROR(block.Move(block.w, /*in=*/false, w_here, sums));
        } else {
          std::memcpy(w_here, sums, bytes);
        }
      }
    }
    return absl::OkStatus();
  }

  const ConvolutionSizes s_;
  const Gives gives_;
  const Cut cut_;
  const Block whole_;
  const std::unique_ptr<Block> last_;  // of fewer samples; null where there are none
  const Room room_;
};

// Whether oneDNN's numbers, many of which are of 32 bits, hold the sizes, and there is something to
// add up.
bool FitsOneDnn(const ConvolutionSizes& s) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  int64_t elements[3] = {s.batch * s.groups, s.batch * s.groups, s.groups * s.in};
  const int64_t factors[3][3] = {{s.in, s.x[0], s.x[1]},
                                 {s.out, s.y[0], s.y[1]},
                                 {s.out, s.windows[0].kernel, s.windows[1].kernel}};
  for (size_t i = 0; i < 3; ++i) {
    for (const int64_t factor : factors[i]) {
      if (factor == 0 || elements[i] == 0 || elements[i] > kMost / factor) return false;
      elements[i] *= factor;
    }
  }
  for (const Window& window : s.windows) {
    if (window.extent() + window.padding > kMost) return false;
  }
  return true;
}

HostKernelOrError MakeFor(const NodeView& node, absl::Span<const TensorType> outputs,
                          const TensorType& x, const TensorType& w, Gives gives) {
  CHORUS_ASSIGN_OR_RETURN(const ConvolutionSizes s, SizesOfConvolution(node, x, w));
  if (x.dtype == DType::kF64) return std::make_unique<Loops<double>>(s, gives);
  if (x.dtype != DType::kF32) return NoHostKernel(node, outputs);
  if (FitsOneDnn(s)) {
    UseOneThread();
    try {
      return OneDnn::Make(s, gives);
    } catch (const dnnl::error&) {
      // It has no code for these sizes.
    }
  }
  return std::make_unique<Loops<float>>(s, gives);
}

HostKernelOrError MakeY(const NodeView& node, absl::Span<const TensorType> outputs) {
  return MakeFor(node, outputs, node.input(0), node.input(1), Gives::kY);
}
HostKernelOrError MakeX(const NodeView& node, absl::Span<const TensorType> outputs) {
  return MakeFor(node, outputs, outputs[0], node.input(1), Gives::kX);
}
HostKernelOrError MakeW(const NodeView& node, absl::Span<const TensorType> outputs) {
  return MakeFor(node, outputs, node.input(0), outputs[0], Gives::kW);
}

constexpr HostKernelEntry kEntries[] = {
    {"convolution", MakeY}, {"convolution_data_grad", MakeX}, {"convolution_weight_grad", MakeW}};

}  // namespace

absl::Span<const HostKernelEntry> ConvolutionHostKernels() { return kEntries; }

}  // namespace chorus
