#include "core/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/base/error.h"
#include "core/base/unique_fd.h"

namespace chorus {
namespace {

absl::Status OfErrno(const std::string& path, const char* what) {
  const int error = errno;
  const std::string text = absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(error));
  return MakeError(error == ENOENT ? Reason::kUnknownName : Reason::kWrongState, text);
}

absl::Status WriteAll(int fd, absl::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return OfErrno(path, "write");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

// A name that is there until it has taken another one's place.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : path_(path) {}
  ~NewFile() {
    if (fd_.valid()) unlink(temporary_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  absl::Status Write(const std::vector<absl::string_view>& parts) {
    CHORUS_RETURN_IF_ERROR(Create());
    for (const absl::string_view part : parts) {
      CHORUS_RETURN_IF_ERROR(WriteAll(fd_.get(), part, temporary_));
    }
    if (fsync(fd_.get()) != 0) return OfErrno(temporary_, "write");
    if (rename(temporary_.c_str(), path_.c_str()) != 0) return OfErrno(path_, "replace");
    fd_ = UniqueFd();
    // The name is on the disk when its directory is.
    const size_t slash = path_.rfind('/');
    const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const UniqueFd fd(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd.valid() || fsync(fd.get()) != 0) return OfErrno(directory, "write");
    return absl::OkStatus();
  }

 private:
  // Under the first name that nobody has. Others are those of who writes the path at the same time
  // (a process of another container may have this one's pid), or left by one that died.
  absl::Status Create() {
    for (int i = 0; !fd_.valid(); ++i) {
      temporary_ = absl::StrCat(path_, ".new.", i);
      fd_ = UniqueFd(open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (!fd_.valid() && errno != EEXIST) return OfErrno(temporary_, "create");
    }
    return absl::OkStatus();
  }

  const std::string path_;
  std::string temporary_;
  UniqueFd fd_;
};

}  // namespace

HeldBytes Hold(std::string bytes) {
  auto held = std::make_shared<const std::string>(std::move(bytes));
  const absl::string_view view = *held;
  return {std::move(held), view};
}

absl::StatusOr<HeldBytes> MapFile(const std::string& path) {
  // O_NONBLOCK: a pipe that nobody writes is refused, not waited for.
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return OfErrno(path, "open");
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return OfErrno(path, "open");
  if (!S_ISREG(info.st_mode)) return Malformed(absl::StrCat(path, ": it is no file"));
  if (info.st_size == 0) return HeldBytes();
  const auto size = static_cast<size_t>(info.st_size);
  void* const mapped = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (mapped == MAP_FAILED) return OfErrno(path, "map");
  std::shared_ptr<const void> keep(
      mapped, [size](const void* bytes) { munmap(const_cast<void*>(bytes), size); });
  return HeldBytes{std::move(keep), {static_cast<const char*>(mapped), size}};
}

absl::Status ReplaceFile(const std::string& path, const std::vector<absl::string_view>& parts) {
  return NewFile(path).Write(parts);
}

}  // namespace chorus
