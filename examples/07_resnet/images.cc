#include "examples/07_resnet/images.h"

#include "absl/strings/str_cat.h"
#include "chorus/data/dataset.h"
#include "chorus/data/idx.h"
#include "chorus/data/sampler.h"
#include "chorus/parallel.h"
#include "core/base/error.h"

namespace resnet {

namespace data = chorus::data;
using chorus::parallel::HostTensor;

absl::StatusOr<Images> Images::Open(const std::string& name, const chorus::DeviceRef& device,
                                    int64_t size, int rank, int ranks,
                                    const std::string& directory) {
  const std::string base = absl::StrCat(directory, "/", name);
  CHORUS_ASSIGN_OR_RETURN(const HostTensor images,
                          data::ReadIdx(absl::StrCat(base, "-images-idx3-ubyte.gz")));
  CHORUS_ASSIGN_OR_RETURN(const HostTensor labels,
                          data::ReadIdx(absl::StrCat(base, "-labels-idx1-ubyte.gz")));
  const chorus::Shape& shape = images.shape();
  if (shape.size() != 3 || images.dtype() != chorus::DType::kU8) {
    return chorus::BadType(absl::StrCat(base, ": expected images of bytes, in three dimensions"));
  }
  const auto elements = static_cast<size_t>(shape[0] * shape[1] * shape[2]);
  const HostTensor with_channel =
      HostTensor::OfBytes(std::make_shared<HostTensor>(images), images.dtype(), images.bytes(),
                          elements, {shape[0], 1, shape[1], shape[2]});
  CHORUS_ASSIGN_OR_RETURN(const auto dataset, data::TensorDataset::Create({with_channel, labels}));
  data::DistributedSampler::Options sampling;
  sampling.rank = rank;
  sampling.replicas = ranks;
  sampling.seed = 1;
  CHORUS_ASSIGN_OR_RETURN(const auto sampler,
                          data::DistributedSampler::Create(dataset->size(), sampling));
  if (size > sampler->size()) {
    return chorus::BadType(absl::StrCat(base, ": expected batches of at most ", sampler->size(),
                                        " images on each of ", ranks, " ranks, got ", size));
  }
  data::DataLoader::Options loading;
  loading.batch_size = size;
  loading.drop_last = true;
  loading.device = device;
  CHORUS_ASSIGN_OR_RETURN(auto loader, data::DataLoader::Create(dataset, sampler, loading));
  return Images(std::move(loader));
}

absl::StatusOr<std::vector<chorus::Tensor>> Images::Next() {
  CHORUS_ASSIGN_OR_RETURN(data::Batch batch, loader_->Next());
  if (batch.empty()) {
    loader_->SetEpoch(loader_->epoch() + 1);
    CHORUS_ASSIGN_OR_RETURN(batch, loader_->Next());
  }
  return batch.tensors;
}

}  // namespace resnet
