#include "chorus/nn/shards.h"

#include <sys/stat.h>

#include <algorithm>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "client/nn/json_object.h"
#include "core/base/error.h"
#include "core/base/file.h"
#include "nlohmann/json.hpp"

namespace chorus {
namespace nn {
namespace {

using Json = nlohmann::json;
using Entry = TensorFile::Entry;
using Words = std::map<std::string, std::string>;

constexpr char kIndexEnd[] = ".safetensors.index.json";

absl::Status Refuse(const std::string& path, const std::string& what) {
  return MakeError(Reason::kMalformed, absl::StrCat(path, ": ", what));
}

// "table[0:128/512]"
struct Key {
  std::string name;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t rows = -1;  // -1: a whole tensor

  std::string ToString() const {
    if (rows < 0) return name;
    return absl::StrCat(name, "[", begin, ":", end, "/", rows, "]");
  }
};

Key ParseKey(const std::string& text) {
  Key key;
  key.name = text;
  const size_t open = text.rfind('['), colon = text.rfind(':'), slash = text.rfind('/');
  if (open == std::string::npos || colon == std::string::npos || slash == std::string::npos ||
      colon < open || slash < colon) {
    return key;
  }
  Key piece;
  piece.name = text.substr(0, open);
  const absl::string_view all = text;
  const bool numbers = absl::SimpleAtoi(all.substr(open + 1, colon - open - 1), &piece.begin) &&
                       absl::SimpleAtoi(all.substr(colon + 1, slash - colon - 1), &piece.end) &&
                       absl::SimpleAtoi(all.substr(slash + 1, all.size() - slash - 2), &piece.rows);
  // Another spelling is another name.
  const bool is_piece = numbers && piece.begin >= 0 && piece.begin < piece.end &&
                        piece.end <= piece.rows && piece.ToString() == text;
  return is_piece ? piece : key;
}

// Where rows of a tensor are.
struct Part {
  int64_t begin = 0;
  int64_t end = 0;
  size_t file = 0;
  std::string key;
};

absl::Status NoTensor(const std::string& path, const std::string& name) {
  return MakeError(Reason::kUnknownName, absl::StrCat(path, ": no tensor \"", name, "\""));
}

std::string RowText(int64_t begin, int64_t end) {
  return absl::StrCat("rows ", begin, " to ", end - 1);
}

std::string TypeOf(const Entry& entry) {
  return TensorType(entry.dtype, {entry.shape.begin(), entry.shape.end()}).ToString();
}

bool Exists(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0;
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

std::string BaseOf(const std::string& path) { return path.substr(FolderOf(path).size()); }

}  // namespace

std::string ShardPath(const std::string& name, int shard, int shards) {
  return absl::StrFormat("%s-%05d-of-%05d.safetensors", name, shard + 1, shards);
}

std::string ShardIndexPath(const std::string& name) { return absl::StrCat(name, kIndexEnd); }

// --- Writing ------------------------------------------------------------------------------------

absl::Status SaveShard(const std::string& name, int shard, int shards,
                       const std::vector<TensorPiece>& pieces, const Words& metadata) {
  const std::string path = ShardPath(name, shard, shards);
  if (shard < 0 || shard >= shards) {
    return BadType(
        absl::StrCat(path, ": expected a shard of 1 or more, got shard ", shard, " of ", shards));
  }
  if (Exists(ShardIndexPath(name))) {
    return MakeError(Reason::kWrongState,
                     absl::StrCat(ShardIndexPath(name), " is there: a name is used once"));
  }
  // The index is to have its name; who writes that would find out when the others wait.
  CHORUS_RETURN_IF_ERROR(JsonText(path, BaseOf(path)).status());
  std::vector<NamedTensor> tensors;
  for (const TensorPiece& piece : pieces) {
    const Shape& shape = piece.tensor.shape();
    CHORUS_RETURN_IF_ERROR(piece.tensor.status());
    const std::string where = absl::StrCat(path, ": \"", piece.name, "\"");
    if (ParseKey(piece.name).rows >= 0) {
      return BadType(absl::StrCat(where, " cannot be a tensor's name here: it is a piece's"));
    }
    Key key{piece.name, piece.begin, piece.begin, piece.rows};
    if (piece.rows >= 0) {
      if (shape.empty() || piece.begin < 0 || piece.begin > piece.rows ||
          shape[0] > piece.rows - piece.begin) {
        return BadType(absl::StrCat(where, ": expected rows of ", piece.rows, " from ", piece.begin,
                                    " on, got ", piece.tensor.num_elements(), " elements in ",
                                    shape.empty() ? 0 : shape[0], " rows"));
      }
      key.end = piece.begin + shape[0];
      const bool is_whole = shape[0] == piece.rows;
      // Of a tensor without rows every rank has all.
      if (shape[0] == 0 && !(is_whole && shard == 0)) continue;
      if (is_whole) key.rows = -1;
    }
    tensors.push_back({key.ToString(), piece.tensor});
  }
  return SaveTensors(path, tensors, metadata);
}

absl::Status FinishShards(const std::string& name, int shards) {
  const std::string path = ShardIndexPath(name);
  if (shards < 1) return BadType(absl::StrCat(path, ": expected a shard or more, got ", shards));
  if (Exists(path)) {
    return MakeError(Reason::kWrongState, absl::StrCat(path, " is there: a name is used once"));
  }
  Json map = Json::object();
  uint64_t total = 0;
  Words metadata;
  for (int shard = 0; shard < shards; ++shard) {
    const std::string shard_path = ShardPath(name, shard, shards);
    CHORUS_ASSIGN_OR_RETURN(const TensorFile file, TensorFile::Open(shard_path));
    const std::string base = BaseOf(shard_path);
    if (shard == 0) metadata = file.metadata();
    for (const Entry& entry : file.entries()) {
      if (map.contains(entry.name)) {
        return Refuse(shard_path, absl::StrCat("\"", entry.name, "\" is in ",
                                               map[entry.name].get<std::string>(), " too"));
      }
      map[entry.name] = base;
      CHORUS_ASSIGN_OR_RETURN(const absl::string_view bytes, file.Bytes(entry.name));
      total += bytes.size();
    }
    // A file without tensors would be in no map.
    if (file.entries().empty() && file.metadata() != metadata) {
      return Refuse(shard_path, "it was saved with other metadata than the first shard");
    }
  }
  const Json index = {{"metadata", {{"total_size", total}, {"progress", metadata}}},
                      {"weight_map", map}};
  CHORUS_ASSIGN_OR_RETURN(std::string text, JsonText(path, index, 2));
  text += "\n";
  CHORUS_RETURN_IF_ERROR(TensorFiles::OfIndex(path, text).status());
  return ReplaceFile(path, {text});
}

// --- Reading ------------------------------------------------------------------------------------

struct TensorFiles::Content {
  // Files and `parts` are there: what they make.
  absl::Status Assemble();

  std::string path;
  std::vector<std::string> paths;  // by file
  std::vector<TensorFile> files;
  std::map<std::string, std::vector<Part>> parts;  // by tensor, by row
  std::vector<Entry> entries;
  Words metadata;
};

absl::Status TensorFiles::Content::Assemble() {
  for (size_t f = 0; f < files.size(); ++f) {
    for (const Entry& entry : files[f].entries()) {
      const Key key = ParseKey(entry.name);
      Part part{key.begin, key.end, f, entry.name};
      if (key.rows >= 0 && (entry.shape.empty() || entry.shape[0] != key.end - key.begin)) {
        return Refuse(paths[f], absl::StrCat("\"", entry.name, "\": expected ", key.end - key.begin,
                                             " rows, got ", TypeOf(entry)));
      }
      if (key.rows < 0) part.end = entry.shape.empty() ? 1 : entry.shape[0];
      parts[key.name].push_back(std::move(part));
    }
  }
  for (auto& named : parts) {
    std::vector<Part>& pieces = named.second;
    std::sort(pieces.begin(), pieces.end(), [](const Part& a, const Part& b) {
      return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
    });
    const auto refuse = [&](const std::string& what) {
      return Refuse(path, absl::StrCat("\"", named.first, "\": ", what));
    };
    Entry whole = *files[pieces[0].file].Find(pieces[0].key);
    whole.name = named.first;
    const int64_t rows = ParseKey(pieces[0].key).rows;
    int64_t at = 0;
    for (const Part& piece : pieces) {
      const Entry& entry = *files[piece.file].Find(piece.key);
      const bool alike = entry.dtype == whole.dtype && !entry.shape.empty() &&
                         !whole.shape.empty() &&
                         std::equal(entry.shape.begin() + 1, entry.shape.end(),
                                    whole.shape.begin() + 1, whole.shape.end());
      if (pieces.size() > 1 && (!alike || ParseKey(piece.key).rows != rows)) {
        return refuse(absl::StrCat("pieces that are of no one tensor: ", pieces[0].key, " is ",
                                   TypeOf(*files[pieces[0].file].Find(pieces[0].key)), ", ",
                                   piece.key, " is ", TypeOf(entry)));
      }
      if (piece.begin < at) return refuse(absl::StrCat("row ", piece.begin, " is there twice"));
      if (piece.begin > at) return refuse(absl::StrCat(RowText(at, piece.begin), " are missing"));
      at = piece.end;
    }
    if (rows >= 0 && at < rows) return refuse(absl::StrCat(RowText(at, rows), " are missing"));
    if (rows >= 0) whole.shape[0] = rows;
    entries.push_back(std::move(whole));
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorFiles> TensorFiles::Open(const std::string& path) {
  if (absl::EndsWith(path, ".json")) {
    CHORUS_ASSIGN_OR_RETURN(const HeldBytes text, MapFile(path));
    return OfIndex(path, std::string(text.bytes));
  }
  auto content = std::make_shared<Content>();
  CHORUS_ASSIGN_OR_RETURN(TensorFile file, TensorFile::Open(path));
  content->path = path;
  content->paths = {path};
  content->metadata = file.metadata();
  content->files.push_back(std::move(file));
  CHORUS_RETURN_IF_ERROR(content->Assemble());
  return TensorFiles(std::move(content));
}

absl::StatusOr<TensorFiles> TensorFiles::OfIndex(const std::string& path, const std::string& text) {
  std::string problem;
  const Json index = ParseJsonObject(text, /*depth=*/3, &problem);
  if (!problem.empty()) return Refuse(path, problem);
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) return Refuse(path, "it has no \"weight_map\"");
  auto content = std::make_shared<Content>();
  content->path = path;
  std::map<std::string, size_t> keys;  // how many are to be in each file
  for (const auto& item : map->items()) {
    const auto* const file = item.value().get_ptr<const std::string*>();
    if (file == nullptr || file->empty() || file->find('/') != std::string::npos ||
        file->find('\0') != std::string::npos) {
      return Refuse(path, absl::StrCat("\"", item.key(), "\": expected a file beside the index"));
    }
    ++keys[*file];
  }
  const auto metadata = index.find("metadata");
  const bool has_progress =
      metadata != index.end() && metadata->is_object() && metadata->contains("progress");
  if (has_progress) {
    const Json& progress = (*metadata)["progress"];
    if (!progress.is_object()) return Refuse(path, "its progress are no strings");
    for (const auto& word : progress.items()) {
      if (!word.value().is_string()) return Refuse(path, "its progress are no strings");
      content->metadata[word.key()] = word.value().get<std::string>();
    }
  }
  for (const auto& expected : keys) {
    const std::string file_path = FolderOf(path) + expected.first;
    CHORUS_ASSIGN_OR_RETURN(TensorFile file, TensorFile::Open(file_path));
    for (const Entry& entry : file.entries()) {
      const auto named = map->find(entry.name);
      if (named == map->end() || *named != expected.first) {
        return Refuse(file_path,
                      absl::StrCat("\"", entry.name, "\" is not of this file in ", path));
      }
    }
    if (file.entries().size() != expected.second) {
      return Refuse(file_path, absl::StrCat("expected ", expected.second, " tensors, as ", path,
                                            " says, got ", file.entries().size()));
    }
    if (has_progress && file.metadata() != content->metadata) {
      return Refuse(file_path, absl::StrCat("it was saved with other metadata than ", path));
    }
    content->paths.push_back(file_path);
    content->files.push_back(std::move(file));
  }
  CHORUS_RETURN_IF_ERROR(content->Assemble());
  return TensorFiles(std::move(content));
}

const std::vector<Entry>& TensorFiles::entries() const { return content_->entries; }
const Words& TensorFiles::metadata() const { return content_->metadata; }

const Entry* TensorFiles::Find(const std::string& name) const {
  return TensorFile::FindIn(content_->entries, name);
}

absl::StatusOr<Tensor> TensorFiles::Read(const std::string& name, const DeviceRef& device,
                                         CallSite site) const {
  const Entry* const entry = Find(name);
  if (entry != nullptr && !entry->shape.empty()) {
    return ReadRows(name, 0, entry->shape[0], device, site);
  }
  // Its one piece; or there is none, and the file says so.
  const auto parts = content_->parts.find(name);
  if (parts == content_->parts.end()) return NoTensor(content_->path, name);
  return content_->files[parts->second[0].file].Read(name, device, site);
}

absl::StatusOr<Tensor> TensorFiles::ReadRows(const std::string& name, int64_t begin, int64_t end,
                                             const DeviceRef& device, CallSite site) const {
  const Entry* const entry = Find(name);
  if (entry == nullptr) return NoTensor(content_->path, name);
  if (entry->shape.empty() || begin < 0 || end < begin || end > entry->shape[0]) {
    return BadType(absl::StrCat(content_->path, ": \"", name, "\": ", TypeOf(*entry),
                                " has no rows ", begin, " to ", end - 1));
  }
  int64_t elements = 1;  // of a row
  for (size_t d = 1; d < entry->shape.size(); ++d) elements *= entry->shape[d];
  const auto row_bytes = static_cast<size_t>(elements * DTypeBytes(entry->dtype));
  absl::string_view bytes;  // all of them, in one piece or joined
  std::string joined;
  for (const Part& part : content_->parts.find(name)->second) {
    const int64_t from = std::max(begin, part.begin), to = std::min(end, part.end);
    if (from >= to) continue;
    CHORUS_ASSIGN_OR_RETURN(absl::string_view piece, content_->files[part.file].Bytes(part.key));
    piece = piece.substr(static_cast<size_t>(from - part.begin) * row_bytes,
                         static_cast<size_t>(to - from) * row_bytes);
    if (to - from == end - begin) {
      bytes = piece;
    } else {
      joined.append(piece.data(), piece.size());
      bytes = joined;
    }
  }
  Shape shape = entry->shape;
  shape[0] = end - begin;
  Tensor tensor =
      FromBytes(device, entry->dtype, shape, bytes.data(), (end - begin) * elements, site);
  CHORUS_RETURN_IF_ERROR(tensor.status());
  return tensor;
}

}  // namespace nn
}  // namespace chorus
